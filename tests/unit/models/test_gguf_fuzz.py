"""A fixed sample of some hundred forged GGUF files of the ten-minute fuzzer."""

from pathlib import Path

from tests.attacks.fuzz_gguf import GgufFuzzer


def test_no_forged_file_crashes_the_reader(tmp_path: Path) -> None:
    fuzzer = GgufFuzzer(tmp_path, seed=2024)
    for number in range(150):
        fuzzer.attempt(number)
    outcomes = fuzzer.tally.codes
    assert outcomes["refused"] > 50
    assert outcomes["converted"] > 5

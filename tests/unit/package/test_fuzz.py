"""A fixed sample of some hundred forged packages of the ten-minute fuzzer."""

from pathlib import Path

from tests.attacks.fuzz_reader import ReaderFuzzer
from tests.attacks.test_every_code import documented_codes


def test_no_forged_package_crashes_the_reader(tmp_path: Path) -> None:
    fuzzer = ReaderFuzzer(tmp_path, seed=2024)
    for number in range(250):
        fuzzer.attempt(number)
    codes = fuzzer.tally.codes
    assert set(codes) - {"accepted"} <= documented_codes()
    # The changes reach later checks, and some leave the package valid.
    assert len(codes) > 15 and codes["accepted"] > 0
    assert codes["plain-not-finite"] > 0, "nor are they all found by the hashes of blocks"


def test_an_attempt_is_a_function_of_seed_and_number(tmp_path: Path) -> None:
    first, second = (ReaderFuzzer(tmp_path / name, seed=1) for name in "ab")
    assert [first.attempt(n) for n in (5, 6, 7)] == [second.attempt(n) for n in (5, 6, 7)]

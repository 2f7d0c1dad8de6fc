"""Tests of a report's conclusions from records: the tasks that count, and means over seeds."""

from typing import Any

import pytest

from permille.errors import InputError
from permille_lab.evaluate.report import countable, markdown, paired


def outcome(method: str, correct: str, *, seed: int = 0, validation_loss: float = 1.0) -> dict[str, object]:
    return {
        "method": method,
        "seed": seed,
        "items": [str(n) for n in range(len(correct))],
        "correct": correct,
        "accuracy": correct.count("1") / len(correct),
        "majority": 0.5,
        "validation_loss": validation_loss,
    }


def right(number: int, of: int = 400) -> str:
    return "1" * number + "0" * (of - number)


def test_notes_of_a_method_are_told_by_task() -> None:
    base: dict[str, Any] = {
        "model": "m",
        "base": "bf16",
        "seed": 0,
        "loss": 1.0,
        "on_edge": False,
        "shots": 0.0,
    }
    base |= {"items": ["a", "b", "c"], "cut_examples": 0}
    text = base | {"task": "text", "accuracy": None, "majority": None}
    other = base | {"task": "wsc", "accuracy": 0.5, "majority": 0.5}
    records = [
        line | {"method": method} | changed
        for method, shots in (("zero-shot", 0.0), ("icl:4", 1.5))
        for line, changed in ((text, {"cut_examples": 2, "shots": shots}), (other, {}))
    ]
    again = [record | {"seed": 1} for record in records]
    table = markdown([*records, *again])
    assert "| zero-shot (text: 2 of 3 cut) |" in table
    assert "| icl:4 (text: 1.5 shots fitted, text: 2 of 3 cut, wsc: 0.0 shots fitted) |" in table


def test_a_method_that_lacks_a_cell_has_no_rank() -> None:
    """A rank over fewer cells would depend on which ones are missing."""

    def line(method: str, task: str, loss: float, seed: int = 0) -> dict[str, Any]:
        cell = {"model": "m", "base": "bf16", "task": task, "loss": loss, "on_edge": False, "cut_examples": 0}
        return outcome(method, "1100", seed=seed) | cell

    whole = [
        line(method, task, 1.0, seed)
        for method in ("zo:full", "fo:full")
        for task in ("rte", "wsc")
        for seed in (0, 1)
    ]
    lacking = [line("zo:lora-8", "rte", 0.1, seed) for seed in (0, 1)]
    one_seed = [line("zo:random", task, 0.1) for task in ("rte", "wsc")]
    rows = markdown([*whole, *lacking, *one_seed]).splitlines()
    told = {row.split(" | ")[0].removeprefix("| "): row for row in rows if row.startswith(("| zo", "| fo"))}
    assert told["zo:lora-8"] == "| zo:lora-8 | 50.0 ± 0.0 (0.100) | not measured |  |  |"
    assert told["zo:random"].endswith("|  |  |")
    assert told["zo:full"].endswith("|  | 1.5 |") and told["fo:full"].endswith("|  | 1.5 |")


def test_rows_that_were_left_out_are_told() -> None:
    bad = [f"sst2: train.tsv:{line}: expected a label" for line in (9, 11)]
    assert markdown([], bad) == (
        "Rows of the files that were left out: 2, such as sst2: train.tsv:9: expected a label. "
        "The results name all.\n"
    )


def test_a_task_counts_only_where_first_order_training_clearly_gains() -> None:
    zero_shot = {("zero-shot", "sst2"): [outcome("zero-shot", right(210))]}
    assert countable(zero_shot | {("fo:full", "sst2"): [outcome("fo:full", right(300))]}, "sst2")
    assert countable(zero_shot | {("fo:full", "sst2"): [outcome("fo:full", right(225))]}, "sst2") is False
    assert countable({("fo:full", "sst2"): [outcome("fo:full", right(300))]}, "sst2") is None
    few = {
        ("zero-shot", "sst2"): [outcome("zero-shot", "00")],
        ("fo:full", "sst2"): [outcome("fo:full", "11")],
    }
    assert countable(few, "sst2") is None


def test_the_first_order_method_is_chosen_by_validation_not_by_its_test_items() -> None:
    lucky = {
        ("zero-shot", "sst2"): [outcome("zero-shot", right(210))],
        ("fo:full", "sst2"): [outcome("fo:full", right(225), validation_loss=0.5)],
        ("fo:lora-8", "sst2"): [outcome("fo:lora-8", right(300), validation_loss=0.9)],
    }
    assert not countable(lucky, "sst2")


def test_seeds_are_averaged_item_by_item() -> None:
    first = [outcome("a", "110", seed=0), outcome("a", "100", seed=1)]
    one_N, other_N, cluster_N = paired(first, [outcome("b", "011")])
    assert one_N.tolist() == [1.0, 0.5, 0.0]
    assert other_N.tolist() == [0.0, 1.0, 1.0]
    assert len(set(cluster_N.tolist())) == 3
    # The passages of one record are enough, regardless of which record has them.
    named = outcome("b", "011") | {"groups": ["p", "p", "q"]}
    assert paired(first, [named])[2].tolist() == ["p", "p", "q"]
    assert paired([first[0], first[1] | {"groups": ["p", "p", "q"]}], [outcome("b", "011")])[2].tolist() == [
        "p",
        "p",
        "q",
    ]
    twice = outcome("b", "01") | {"items": ["x", "x"]}
    with pytest.raises(InputError, match="twice"):
        paired(first, [twice])

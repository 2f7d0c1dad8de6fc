"""Tests of the verdicts on claims: each can hold or fail, and missing data leaves it undecided."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from permille.errors import InputError
from permille_lab.evaluate.contrasts import Contrast, Record, contrast
from permille_lab.evaluate.statistics import holm_adjusted
from permille_lab.evidence import claims
from permille_lab.evidence.claims import Row, Verdict, counted_tasks, verdicts
from permille_lab.evidence.paper_claims import CLAIMS, Relation

ITEMS = 400
SEEDS = (0, 1, 2, 3, 4)
LUCK = np.random.default_rng(0)
# Difficulty of each item, the same for all methods, in spite of the name.
EASE = LUCK.random(ITEMS)


def records(method: str, share: float, seeds: Sequence[int] = SEEDS, **changed: Any) -> list[Record]:
    """Return one record per seed. Items with a difficulty below `share` are right, up to noise of 0.01."""
    found: list[Record] = []
    for seed in seeds:
        rng = np.random.default_rng([seed, len(method), sum(map(ord, method))])
        right = (share + 0.01 * rng.standard_normal(ITEMS)) > EASE
        losses = 1 - share + 0.3 * EASE + 0.01 * rng.standard_normal(ITEMS)
        found.append(
            {
                "model": "m",
                "base": "bf16",
                "method": method,
                "task": "sst2",
                "seed": seed,
                "items": [str(n) for n in range(ITEMS)],
                "correct": "".join("01"[int(one)] for one in right),
                "item_losses": losses.tolist(),
                "loss": float(losses.mean()),
                "accuracy": float(right.mean()),
                "majority": 0.5,
                "validation_loss": 1 - share,
                "stage": "table",
                "density": 0.001,
                "queries": 16,
            }
            | changed
        )
    return found


REFERENCES = [*records("zero-shot", 0.5, (0,)), *records("fo:lora-8", 0.8)]
FOUR_BIT: dict[str, Any] = {"base": "nf4"}


def row_of(key: str, found: Sequence[Record], references: Sequence[Record] = REFERENCES) -> Row:
    (row,) = [row for row in verdicts([*references, *found]) if row.claim.key == key]
    return row


PAIRS: dict[str, Callable[[float, float], list[Record]]] = {
    "sensitive-random": lambda a, b: records("zo:sensitive-c4", a) + records("zo:random", b),
    "sensitive-outliers": lambda a, b: records("zo:sensitive-c4", a) + records("zo:outliers", b),
    "c4-task": lambda a, b: records("zo:sensitive-c4", a) + records("zo:sensitive-task", b),
    "four-bit": lambda a, b: records("zo:sensitive-c4", a, **FOUR_BIT) + records("zo:full", b),
    "four-bit-lora-8": lambda a, b: (
        records("zo:sensitive-c4", a, **FOUR_BIT) + records("zo:lora-8", b, **FOUR_BIT)
    ),
    "four-bit-prefix-real-5": lambda a, b: (
        records("zo:sensitive-c4", a, **FOUR_BIT) + records("zo:prefix-real-5", b, **FOUR_BIT)
    ),
    "queries-sensitive-c4": lambda a, b: (
        records("zo:sensitive-c4", a, stage="queries", queries=4)
        + records("zo:sensitive-c4", b, stage="queries", queries=1)
    ),
    "queries-lora-fa-8": lambda a, b: (
        records("zo:lora-fa-8", a, stage="queries", queries=4)
        + records("zo:lora-fa-8", b, stage="queries", queries=1)
    ),
    "lora-fa-lora-16": lambda a, b: records("zo:lora-fa-16", a) + records("zo:lora-16", b),
    "static": lambda a, b: records("zo:sensitive-task-segments", a) + records("zo:sensitive-task-dynamic", b),
}


def test_every_claim_has_a_pair_here() -> None:
    assert PAIRS.keys() == {claim.key for claim in CLAIMS}


@pytest.mark.parametrize("key", PAIRS)
def test_a_claim_holds_where_the_first_is_clearly_better_or_equal(key: str) -> None:
    relation = {claim.key: claim.relation for claim in CLAIMS}[key]
    row = row_of(key, PAIRS[key](0.7, 0.7 if relation is Relation.WITHIN else 0.6))
    assert row.verdict is Verdict.HOLDS
    assert not row.by_loss
    assert row.p_value is not None and row.p_value < 0.05
    assert row.found is not None and row.found.clusters == ITEMS and row.found.seeds == 5


@pytest.mark.parametrize("key", PAIRS)
def test_a_claim_fails_where_the_first_is_clearly_worse(key: str) -> None:
    row = row_of(key, PAIRS[key](0.6, 0.7))
    assert row.verdict is Verdict.FAILS
    assert row.found is not None and row.found.effect == pytest.approx(-0.1, abs=0.03)
    assert row.interval is not None and row.interval[0] < row.found.effect < row.interval[1] < 0


@pytest.mark.parametrize("key", PAIRS)
def test_one_seed_decides_nothing(key: str) -> None:
    found = [record for record in PAIRS[key](0.9, 0.6) if record["seed"] == 0]
    row = row_of(key, found)
    assert row.verdict is Verdict.UNDECIDED
    assert "seeds" in row.reason


@pytest.mark.parametrize("key", ["c4-task", "four-bit", "static"])
def test_equality_needs_five_seeds(key: str) -> None:
    found = [record for record in PAIRS[key](0.7, 0.7) if record["seed"] < 4]
    row = row_of(key, found)
    assert row.verdict is Verdict.UNDECIDED
    assert row.reason == "needs 5 seeds that all its tasks have, has 4"


@pytest.mark.parametrize("key", PAIRS)
def test_a_task_with_too_few_seeds_takes_no_verdict_from_the_others(key: str) -> None:
    """The task has its own row with three seeds, and none with two.

    The row does not count for claims that three seeds cannot decide.
    """
    of_five = PAIRS[key](0.7, 0.7 if key == "c4-task" else 0.6)
    of_two = [dict(record) | {"task": "boolq"} for record in of_five if record["seed"] < 2]
    references = [dict(record) | {"task": "boolq"} for record in REFERENCES]
    row = row_of(key, [*of_five, *of_two], [*REFERENCES, *references])
    assert row.verdict is Verdict.HOLDS
    assert row.found is not None and (row.found.tasks, row.found.seeds) == (("sst2",), 5)
    of_three = [dict(record) | {"task": "boolq"} for record in of_five if record["seed"] < 3]
    rows = [r for r in verdicts([*REFERENCES, *references, *of_five, *of_three]) if r.claim.key == key]
    found = [(r.found.tasks, r.found.seeds) for r in rows if r.found is not None]
    assert found == [(("sst2",), 5), (("boolq",), 3)]
    better = row.claim.relation is Relation.BETTER
    assert [r.counts for r in rows] == [True, better]
    assert {r.verdict for r in rows if r.counts} == {Verdict.HOLDS}
    if not better:
        assert (rows[1].verdict, rows[1].p_value) == (Verdict.UNDECIDED, None)
        assert rows[1].reason == "needs 5 seeds that all its tasks have, has 3"
        # Without other tasks, the row counts.
        (alone,) = (r for r in verdicts([*references, *of_three]) if r.claim.key == key)
        assert alone.counts


@pytest.mark.parametrize("key", PAIRS)
def test_few_items_decide_nothing(key: str) -> None:
    few = [
        record | {"items": record["items"][:20], "correct": record["correct"][:20]}
        for record in (dict(record) for record in [*REFERENCES, *PAIRS[key](0.9, 0.2)])
    ]
    for record in few:
        record["item_losses"] = record["item_losses"][:20]
    row = row_of(key, few, references=())
    assert row.verdict is Verdict.UNDECIDED


def test_no_records_leave_every_claim_undecided() -> None:
    rows = verdicts([])
    assert [row.claim for row in rows] == list(CLAIMS)
    assert {row.verdict for row in rows} == {Verdict.UNDECIDED}
    assert all(row.reason and row.p_value is None for row in rows)


@pytest.mark.parametrize("key", ["c4-task", "static", "four-bit"])
def test_methods_that_learned_nothing_are_no_equals(key: str) -> None:
    row = row_of(key, PAIRS[key](0.5, 0.5))
    assert row.verdict is Verdict.UNDECIDED
    assert "learned something" in row.reason


def test_noise_is_no_advantage_and_no_equality() -> None:
    """Random differences of about the margin prove neither an advantage nor equality."""
    rng = np.random.default_rng(1)

    def noisy(method: str) -> list[Record]:
        found = []
        for record in records(method, 0.7):
            right = rng.random(ITEMS) < 0.7
            found.append(dict(record) | {"correct": "".join("01"[int(one)] for one in right)})
        return list(found)

    for key, second in (("sensitive-random", "zo:random"), ("c4-task", "zo:sensitive-task")):
        row = row_of(key, noisy("zo:sensitive-c4") + noisy(second))
        assert row.verdict is Verdict.UNDECIDED, key
        assert row.reason.endswith("more items or seeds")
        assert row.found is not None and row.interval is not None
        # The effect decides what seems to hold. Its distance from the margin says how much data is missing.
        inside = row.found.effect > 0 if key == "sensitive-random" else abs(row.found.effect) < 0.01
        assert row.reason.startswith("seems to hold" if inside else "seems to fail")
        if key == "c4-task":
            half, distance = (row.interval[1] - row.interval[0]) / 2, abs(0.01 - abs(row.found.effect))
            wanted = float(row.reason.partition("an interval ")[2].partition(" times")[0])
            assert half / distance <= wanted < half / distance + 0.11


def test_a_seed_that_is_luck_widens_the_interval() -> None:
    """Over 400 items, the first method is better.

    But only one seed of three is far above, so it is not proved.
    """
    lucky = [*records("zo:sensitive-c4", 0.6, (0, 1)), *records("zo:sensitive-c4", 0.99, (2,))]
    row = row_of("sensitive-random", [*lucky, *records("zo:random", 0.6, (0, 1, 2))])
    assert row.found is not None and row.found.effect > 0.1
    assert row.verdict is Verdict.UNDECIDED


def test_where_the_task_cannot_be_done_losses_are_compared() -> None:
    undone = [*records("zero-shot", 0.5, (0,)), *records("fo:lora-8", 0.52)]
    row = row_of("sensitive-random", PAIRS["sensitive-random"](0.7, 0.6), undone)
    assert row.by_loss
    assert row.verdict is Verdict.HOLDS
    assert row.found is not None and row.found.effect == pytest.approx(0.1, abs=0.01)
    assert counted_tasks(undone, "m") == {"sst2": False}
    assert counted_tasks(REFERENCES, "m") == {"sst2": True}


def test_language_modelling_has_rows_of_its_own_and_needs_no_first_order_reference() -> None:
    blank: dict[str, Any] = {"task": "text", "accuracy": None, "majority": None}
    found = [*PAIRS["sensitive-random"](0.7, 0.6), *REFERENCES]
    own = [dict(record) | blank for record in PAIRS["sensitive-random"](0.5, 0.7)]
    assert counted_tasks(own, "m") == {"text": False}
    rows = [row for row in verdicts([*found, *own]) if row.claim.key == "sensitive-random"]
    assert [(row.by_loss, row.verdict) for row in rows] == [(False, Verdict.HOLDS), (True, Verdict.FAILS)]
    assert [row.found.tasks for row in rows if row.found is not None] == [("sst2",), ("text",)]


def test_tasks_are_judged_on_16_bits_where_these_are_there() -> None:
    """With 4 bits nothing is learned, with 16 bits much is. The records of 4 bits come first."""
    four_bit = [*records("zero-shot", 0.5, (0,), **FOUR_BIT), *records("fo:lora-8", 0.5, **FOUR_BIT)]
    assert counted_tasks(four_bit, "m") == {"sst2": False}
    assert counted_tasks([*four_bit, *REFERENCES], "m") == {"sst2": True}


def test_a_masks_ceiling_does_not_say_that_a_task_cannot_be_done() -> None:
    zero_shot = records("zero-shot", 0.5, (0,))
    assert counted_tasks([*zero_shot, *records("fo:sensitive-c4", 0.5)], "m") == {}
    assert counted_tasks([*zero_shot, *records("fo:sensitive-c4", 0.8)], "m") == {"sst2": True}


@pytest.mark.parametrize("references", [[], REFERENCES[:1], REFERENCES[1:]])
def test_without_references_it_is_not_known_what_to_compare(references: list[Record]) -> None:
    row = row_of("sensitive-random", PAIRS["sensitive-random"](0.7, 0.6), references)
    assert row.verdict is Verdict.UNDECIDED
    assert "references" in row.reason


def test_claims_are_adjusted_for_all_their_rows() -> None:
    assert holm_adjusted([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])
    clear = PAIRS["sensitive-random"](0.7, 0.6)
    alone = row_of("sensitive-random", clear).p_value
    other = [dict(record) | {"model": "n"} for record in [*REFERENCES, *clear]]
    both = [row for row in verdicts([*REFERENCES, *clear, *other]) if row.claim.key == "sensitive-random"]
    assert [row.model for row in both] == ["m", "n"]
    assert alone is not None
    assert both[0].p_value == pytest.approx(2 * alone)


def test_a_look_before_the_last_seeds_costs_its_share_of_the_error() -> None:
    found = [*REFERENCES, *PAIRS["sensitive-random"](0.7, 0.6)]
    once, twice, named = (
        next(row for row in verdicts(found, looks=looks) if row.claim.key == "sensitive-random")
        for looks in ({}, {"sensitive-random": 2}, {"static": 2})
    )
    assert once.p_value is not None and once.p_failing is not None
    assert twice.p_value == pytest.approx(2 * once.p_value)
    assert twice.p_failing == pytest.approx(min(1.0, 2 * once.p_failing))
    assert named.p_value == once.p_value


def test_a_set_without_a_mask_stands_beside_every_density() -> None:
    own = [*records("zero-shot", 0.5, (0,), **FOUR_BIT), *records("fo:lora-8", 0.8, **FOUR_BIT)]
    own += records("zo:sensitive-c4", 0.7, **FOUR_BIT, density=0.01)
    own += records("zo:lora-8", 0.6, **FOUR_BIT)
    rows = {row.claim.key: row for row in verdicts(own) if row.found is not None}
    assert rows["four-bit-lora-8"].density == 0.01
    assert rows["four-bit-lora-8"].verdict is Verdict.HOLDS


def found_contrast(effect: float, error: float) -> Contrast:
    return Contrast(effect=effect, error=error, freedom=400.0, clusters=ITEMS, seeds=5, tasks=("sst2",))


def judged_rows(monkeypatch: pytest.MonkeyPatch, key: str, found: Sequence[tuple[float, float]]) -> list[Row]:
    """Return the claim's rows, one per model, with these effects and standard errors."""
    pairs = [
        record | {"model": str(n)} for n in range(len(found)) for record in map(dict, PAIRS[key](0.7, 0.6))
    ]
    references = [record | {"model": str(n)} for n in range(len(found)) for record in map(dict, REFERENCES)]
    contrasts = iter(found)
    monkeypatch.setattr(claims, "contrast", lambda *_, **__: found_contrast(*next(contrasts)))
    monkeypatch.setattr(claims, "_learned", lambda *_: True)
    return verdicts([*references, *pairs], [c for c in CLAIMS if c.key == key])


def test_what_is_surely_better_by_less_than_the_margin_does_not_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One row's interval lies between 0 and the margin.

    Because of the claim's other rows, its adjusted p-value is above 5%.
    """
    rows = judged_rows(monkeypatch, "sensitive-random", [(0.005, 0.0024)] + 3 * [(0.0, 0.05)])
    assert rows[0].interval is not None and 0 < rows[0].interval[0] < rows[0].interval[1] < rows[0].margin
    assert rows[0].p_value is not None and rows[0].p_value > 0.05
    assert rows[0].verdict is Verdict.UNDECIDED
    (alone,) = judged_rows(monkeypatch, "sensitive-random", [(0.003, 0.002)])
    assert alone.verdict is Verdict.FAILS  # the interval includes 0 and excludes the margin


@pytest.mark.parametrize(
    ("key", "effect"), [("sensitive-random", -0.012), ("static", -0.032), ("c4-task", -0.032)]
)
def test_failing_is_adjusted_for_all_rows_as_well(
    key: str, effect: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An effect that refutes a single row does not refute one of ten rows."""
    (alone,) = judged_rows(monkeypatch, key, [(effect, 0.01)])
    assert alone.verdict is Verdict.FAILS
    rows = judged_rows(monkeypatch, key, [(effect, 0.01), *(9 * [(0.0, 0.05)])])
    assert {row.verdict for row in rows} == {Verdict.UNDECIDED}


@pytest.mark.parametrize("key", ["static", "four-bit", "c4-task"])
def test_what_is_behind_by_less_than_the_margin_fails_nothing(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (row,) = judged_rows(monkeypatch, key, [(-0.008, 0.0001)])
    assert row.verdict is Verdict.HOLDS
    (row,) = judged_rows(monkeypatch, key, [(-0.008, 0.003)])
    assert row.verdict is Verdict.UNDECIDED


def test_a_side_of_two_is_not_refuted_at_five_percent_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """The effect is 1.8 standard errors beyond the margin: p is 3.6% one-sided and 7.3% two-sided."""
    (row,) = judged_rows(monkeypatch, "c4-task", [(0.028, 0.01)])
    assert row.verdict is Verdict.UNDECIDED


def test_the_number_of_queries_is_said_beforehand() -> None:
    """A better result with another number of queries decides nothing."""
    lucky = records("zo:sensitive-c4", 0.95, stage="queries", queries=16)
    several = records("zo:sensitive-c4", 0.6, stage="queries", queries=4)
    single = records("zo:sensitive-c4", 0.6, stage="queries", queries=1)
    row = row_of("queries-sensitive-c4", [*lucky, *several, *single])
    assert row.found is not None and abs(row.found.effect) < 0.02
    assert row_of("queries-sensitive-c4", [*lucky, *single]).found is None


def test_items_of_one_passage_are_one() -> None:
    """A hundred passages of four items count as a hundred items. Twenty passages decide nothing."""
    alone = PAIRS["sensitive-random"](0.7, 0.6)

    def on_passages(number: int) -> list[Record]:
        """Return the records with `number` passages. Items of similar difficulty share a passage."""
        place_I = np.argsort(np.argsort(EASE)) * number // ITEMS
        return [
            record | {"groups": [f"passage {place}" for place in place_I.tolist()]}
            for record in map(dict, [*REFERENCES, *alone])
        ]

    wide, narrow = (
        row_of("sensitive-random", on_passages(100)),
        row_of("sensitive-random", [*REFERENCES, *alone]),
    )
    assert wide.found is not None and narrow.found is not None
    assert (wide.found.clusters, narrow.found.clusters) == (100, ITEMS)
    assert wide.found.effect == narrow.found.effect
    assert wide.found.error > narrow.found.error
    few = row_of("sensitive-random", on_passages(20))
    assert (few.verdict, few.p_value) == (Verdict.UNDECIDED, None)


@pytest.mark.parametrize("key", PAIRS)
def test_records_of_two_floating_bases_are_not_mixed(key: str) -> None:
    """The records of the other base contradict the claim and have fewer seeds, so they are left out."""
    found = PAIRS[key](0.7, 0.7 if key == "c4-task" else 0.6)
    contrary = [
        record | {"base": "float32"}
        for record in map(dict, PAIRS[key](0.5, 0.9))
        if record["base"] == "bf16" and record["seed"] < 4
    ]
    alone, both = row_of(key, found), row_of(key, [*found, *contrary])
    assert (both.verdict, both.found) == (Verdict.HOLDS, alone.found)


def test_stages_that_show_where_a_claim_turns_do_not_decide_it() -> None:
    at_tenth = [
        dict(record) | {"stage": "fractions", "density": 0.1}
        for record in PAIRS["sensitive-random"](0.6, 0.7)
    ]
    found = [*REFERENCES, *PAIRS["sensitive-random"](0.7, 0.6), *at_tenth]
    assert row_of("sensitive-random", found).verdict is Verdict.HOLDS
    rows = verdicts(found, CLAIMS[:1], stages=("fractions",))
    assert [(row.density, row.verdict) for row in rows] == [(0.1, Verdict.FAILS)]


def test_a_contrast_counts_the_spread_of_items_and_of_seeds() -> None:
    """Compare with numpy on differences written by hand, items by seeds: d = [[1, 0], [0, 0], [1, 1]]."""

    def record(method: str, seed: int, correct: str) -> Record:
        return {"method": method, "task": "t", "seed": seed, "items": ["a", "b", "c"], "correct": correct}

    first = [record("x", 0, "101"), record("x", 1, "001")]
    second = [record("y", 0, "000"), record("y", 1, "000")]
    found = contrast(first, second, by_loss=False)
    assert found is not None
    item_variance = np.var([0.5, 0, 1], ddof=1) / 3
    seed_variance = np.var([2 / 3, 1 / 3], ddof=1) / 2
    assert found.effect == pytest.approx(0.5)
    assert found.error == pytest.approx(np.sqrt(item_variance + seed_variance))
    freedom = (item_variance + seed_variance) ** 2 / (item_variance**2 / 2 + seed_variance**2 / 1)
    assert found.freedom == pytest.approx(freedom)
    assert contrast(first, [], by_loss=False) is None
    with pytest.raises(InputError, match="one record a seed"):
        contrast([*first, first[0]], second, by_loss=False)


def test_tasks_share_the_luck_of_a_seed() -> None:
    """A seed's effect that both tasks share is not averaged out."""

    def differing(task: str, luck: Sequence[float]) -> tuple[list[Record], list[Record]]:
        first = [dict(r, task=task) for r in records("zo:sensitive-c4", 0.7)]
        second = [dict(r, task=task) for r in records("zo:random", 0.7)]
        for record, extra in zip(first, luck, strict=True):
            record["item_losses"] = [loss + extra for loss in record["item_losses"]]
        return list(first), list(second)

    luck = (0.5, -0.5, 0.3, -0.3, 0.0)
    one = differing("sst2", luck)
    same, opposite = differing("rte", luck), differing("rte", [-extra for extra in luck])
    alone = contrast(*one, by_loss=True)
    shared = contrast(one[0] + same[0], one[1] + same[1], by_loss=True)
    cancelled = contrast(one[0] + opposite[0], one[1] + opposite[1], by_loss=True)
    assert alone is not None and shared is not None and cancelled is not None
    assert shared.error == pytest.approx(alone.error, rel=0.01)
    assert cancelled.error < 0.05 * alone.error
    fewer = contrast(one[0] + same[0][:3], one[1] + same[1], by_loss=True)
    common = contrast(one[0][:3] + same[0][:3], one[1] + same[1], by_loss=True)
    assert fewer is not None and common is not None
    assert (fewer.seeds, fewer.effect, fewer.error) == (3, common.effect, common.error)
    apart = contrast(one[0][:2] + same[0][2:], one[1] + same[1], by_loss=True)
    assert apart is None

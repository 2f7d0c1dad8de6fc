"""Verdicts on the papers' claims from the records of sweeps: holds, fails, or undecided.

The effect is the advantage of the first method, and the margin is that of `Row.margin`.

- BETTER holds if the effect is above 0, two-sided. It fails if an effect of the margin or more is excluded,
  two-sided, and the 95% interval is not wholly above 0.
- AT LEAST holds if an effect of -margin or less is excluded, one-sided. It fails if an effect of -margin or
  more is excluded, two-sided.
- WITHIN consists of two one-sided tests. It holds if the 90% interval is within the margin. It fails if the
  effect is beyond the margin on one side, two-sided.

Both "holds" and "fails" are tested at 5% after Holm's correction over all rows of the claim. If seeds were
added after a look at the outcome, each p-value is first multiplied by the number of looks (Bonferroni).

A row is one model at one density. Accuracies count only for tasks that tuned first-order training can do
(`report.countable`). For other tasks the losses of the right answers are compared, in a separate row.
Language modelling has a separate row, too.

A verdict needs `MIN_SEEDS` seeds (`EQUIVALENCE_SEEDS` for AT LEAST and WITHIN) and `MIN_CLUSTERS` clusters of
items (a cluster is a passage or text). Tasks with at least `EQUIVALENCE_SEEDS` seeds are not pooled with
tasks that have fewer, because only common seeds would count. The tasks with fewer seeds have a separate row.
If these seeds are too few for the claim's relation, the row is shown but does not count for the claim.

If neither method learned anything, they are not evidence for equality. AT LEAST and WITHIN are therefore
decided only if the second method beats its untrained base at 5%. AT LEAST is also decided if the first method
is better than the second.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType

from permille_lab.evaluate.contrasts import Contrast, Record, contrast
from permille_lab.evaluate.methods import SPARSE, method
from permille_lab.evaluate.report import MIN_CLUSTERS, countable
from permille_lab.evaluate.statistics import EQUIVALENCE_MARGIN, holm_adjusted
from permille_lab.evidence.paper_claims import CLAIMS, FLOATING, Claim, Relation
from permille_lab.tasks.examples import Task

ALPHA = 0.05
MANY_TIMES = 100
"""If an interval would have to be narrower by more than this factor, the effect counts as on the border."""
MIN_SEEDS = 3
EQUIVALENCE_SEEDS = 5
LOSS_MARGIN = 0.01
"""Margin in nats per token."""

DECIDING = ("table", "flat")
"""Stages that decide claims. Other stages show how the outcome depends on the density."""


_UNBOUND = ("fo:lora-", "fo:full")
"""First-order references that train many numbers. If they fail, the task is too hard for the model.

A failure of first-order training of a mask does not show that.
"""


class Verdict(StrEnum):
    """The verdict on a claim."""

    HOLDS = "holds"
    FAILS = "fails"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One comparison of a claim.

    Attributes:
        by_loss: True if losses in nats per token are compared, False for accuracies.
        found: the contrast, None if the records cannot be compared.
        p_value: p-value of the test that makes the claim hold, after Holm. None if nothing was tested.
        p_failing: p-value of the test that makes the claim fail, after Holm. None if nothing was tested.
        reason: what is missing for a verdict, or a note on it. May be empty.
        counts: False if the row is shown but does not count for the claim.
    """

    claim: Claim
    model: str
    density: float
    by_loss: bool
    found: Contrast | None
    p_value: float | None
    verdict: Verdict
    reason: str
    counts: bool = True
    p_failing: float | None = None

    @property
    def margin(self) -> float:
        """The margin in the row's unit."""
        return LOSS_MARGIN if self.by_loss else EQUIVALENCE_MARGIN

    @property
    def interval(self) -> tuple[float, float] | None:
        """The confidence interval: 90% for WITHIN, else 95%."""
        if self.found is None:
            return None
        return self.found.interval(0.9 if self.claim.relation is Relation.WITHIN else 0.95)


def verdicts(
    records: Iterable[Record],
    claims: Sequence[Claim] = CLAIMS,
    *,
    stages: Collection[str] = DECIDING,
    looks: Mapping[str, int] = MappingProxyType({}),
    losses: bool = False,
) -> list[Row]:
    """Return a row for each claim, model, density and kind of outcome. Each claim has at least one row.

    Args:
        records: cells of results files, with the `stage`, `density` and `queries` of their sweeps.
        stages: stages whose records decide claims without a stage. References (zero-shot and first order)
            come from all stages.
        looks: number of looks at the outcome of a claim, the last one included, by the claim's key. The
            default is 1.
        losses: if True, compare the losses of every task, also where accuracies count.
    """
    known = list(records)
    return [row for claim in claims for row in _rows(claim, known, stages, looks.get(claim.key, 1), losses)]


def counted_tasks(records: Sequence[Record], model: str) -> dict[str, bool]:
    """Return for each task of a model whether its accuracies count (see `report.countable`).

    The answer comes from one base that has both references: zero-shot and first-order training. Bases that
    are not quantized are preferred. A task without references is left out. A task is also left out if only
    first-order training of masked weights failed. Language modelling has no accuracies.
    """
    own = [record for record in records if record["model"] == model]
    found: dict[str, bool] = {}
    for task in dict.fromkeys(record["task"] for record in own):
        if task == Task.TEXT:
            found[task] = False
            continue
        for base in sorted({record["base"] for record in own}, key=lambda base: (base not in FLOATING, base)):
            rows: dict[tuple[str, str], list[Record]] = {}
            for record in own:
                if (record["task"], record["base"]) == (task, base):
                    name, setting = record["method"], (record["stage"], record["density"], record["queries"])
                    key = name if name == "zero-shot" else f"{name} {setting}"
                    rows.setdefault((key, task), []).append(record)
            if ("zero-shot", task) in rows and any(name.startswith("fo:") for name, _ in rows):
                counts = countable(_plain(rows), task)
                if counts or (counts is False and any(name.startswith(_UNBOUND) for name, _ in rows)):
                    found[task] = counts
                break
    return found


def _rows(
    claim: Claim, records: Sequence[Record], stages: Collection[str], looks: int, losses: bool
) -> list[Row]:
    pairs = []
    for model in dict.fromkeys(record["model"] for record in records):
        counted = counted_tasks(records, model)
        own = [record for record in records if record["model"] == model]
        for by_loss, text in ((False, False), (True, False), (True, True)):
            tasks = {task for task, counts in counted.items() if (counts and not losses) is not by_loss}
            of_kind = [r for r in own if r["task"] in tasks and (r["task"] == Task.TEXT) is text]
            pairs += [
                (model, density, by_loss, first, second, of_kind)
                for density, first, second in _matched(claim, of_kind, stages)
            ]
    rows = [
        replace(
            _tested(
                _undecided(claim, model, density, by_loss=by_loss, reason=""),
                mine,
                theirs,
                of_kind,
            ),
            counts=counts,
        )
        for model, density, by_loss, first, second, of_kind in pairs
        for mine, theirs, counts in _by_seeds(claim, first, second)
    ]
    if not rows:
        nothing = "needs both methods at one density, and the task's zero-shot and first-order references"
        return [_undecided(claim, "", 0.0, by_loss=False, reason=nothing)]
    tested = [(row.p_value, _p_failing(row)) for row in rows if row.p_value is not None]
    holding = iter(holm_adjusted([min(1.0, looks * holds) for holds, _ in tested]))
    failing = iter(holm_adjusted([min(1.0, looks * fails) for _, fails in tested]))
    return [
        _judged(replace(row, p_value=next(holding), p_failing=next(failing)))
        if row.p_value is not None
        else row
        for row in rows
    ]


def _matched(
    claim: Claim, records: Sequence[Record], stages: Collection[str]
) -> list[tuple[float, list[Record], list[Record]]]:
    """Return the density and the records of both sides, for each density that both sides have.

    Both sides have the same base, unless the first side has 4 bits. Methods without a mask have the density
    of their sweep in their records, but it does not apply to them. They are compared at every density.
    """
    wanted = stages if claim.stage is None else {claim.stage}
    kept = [record for record in records if record["stage"] in wanted]
    first = [record for record in kept if claim.first.takes(record)]
    second = [record for record in kept if claim.second.takes(record)]
    found = []
    for density in sorted({record["density"] for record in first}):
        mine = _once([record for record in first if record["density"] == density])
        maskless = method(claim.second.method).trained not in SPARSE
        bases = {(record["task"], record["base"]) for record in mine}
        theirs = _once(
            [
                record
                for record in second
                if (maskless or record["density"] == density)
                and (claim.first.four_bit or (record["task"], record["base"]) in bases)
            ]
        )
        if mine and theirs:
            found.append((density, mine, theirs))
    return found


def _once(records: Sequence[Record]) -> list[Record]:
    """Return one record for each task and seed: that of the setting with the most seeds.

    The choice must not depend on outcomes of test items.
    """
    settings: dict[str, dict[tuple[str, int, str], list[Record]]] = {}
    for record in records:
        setting = (record["stage"], record["queries"], record["base"])
        settings.setdefault(record["task"], {}).setdefault(setting, []).append(record)
    chosen: list[Record] = []
    for of_task in settings.values():
        chosen += of_task[min(of_task, key=lambda setting: (-len(of_task[setting]), setting))]
    return chosen


def _tested(blank: Row, first: Sequence[Record], second: Sequence[Record], records: Sequence[Record]) -> Row:
    """Return the row with its contrast and p-value, or with the reason why it cannot be tested.

    Args:
        records: all records of the model and kind of outcome, with the references.
    """
    claim, by_loss = blank.claim, blank.by_loss
    wanted = MIN_SEEDS if claim.relation is Relation.BETTER else EQUIVALENCE_SEEDS
    found = contrast(first, second, by_loss=by_loss)
    blank = replace(blank, found=found)
    if found is None or found.seeds < wanted:
        common = set.intersection(*_common_seeds(first, second).values())
        return replace(blank, reason=f"needs {wanted} seeds that all its tasks have, has {len(common)}")
    if found.clusters < MIN_CLUSTERS:
        return replace(blank, reason=f"needs {MIN_CLUSTERS} passages or texts, has {found.clusters}")
    ahead = claim.relation is Relation.AT_LEAST and found.interval(0.95)[0] > 0
    if not (claim.relation is Relation.BETTER or ahead or _learned(second, records, by_loss)):
        return replace(blank, reason=f"needs a {claim.second.method} that learned something: equals at "
                       "nothing are no evidence")  # fmt: skip
    return replace(blank, p_value=_p_value(claim, found, blank.margin))


def _by_seeds(
    claim: Claim, first: list[Record], second: list[Record]
) -> list[tuple[list[Record], list[Record], bool]]:
    """Return the records of both sides for each row, and whether the row counts.

    Tasks with at least `EQUIVALENCE_SEEDS` common seeds are one row, and those with at least `MIN_SEEDS` are
    another. If no task has so many seeds, all tasks are one row.
    """
    common = {task: len(seeds) for task, seeds in _common_seeds(first, second).items()}
    many = {task for task, count in common.items() if count >= EQUIVALENCE_SEEDS}
    few = {task for task, count in common.items() if MIN_SEEDS <= count < EQUIVALENCE_SEEDS}
    groups = [group for group in (many, few) if group] or [set(common)]
    return [
        (
            [r for r in first if r["task"] in group],
            [r for r in second if r["task"] in group],
            group is not few or not many or claim.relation is Relation.BETTER,
        )
        for group in groups
    ]


def _common_seeds(first: Sequence[Record], second: Sequence[Record]) -> dict[str, set[int]]:
    """Return the seeds that both sides have, by task."""
    return {
        task: {r["seed"] for r in first if r["task"] == task}
        & {r["seed"] for r in second if r["task"] == task}
        for task in {record["task"] for record in first}
    }


def _p_value(claim: Claim, found: Contrast, margin: float) -> float:
    match claim.relation:
        case Relation.BETTER:
            return min(1.0, 2 * found.p_above(0.0))
        case Relation.AT_LEAST:
            return found.p_above(-margin)
        case Relation.WITHIN:
            return max(found.p_above(-margin), found.p_below(margin))


def _p_failing(row: Row) -> float:
    """Return the p-value of the test that makes the claim fail."""
    found = row.found
    assert found is not None  # it was tested
    match row.claim.relation:
        case Relation.BETTER:
            return min(1.0, 2 * found.p_below(row.margin))
        case Relation.AT_LEAST:
            return min(1.0, 2 * found.p_below(-row.margin))
        case Relation.WITHIN:
            return min(1.0, 2 * min(found.p_above(row.margin), found.p_below(-row.margin)))


def _judged(row: Row) -> Row:
    assert row.found is not None and row.interval is not None  # it was tested
    assert row.p_value is not None and row.p_failing is not None
    low, high = row.interval
    if row.p_value < ALPHA:
        return replace(row, verdict=Verdict.HOLDS)
    fails = row.p_failing < ALPHA and row.found.error > 0
    match row.claim.relation:
        case Relation.BETTER:
            fails = fails and low <= 0
            note = "worse" if high < 0 else "an advantage of the margin is excluded"
        case Relation.AT_LEAST:
            note = "behind by more than the margin"
        case Relation.WITHIN:
            note = "better by more than the margin" if low > 0 else "worse by more than the margin"
    if fails:
        return replace(row, verdict=Verdict.FAILS, reason=note)
    leaning, distance = _nearest_decision(row)
    width = (high - low) / 2 / distance if distance > 0 else math.inf
    if width > MANY_TIMES:
        return replace(row, reason="the effect lies on the border")
    wanted = (
        f"an interval {math.ceil(10 * width) / 10:.1f} times as narrow"
        if width > 1
        else "more, for the correction over all rows"
    )
    return replace(row, reason=f"seems to {leaning}; needs {wanted}: more items or seeds")


def _nearest_decision(row: Row) -> tuple[str, float]:
    """Return the verdict towards which the effect tends, and the distance to the limit of that verdict."""
    assert row.found is not None
    effect = row.found.effect
    match row.claim.relation:
        case Relation.BETTER:
            return ("hold", effect) if effect > 0 else ("fail", row.margin - effect)
        case Relation.AT_LEAST:
            return ("hold" if effect > -row.margin else "fail", abs(effect + row.margin))
        case Relation.WITHIN:
            return ("hold" if abs(effect) < row.margin else "fail", abs(row.margin - abs(effect)))


def _learned(second: Sequence[Record], records: Sequence[Record], by_loss: bool) -> bool:
    """Return True if the second method beat its untrained base (zero-shot)."""
    bases = {record["base"] for record in second}
    untrained = [record for record in records if record["method"] == "zero-shot" and record["base"] in bases]
    one = {record["task"]: record for record in untrained}
    gain = contrast(second, list(one.values()), by_loss=by_loss, fixed=True)
    return gain is not None and gain.p_above(0.0) < ALPHA


def _undecided(claim: Claim, model: str, density: float, *, by_loss: bool, reason: str) -> Row:
    return Row(
        claim=claim,
        model=model,
        density=density,
        by_loss=by_loss,
        found=None,
        p_value=None,
        verdict=Verdict.UNDECIDED,
        reason=reason,
    )


def _plain(rows: Mapping[tuple[str, str], list[Record]]) -> dict[tuple[str, str], list[dict[str, object]]]:
    return {key: [dict(record) for record in found] for key, found in rows.items()}

"""The difference of two methods, where both items and seeds are random samples.

A test over items only makes a statement about these trained models. A claim about a method must also hold
for other seeds. The difference of item i with seed s is modelled as

    d[i, s] = mu + a_i + b_s + e_is

Here, mu is the mean, a and b are random effects of item and seed, and e is the error. The variance of the
mean is the sum of two estimates: from the means of items, and from the means of seeds. This counts the
variance of e twice, so intervals are too wide rather than too narrow.

Items of one passage or text form a cluster (`statistics.clustered_variance`). Degrees of freedom are
Satterthwaite's. Tasks are pooled with equal weights, and the variances of their items add, since no two tasks
share items. Tasks do share seeds: the random mask and the directions of a seed are the same for every task.
The variance over seeds is therefore that of the mean over all tasks. Only seeds that all tasks have count.

# Legend: I items, S seeds.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from permille.errors import InputError
from permille_lab.evaluate.statistics import TINY_VARIANCE, clustered_variance

Record = Mapping[str, Any]
"""A cell of a results file; see `permille_lab.evaluate.outcomes`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contrast:
    """The advantage of the first method, in accuracy or in negative loss.

    Attributes:
        effect: mean difference, positive if the first method is better.
        error: standard error of `effect`, 0 if all clusters and all seeds agree.
        freedom: degrees of freedom, at least 1.
        clusters: number of clusters of test items of all tasks. Items of one passage or text are a cluster.
        seeds: number of seeds that every task has.
    """

    effect: float
    error: float
    freedom: float
    clusters: int
    seeds: int
    tasks: tuple[str, ...]

    def interval(self, level: float) -> tuple[float, float]:
        """Return the two-sided confidence interval."""
        from scipy import stats

        reach = self.error * float(stats.t.ppf((1 + level) / 2, self.freedom))
        return self.effect - reach, self.effect + reach

    def p_above(self, bound: float) -> float:
        """Return the one-sided p-value of the hypothesis that the effect is at most `bound`."""
        from scipy import stats

        if self.error == 0:
            # All clusters have the same difference, so the t-test has no variance to divide by.
            return _hidden(self) if self.effect > bound else 1.0
        return float(stats.t.sf((self.effect - bound) / self.error, self.freedom))

    def p_below(self, bound: float) -> float:
        """Return the one-sided p-value of the hypothesis that the effect is at least `bound`."""
        from scipy import stats

        if self.error == 0:
            return _hidden(self) if self.effect < bound else 1.0
        return float(stats.t.cdf((self.effect - bound) / self.error, self.freedom))


def contrast(
    first: Sequence[Record], second: Sequence[Record], *, by_loss: bool, fixed: bool = False
) -> Contrast | None:
    """Compare the records of two methods, task by task, on the items and seeds that both have.

    Args:
        by_loss: if True, compare the losses of the right answers, else the accuracies.
        fixed: True if `second` does not depend on the seed (zero-shot). Its first record is compared with
            every seed of `first`.

    Returns:
        The contrast. It is None if no task has both methods, or a task has fewer than two clusters or
        seeds. It is also None if the tasks have fewer than two seeds in common.

    Raises:
        InputError: a record names an item twice, or a seed has two records.
    """
    parts: list[_Part] = []
    for task in dict.fromkeys(record["task"] for record in first):
        mine = _by_seed([record for record in first if record["task"] == task])
        theirs = _by_seed([record for record in second if record["task"] == task])
        if not theirs:
            continue
        seeds = sorted(mine) if fixed else sorted(mine.keys() & theirs.keys())
        any_of_theirs = next(iter(theirs.values()))
        rows = [_differences(mine[s], any_of_theirs if fixed else theirs[s], by_loss) for s in seeds]
        items = [item for item in (rows[0] if rows else ()) if all(item in row for row in rows)]
        of_item = clusters([*mine.values(), *theirs.values()])
        cluster_I = np.array([of_item[item] for item in items])
        if len(seeds) < 2 or len(np.unique(cluster_I)) < 2:
            return None
        difference_IS = np.array([[row[item] for row in rows] for item in items])
        parts.append(_Part(task, difference_IS, cluster_I, tuple(seeds)))
    return _pooled(parts) if parts else None


@dataclass(frozen=True, slots=True)
class _Part:
    """Differences of one task, the cluster of each item, and the seeds."""

    task: str
    difference_IS: NDArray[np.float64]
    cluster_I: NDArray[np.str_]
    seeds: tuple[int, ...]

    def of_seeds(self, seeds: Sequence[int]) -> "_Part":
        """Return the part with some of its seeds."""
        places = [self.seeds.index(seed) for seed in seeds]
        return replace(self, difference_IS=self.difference_IS[:, places], seeds=tuple(seeds))


def _pooled(parts: Sequence[_Part]) -> Contrast | None:
    seeds = sorted(set.intersection(*(set(part.seeds) for part in parts)))
    if len(seeds) < 2:
        return None
    parts = [part.of_seeds(seeds) for part in parts]
    of_items = [clustered_variance(part.difference_IS.mean(axis=1), part.cluster_I) for part in parts]
    mean_S = np.mean([part.difference_IS.mean(axis=0) for part in parts], axis=0)
    variances = [(variance / len(parts) ** 2, freedom) for variance, freedom in of_items]
    variances.append(clustered_variance(mean_S, np.arange(len(seeds))))
    total = sum(variance for variance, _ in variances)
    if total < TINY_VARIANCE:
        total = 0.0
    weight = sum(variance**2 / freedom for variance, freedom in variances)
    return Contrast(
        effect=float(np.mean([part.difference_IS.mean() for part in parts])),
        error=math.sqrt(total),
        freedom=max(1.0, total**2 / weight) if weight > 0 else 1.0,
        clusters=sum(len(np.unique(part.cluster_I)) for part in parts),
        seeds=len(seeds),
        tasks=tuple(part.task for part in parts),
    )


def clusters(records: Iterable[Record]) -> dict[str, str]:
    """Return the cluster of each item of one task, from the `groups` of its records.

    An item without a group is a cluster by itself.
    """
    known = list(records)
    found = {item: f"item {item}" for record in known for item in record["items"]}
    for record in known:
        if "groups" in record:
            found.update(zip(record["items"], map(str, record["groups"]), strict=True))
    return found


def _by_seed(records: Sequence[Record]) -> dict[int, Record]:
    found = {record["seed"]: record for record in records}
    if len(found) < len(records):
        raise InputError(f"expected one record a seed, got {len(records)} of {len(found)} seeds")
    return found


def _differences(first: Record, second: Record, by_loss: bool) -> dict[str, float]:
    one, other = _outcomes(first, by_loss), _outcomes(second, by_loss)
    return {item: value - other[item] for item, value in one.items() if item in other}


def _outcomes(record: Record, by_loss: bool) -> dict[str, float]:
    if len(set(record["items"])) < len(record["items"]):
        raise InputError(f"expected items of different names in {record['method']}, got a name twice")
    values = [-loss for loss in record["item_losses"]] if by_loss else map(float, record["correct"])
    return dict(zip(record["items"], values, strict=True))


def _hidden(found: Contrast) -> float:
    """Return the probability that no cluster differs if one cluster in a hundred of the population does."""
    return float(0.99**found.clusters)

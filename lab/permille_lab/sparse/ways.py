"""The compared ways to make a sparse model.

One-shot ways prune once, then train an adapter for all steps. Iterative ways alternate pruning and training
in rounds. Each variation changes one setting. All ways have about the same number of trained values and of
steps.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from permille_lab.sparse.adapters import RecoveryAdapter
from permille_lab.sparse.rounds import IterativePlan
from permille_sparsify.plan import Pattern, PruningMethod, RecoveryPlan

STEPS = 48
RANK = 2
ROUNDS, LONGER = 5, 4
L2 = 0.001
"""Weight of the norm control, the best one in table 3 of the paper."""
ABLATED = "0.6"


class Way(StrEnum):
    """A way to make a model sparse: the method, then its variation."""

    WANDA = "Wanda"
    SPARSEGPT = "SparseGPT"
    MAGNITUDE = "magnitude"
    WANDA_DENSE = "Wanda, dense LoRA"
    WANDA_POOLING = "Wanda, pooling"
    FORWARD = "Wanda, pooling, forward-only"  # measured worse; its code was deleted
    ITERATIVE = "iterative"
    SPARSEGPT_ITERATIVE = "iterative, SparseGPT"
    ONE_ROUND = "iterative, 1 round"
    NINE_ROUNDS = "iterative, 9 rounds"
    EQUAL_ROUNDS = "iterative, 4 equal rounds"
    LORA = "iterative, LoRA"
    DENSE = "iterative, dense adapters"
    UNIFORM = "iterative, uniform rates"
    PRINTED = "iterative, rates as printed"
    EQUAL_SIZES = "iterative, equal sizes"
    NO_NORM = "iterative, no norm control"
    MORE_NORM = "iterative, norm control 0.1"
    SLOWER = "iterative, a third of the rate"


ONE_SHOT: Mapping[Way, PruningMethod] = {
    Way.WANDA: PruningMethod.WANDA,
    Way.SPARSEGPT: PruningMethod.SPARSEGPT,
    Way.MAGNITUDE: PruningMethod.MAGNITUDE,
    Way.WANDA_DENSE: PruningMethod.WANDA,
    Way.WANDA_POOLING: PruningMethod.WANDA,
}
TABLE = (Way.WANDA, Way.SPARSEGPT, Way.MAGNITUDE, Way.ITERATIVE)
ABLATIONS = tuple(way for way in Way if way not in (*TABLE, Way.FORWARD))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Adam's learning rate in the first step, for each kind of adapter."""

    lora: float
    pooling: float

    def of(self, kind: RecoveryAdapter) -> float:
        """Return the rate for one kind of adapter."""
        return self.lora if kind is RecoveryAdapter.LORA else self.pooling


def target_of(text: str) -> tuple[float, Pattern | None]:
    """Parse a rate such as 0.6 or a pattern such as 2:4. Return the rate, and the pattern or None.

    For example, the rate of `target_of("2:4")` is 0.5.
    """
    if ":" not in text:
        return float(text), None
    pattern = Pattern.parse(text)
    return pattern.rate, pattern


def plan_of(way: Way, target: str, seed: int, rates: Rates) -> IterativePlan:
    """Return the plan of a way, with steps of one row.

    A one-shot way has one round, equal rates for all layers, adapters of equal sizes, and no norm control.
    """
    share, pattern = target_of(target)
    plan = IterativePlan(
        rate=share,
        pattern=pattern,
        rank=RANK,
        rounds=ROUNDS,
        longer=LONGER,
        recovery=RecoveryPlan(steps=0, rows=1, rate=0.0, seed=100 * seed),
        l2=L2,
    )
    if way in ONE_SHOT:
        kind = RecoveryAdapter.POOLING if way is Way.WANDA_POOLING else RecoveryAdapter.LORA
        plan = replace(plan, method=ONE_SHOT[way], adapter=kind, rounds=1, by_loss=False, spread=0.0)
        plan = replace(plan, masked=way is not Way.WANDA_DENSE, l2=0.0)
    match way:
        case Way.SPARSEGPT_ITERATIVE:
            plan = replace(plan, method=PruningMethod.SPARSEGPT)
        case Way.ONE_ROUND:
            plan = replace(plan, rounds=1)
        case Way.NINE_ROUNDS:
            plan = replace(plan, rounds=9)
        case Way.EQUAL_ROUNDS:
            plan = replace(plan, rounds=4, longer=1)
        case Way.LORA:
            plan = replace(plan, adapter=RecoveryAdapter.LORA)
        case Way.DENSE:
            plan = replace(plan, masked=False)
        case Way.UNIFORM:
            plan = replace(plan, spread=0.0)
        case Way.PRINTED:
            plan = replace(plan, beta=-1.0)
        case Way.EQUAL_SIZES:
            plan = replace(plan, by_loss=False)
        case Way.NO_NORM:
            plan = replace(plan, l2=0.0)
        case Way.MORE_NORM:
            plan = replace(plan, l2=0.1)
    steps = STEPS // (plan.rounds - 1 + plan.longer)
    rate = rates.of(plan.adapter) / (3 if way is Way.SLOWER else 1)
    recovery = replace(plan.recovery, steps=steps, rate=rate)
    return replace(plan, recovery=recovery)

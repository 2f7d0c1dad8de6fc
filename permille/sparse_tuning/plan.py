"""How a model is pruned and fine-tuned in turns: rounds, adapters, steps. No torch."""

from dataclasses import dataclass
from enum import StrEnum

from permille.pruning.plan import Pattern, PruningMethod

SPREAD = 0.1
"""How far a layer may be from the mean: the printed programme has no bounds, and would empty layers."""
LONGER = 4


class AdapterKind(StrEnum):
    """What stands beside a linear."""

    LORA = "lora"
    POOLING = "pooling"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryPlan:
    """How adapters are trained.

    Attributes:
        rate: Adam's at the first step.
        l2: weight of the squared numbers in the loss, halved.
        seed: of the order of the rows.
        recomputed: a decoder layer's activations are made again in the reverse pass: a third more time, and
            the memory of one layer.
    """

    steps: int
    rows: int
    rate: float
    l2: float = 0.0
    seed: int = 0
    recomputed: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class IterativePlan:
    """How a model becomes sparse.

    Attributes:
        rate: the share of zeros at the end.
        rounds: 1 is one-shot pruning and one fine-tuning.
        rank: the adapters have as many numbers as LoRA's of this rank, in all.
        by_loss: whether pooling adapters' sizes follow what pruning lost, or are equal.
        masked: whether pruned places count while adapters train.
        spread: how far layers' rates may be from the mean; 0 makes them equal. A pattern's always are.
        beta: of `importance`; its sign alone matters, and below 0 the rates are those of (21) as printed.
        recovery: the steps of a round; `seed` is of the first one.
        longer: how many times as many steps the last round has.
    """

    rate: float
    method: PruningMethod = PruningMethod.WANDA
    pattern: Pattern | None = None
    rounds: int = 10
    adapter: AdapterKind = AdapterKind.POOLING
    rank: int = 8
    by_loss: bool = True
    masked: bool = True
    spread: float = SPREAD
    beta: float = 1.0
    recovery: RecoveryPlan
    longer: int = LONGER

"""The names of the methods, for example "zo:sensitive-c4", "fo:lora-8", "icl:8" and "zero-shot".

    <order>:<set>     order: zo (zeroth order) or fo (first order)
                      set: sensitive-c4, sensitive-task, random, outliers, full, lora-<rank>,
                      lora-fa-<rank>, prefix-<tokens>, prefix-real-<tokens>
    icl:<n>           n solved examples before each question; nothing is trained
    zero-shot         the question only; nothing is trained

The dynamic masks are `sensitive-task-dynamic` and `random-dynamic`. Training runs in segments, and each
segment selects a new mask. A weight that leaves the mask keeps its trained value. A segment takes its step
size from its first gradients and ends with its best state. Segments are an advantage even without new masks.
Compare a dynamic mask therefore with `sensitive-task-segments`, which has the same segments and one mask.

`prefix-<tokens>` starts at random numbers, as in peft. Random numbers raise the loss at the start by nats.
`prefix-real-<tokens>` starts at the keys and values of random tokens, as in MeZO (princeton-nlp/MeZO,
`prefix_init_by_real_act`).
"""

import re
from dataclasses import dataclass
from enum import StrEnum

from permille.errors import InputError


class Order(StrEnum):
    """The order of the derivatives that training uses."""

    ZEROTH = "zeroth"
    FIRST = "first"


class TrainedSet(StrEnum):
    """The numbers that are trained."""

    SENSITIVE_C4 = "sensitive-c4"
    SENSITIVE_TASK = "sensitive-task"
    SENSITIVE_TASK_SEGMENTS = "sensitive-task-segments"
    SENSITIVE_TASK_DYNAMIC = "sensitive-task-dynamic"
    RANDOM = "random"
    RANDOM_DYNAMIC = "random-dynamic"
    OUTLIERS = "outliers"
    FULL = "full"
    LORA = "lora"
    LORA_FA = "lora-fa"
    PREFIX = "prefix"
    PREFIX_REAL = "prefix-real"


SPARSE = frozenset(
    {
        TrainedSet.SENSITIVE_C4,
        TrainedSet.SENSITIVE_TASK,
        TrainedSet.SENSITIVE_TASK_SEGMENTS,
        TrainedSet.SENSITIVE_TASK_DYNAMIC,
        TrainedSet.RANDOM,
        TrainedSet.RANDOM_DYNAMIC,
        TrainedSet.OUTLIERS,
    }
)
"""Sets of masked weights. They have a density."""

TASK_MASKS = frozenset(
    {TrainedSet.SENSITIVE_TASK, TrainedSet.SENSITIVE_TASK_SEGMENTS, TrainedSet.SENSITIVE_TASK_DYNAMIC}
)
"""Sets with a mask that is selected by the task's gradients."""

DYNAMIC = frozenset({TrainedSet.SENSITIVE_TASK_DYNAMIC, TrainedSet.RANDOM_DYNAMIC})
"""Sets with a dynamic mask."""

IN_SEGMENTS = DYNAMIC | {TrainedSet.SENSITIVE_TASK_SEGMENTS}
"""Sets that are trained in segments."""

_SIZED = {
    TrainedSet.LORA: "rank",
    TrainedSet.LORA_FA: "rank",
    TrainedSet.PREFIX: "tokens",
    TrainedSet.PREFIX_REAL: "tokens",
}
_PATTERN = re.compile(r"(zo|fo):([a-z0-9-]*[a-z][a-z0-9]*?)(?:-(\d+))?")
_ORDERS = {"zo": Order.ZEROTH, "fo": Order.FIRST}


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A parsed name.

    Attributes:
        order: None if nothing is trained.
        trained: None if nothing is trained.
        size: rank of an adapter, or number of tokens of a prefix.
        shots: number of solved examples before the question.
    """

    name: str
    order: Order | None = None
    trained: TrainedSet | None = None
    size: int | None = None
    shots: int = 0


def method(name: str) -> Method:
    """Parse a method's name.

    For example, `method("zo:lora-8")` trains LoRA of rank 8 by zeroth order, and `method("icl:8")` trains
    nothing and has 8 shots.

    Raises:
        InputError: the method is unknown, or its size is missing, superfluous or outside 1 to 256.
    """
    if name == "zero-shot":
        return Method(name=name)
    if shots := re.fullmatch(r"icl:(\d{1,3})", name):
        return Method(name=name, shots=_sized("shots", int(shots[1])))
    if name.partition(":")[0] in _ORDERS and name.partition(":")[2] in set(TrainedSet) - _SIZED.keys():
        order, _, trained = name.partition(":")
        return Method(name=name, order=_ORDERS[order], trained=TrainedSet(trained))
    found = _PATTERN.fullmatch(name)
    if not found or found[2] not in {kind.value for kind in _SIZED} or found[3] is None:
        raise InputError(
            f"expected zero-shot, icl:<n>, or zo: or fo: with one of "
            f"{', '.join(kind + (f'-<{_SIZED[kind]}>' if kind in _SIZED else '') for kind in TrainedSet)}; "
            f"got {name!r}"
        )
    kind = TrainedSet(found[2])
    return Method(name=name, order=_ORDERS[found[1]], trained=kind, size=_sized(_SIZED[kind], int(found[3])))


def _sized(what: str, number: int) -> int:
    if not 1 <= number <= 256:
        raise InputError(f"expected {what} from 1 to 256, got {number}")
    return number

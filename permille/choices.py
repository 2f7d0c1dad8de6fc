"""Enums that users choose from, and `choice_of`, which turns a text into a member.

The REST API shares these enums with library modules that the API process must not import.
"""

from enum import StrEnum
from typing import TypeVar

from permille.errors import InputError

Choice = TypeVar("Choice", bound=StrEnum)

LEAST_DENSITY, MOST_DENSITY = 1e-6, 0.5
"""The range of the density in requests and options."""


class MaskMethod(StrEnum):
    """Method of scoring the weights of a mask."""

    FISHER = "fisher"  # the largest scores, which are the diagonal of the empirical Fisher
    MAGNITUDE = "magnitude"  # the largest absolute weights, also called weight outliers
    RANDOM = "random"  # weights drawn at random, from a seed


class AdapterKind(StrEnum):
    """Kind of a low-rank adapter: LoRA trains both matrices, LoRA-FA trains B alone."""

    LORA = "lora"
    LORA_FA = "lora-fa"


class Embeddings(StrEnum):
    """Storage of embedding and head in a package."""

    # 8 bits in GGUF's blocks of 32. A matrix whose row length is not a multiple of 32 keeps its dtype.
    Q8_0 = "q8_0"
    SOURCE = "source"  # the source's dtype


class Method(StrEnum):
    """Method by which a device trains."""

    GRADIENT = "gradient"  # a reverse pass computes the gradient of the masked weights
    ZEROTH_ORDER = "zeroth-order"  # forward passes measure losses along random directions


class EstimatorKind(StrEnum):
    """Method of computing the scalars of a step, one for each direction.

    Replay does not need the estimator. It reads `directions`, `first_tensor` and `split` of the header.
    For `GRADIENT`, the device computes a change of the weights from a gradient. The scalars are the
    projections of that change on the groups of weights of the step (FORMAT 6.6).
    """

    SPSA = "spsa"
    FORWARD = "forward"
    ONE_SIDED = "one_sided"
    SPLIT = "split"
    GRADIENT = "gradient"


class EngineName(StrEnum):
    """Engine that computes a model on a device."""

    AUTO = "auto"  # light if it supports the model, else torch
    LIGHT = "light"
    LIGHT_INT8 = "light-int8"
    TORCH = "torch"
    EXECUTORCH = "executorch"


class StreamedDataset(StrEnum):
    """Public datasets that can be streamed. No other dataset is ever requested."""

    C4 = "c4"


class ProgramWeights(StrEnum):
    """Storage of the frozen weights in an exported program."""

    FLOAT32 = "float32"
    INT4 = "int4"


def choice_of(kind: type[Choice], name: str, what: str) -> Choice:
    """Return the member of `kind` with this name.

    For example:

        >>> choice_of(Method, "gradient", "a method") is Method.GRADIENT
        True

    Call it on every name that comes from outside. Code compares members with `is`, so an unchecked string
    would match no branch and silently take the last one.

    Args:
        kind: the enum.
        name: the name to look up.
        what: a description of the choice for the message, such as "a method".

    Raises:
        InputError: `kind` has no such member. The message lists all members.
    """
    try:
        return kind(name)
    except ValueError:
        raise InputError(f"{name!r:.200} is not {what}. Choose one of {', '.join(kind)}.") from None

"""Enums of names that a caller may choose from, and `choice_of`, which turns a text into a member.

This module holds the enums that the REST API shares with library modules that the API process must not
import.
"""

from enum import StrEnum
from typing import TypeVar

from permille.errors import InputError

Choice = TypeVar("Choice", bound=StrEnum)


class MaskMethod(StrEnum):
    """How weights are scored."""

    FISHER = "fisher"  # the largest scores: the diagonal of the empirical Fisher
    MAGNITUDE = "magnitude"  # the largest absolute weights, the paper's "weight outliers"
    RANDOM = "random"  # drawn from the seed


class AdapterKind(StrEnum):
    """Which matrices of a low-rank adapter are trained: both, or B alone (LoRA-FA)."""

    LORA = "lora"
    LORA_FA = "lora-fa"


class Embeddings(StrEnum):
    """How a package stores embedding and head: in 8 bits, or in the source's dtype."""

    Q8_0 = "q8_0"  # GGUF's blocks of 32; a matrix whose rows do not divide into blocks keeps its dtype
    SOURCE = "source"


class Method(StrEnum):
    """The two ways in which a device finds its steps."""

    GRADIENT = "gradient"  # a reverse pass gives the gradient of the masked weights
    ZEROTH_ORDER = "zeroth-order"  # forward passes alone, along directions from a seed


class EstimatorKind(StrEnum):
    """Kind of estimate that the scalars of a step come from.

    Replay does not look at the estimator, only at the header's `directions`, `first_tensor` and `split`.
    For `GRADIENT`, the device first computes a change of the weights from a gradient. The scalars are the
    projections of that change on the step's groups of weights (FORMAT 6.6).
    """

    SPSA = "spsa"
    FORWARD = "forward"
    ONE_SIDED = "one_sided"
    SPLIT = "split"
    GRADIENT = "gradient"


class EngineName(StrEnum):
    """Name of an engine, which computes a model on a device."""

    AUTO = "auto"  # light, if it knows the model, else torch
    LIGHT = "light"
    LIGHT_INT8 = "light-int8"
    TORCH = "torch"
    EXECUTORCH = "executorch"


class StreamedDataset(StrEnum):
    """The public datasets that may be streamed; no other is ever asked for."""

    C4 = "c4"


class ProgramWeights(StrEnum):
    """How a program holds the frozen weights."""

    FLOAT32 = "float32"
    INT4 = "int4"


def choice_of(kind: type[Choice], name: str, what: str) -> Choice:
    """Return the member of `kind` with this name.

    Code compares members with `is`. A text that was not checked would match no branch, and silently take
    the last one.

    Raises:
        InputError: there is no such member; the message lists those that are.
    """
    try:
        return kind(name)
    except ValueError:
        raise InputError(f"{name!r:.200} is not {what}. Choose one of {', '.join(kind)}.") from None

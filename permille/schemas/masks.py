"""Masks: which weights are sensitive, and the evidence for it."""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from permille.schemas.fields import Closed, Count, Density, Digest, Id, Seed, Timestamp, WholeNumber


class MaskMethod(StrEnum):
    """How weights are scored."""

    FISHER = "fisher"
    MAGNITUDE = "magnitude"
    RANDOM = "random"


Scope = Annotated[
    str,
    StringConstraints(pattern=r"^(all|layers:[0-9]{1,5}(-([0-9]{1,5})?)?)$"),
    Field(
        description='which decoder blocks: "all", or counted from 0 "layers:4-7", "layers:4-", "layers:4"',
        examples=["all"],
    ),
]


class Allocation(StrEnum):
    """How the budget is spread: the same density in every tensor, or the largest scores of all."""

    TENSOR = "tensor"
    GLOBAL = "global"


Sequences = Annotated[int, Field(strict=True, ge=1, le=100_000, examples=[100]), WholeNumber]
SequenceLength = Annotated[int, Field(strict=True, ge=8, le=32_768, examples=[512]), WholeNumber]


class _AnyMask(Closed):
    """What every way of choosing has."""

    density: Density = 0.001
    seed: Seed = 0
    scope: Scope = "all"
    allocation: Allocation = Allocation.TENSOR


class FisherMask(_AnyMask):
    """The weights with the largest squared gradients on a corpus."""

    method: Literal[MaskMethod.FISHER]
    corpus_id: Id
    sequences: Sequences = 100
    length: SequenceLength = 512


class WeightMask(_AnyMask):
    """The largest weights, or a random choice: no corpus is read."""

    method: Literal[MaskMethod.MAGNITUDE, MaskMethod.RANDOM]


MaskRequest = Annotated[FisherMask | WeightMask, Field(discriminator="method")]


class FisherMaskCreate(FisherMask):
    """Choose the weights of a model that are sensitive on a corpus."""

    model_id: Id


class WeightMaskCreate(WeightMask):
    """Choose the largest weights of a model, or random ones."""

    model_id: Id


MaskCreate = Annotated[FisherMaskCreate | WeightMaskCreate, Field(discriminator="method")]


class MaskOptions(Closed):
    """How a mask was chosen. Sequences and their length are null where no corpus was read."""

    method: MaskMethod
    density: Density
    sequences: Sequences | None = None
    length: SequenceLength | None = None
    seed: Seed
    scope: Scope
    allocation: Allocation


class Mask(Closed):
    """A chosen mask."""

    id: Id
    model_id: Id
    corpus_id: Id | None
    job_id: Id
    options: MaskOptions
    k: Count
    digest: Digest
    created_at: Timestamp

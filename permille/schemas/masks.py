"""Masks: which weights are sensitive, and the evidence for it."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from permille.choices import Allocation, MaskMethod
from permille.models.families import SCOPE_PATTERN
from permille.schemas.fields import Closed, Count, Density, Digest, Id, Seed, WholeNumber
from permille.schemas.jobs import Made

Scope = Annotated[
    str,
    StringConstraints(pattern=f"^({SCOPE_PATTERN})$"),
    Field(
        description='which linears: "all", "attention", "mlp", or those of decoder layers counted from 0: '
        '"layers:4-7", "layers:4-", "layers:4"',
        examples=["all"],
    ),
]


Sequences = Annotated[
    int,
    Field(strict=True, ge=1, le=100_000, examples=[100], description="sequences to measure gradients on"),
    WholeNumber,
]
SequenceLength = Annotated[
    int, Field(strict=True, ge=8, le=32_768, examples=[512], description="tokens of a sequence"), WholeNumber
]


class _AnyMask(Closed):
    """What every way of choosing has."""

    density: Density = 0.001
    seed: Seed = Field(default=0, description="of the choice of sequences, or of a random mask")
    scope: Scope = "all"
    allocation: Allocation = Field(
        default=Allocation.TENSOR,
        description="the same density in every tensor, or the largest scores of all tensors together",
    )


class FisherMask(_AnyMask):
    """The weights with the largest squared gradients on a corpus."""

    method: Literal[MaskMethod.FISHER] = Field(description="how weights are scored")
    corpus_id: Id = Field(description="the corpus to measure gradients on; `fisher` needs one")
    sequences: Sequences = 100
    length: SequenceLength = 512


class WeightMask(_AnyMask):
    """The largest weights, or a random choice: no corpus is read."""

    method: Literal[MaskMethod.MAGNITUDE, MaskMethod.RANDOM]


MaskRequest = Annotated[FisherMask | WeightMask, Field(discriminator="method")]


class FisherMaskCreate(FisherMask):
    """Choose the weights of a model that are sensitive on a corpus."""

    model_id: Id = Field(description="the model to choose weights of")


class WeightMaskCreate(WeightMask):
    """Choose the largest weights of a model, or random ones."""

    model_id: Id


MaskCreate = Annotated[FisherMaskCreate | WeightMaskCreate, Field(discriminator="method")]


Dtype = Literal["float32", "bfloat16", "float16"]


class ShardRequest(Closed):
    """Sum the squared gradients of some of a mask's sequences: a part of a mask job."""

    model_id: Id
    scope: Scope
    plan: Digest = Field(description="of what the mask job has drawn from its corpus")
    first: Count
    stop: Count = Field(description="one past the last sequence")
    dtype: Dtype = Field(description="of the worker that cut the mask job: the same for all shards")


class Mask(Made):
    """A chosen mask. The digest is of its layer."""

    id: Id
    request: MaskCreate
    k: Count = Field(description="weights that it selects")

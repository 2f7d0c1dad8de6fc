"""Masks: the choice of sensitive weights, and the evidence for it."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, StringConstraints

from permille.choices import MaskMethod
from permille.models.families import SCOPE_PATTERN
from permille.schemas.fields import (
    EXAMPLE_CORPUS,
    EXAMPLE_MODEL,
    Closed,
    Count,
    Density,
    Digest,
    Examples,
    Id,
    Seed,
    WholeNumber,
)
from permille.schemas.jobs import Result

Scope = Annotated[
    str,
    StringConstraints(pattern=f"^({SCOPE_PATTERN})$"),
    Field(
        description='linear layers to choose from: "all", "attention", "mlp", or those of decoder layers, '
        'counted from 0, such as "layers:4-7", "layers:4-" or "layers:4"',
        examples=["all"],
    ),
]


Sequences = Annotated[
    int,
    Field(
        strict=True,
        ge=1,
        le=100_000,
        examples=[100],
        description="number of sequences to measure gradients on",
    ),
    WholeNumber,
]
SequenceLength = Annotated[
    int,
    Field(
        strict=True,
        ge=8,
        le=32_768,
        examples=[512],
        description="tokens in a sequence; at most as many as the model has positions",
    ),
    WholeNumber,
]


class _AnyMask(Closed):
    """Fields that all methods have."""

    density: Density = 0.001
    seed: Seed = Field(default=0, description="seed of the choice of sequences, or of a random mask")
    scope: Scope = "all"


class FisherMask(_AnyMask):
    """The weights with the largest squared gradients on a corpus."""

    method: Literal[MaskMethod.FISHER] = Field(
        description="score that selects weights: gradients on text, size, or chance"
    )
    corpus_id: Id = Field(description="corpus to measure gradients on; needed for fisher")
    sequences: Sequences = 100
    length: SequenceLength = 512


class WeightMask(_AnyMask):
    """The largest weights, or a random choice. This reads no corpus."""

    # By `method`, pydantic tells the two kinds of requests apart.
    method: Literal[MaskMethod.MAGNITUDE, MaskMethod.RANDOM]


MaskRequest = Annotated[FisherMask | WeightMask, Field(discriminator="method")]


class FisherMaskCreate(FisherMask):
    """Choose the weights of a model that are sensitive on a corpus."""

    examples: ClassVar[Examples] = {
        "sensitive weights, by gradients on a corpus": {
            "model_id": EXAMPLE_MODEL,
            "method": "fisher",
            "corpus_id": EXAMPLE_CORPUS,
            "density": 0.001,
            "sequences": 100,
            "length": 512,
            "seed": 0,
        }
    }

    model_id: Id = Field(description="model to choose weights of")


class WeightMaskCreate(WeightMask):
    """Choose the largest weights of a model, or random ones."""

    examples: ClassVar[Examples] = {
        "largest weights, without a corpus": {
            "model_id": EXAMPLE_MODEL,
            "method": "magnitude",
            "density": 0.001,
        }
    }

    model_id: Id


MaskCreate = Annotated[FisherMaskCreate | WeightMaskCreate, Field(discriminator="method")]


# All shards of a mask use one dtype. Otherwise, the sums would depend on which worker took which shard.
Dtype = Literal["float32", "bfloat16", "float16"]


class ShardRequest(Closed):
    """Sum the squared gradients of some of a mask's sequences, as a part of a mask job."""

    model_id: Id
    scope: Scope
    plan: Digest = Field(description="digest of the sequences that the mask job has drawn")
    first: Count
    stop: Count = Field(description="index of the last sequence, plus one")
    dtype: Dtype = Field(description="dtype for all shards of the mask, chosen by the worker that split it")


class Mask(Result):
    """A chosen mask. `digest` is the digest of its layer."""

    id: Id
    request: MaskCreate
    k: Count = Field(description="number of selected weights")

"""Quantizations: the dense layer of a package, and what it costs."""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from permille.schemas.fields import Closed, Count, Digest, Id, Timestamp, WholeNumber


class SchemeName(StrEnum):
    """How dense weights are coded."""

    NF4 = "nf4"
    INT4 = "int4"


EvaluationTokens = Annotated[int, Field(strict=True, ge=256, le=10_000_000, examples=[8192]), WholeNumber]


class Nf4(Closed):
    """NormalFloat codes in flat blocks of 64."""

    scheme: Literal[SchemeName.NF4]
    group_size: Annotated[Literal[64], WholeNumber] = 64
    evaluation_tokens: EvaluationTokens = 8192


class Int4(Closed):
    """Symmetric integers in groups along a row."""

    scheme: Literal[SchemeName.INT4]
    group_size: Annotated[Literal[32, 128], WholeNumber] = 32
    evaluation_tokens: EvaluationTokens = 8192


QuantizationOptions = Annotated[Nf4 | Int4, Field(discriminator="scheme")]


class QuantizationCreate(Closed):
    """Quantize a model. A mask's weights stay out of the groups' scales; a corpus adds perplexity."""

    model_id: Id
    mask_id: Id | None = None
    evaluation_corpus_id: Id | None = None
    options: QuantizationOptions = Nf4(scheme=SchemeName.NF4)


class Quantization(Closed):
    """A quantized dense layer."""

    id: Id
    model_id: Id
    mask_id: Id | None
    job_id: Id
    options: QuantizationOptions
    evaluation_corpus_id: Id | None
    digest: Digest = Field(description="of the dense layer")
    size_bytes: Count
    created_at: Timestamp

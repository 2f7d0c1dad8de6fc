"""Quantizations: the dense layer of a package, and what it costs."""

from enum import IntEnum, StrEnum
from typing import Annotated

from pydantic import Field

from permille.schemas.fields import Closed, Count, Digest, Finite, Id, Timestamp


class SchemeName(StrEnum):
    """How dense weights are coded."""

    NF4 = "nf4"
    INT4 = "int4"


class GroupSize(IntEnum):
    """Weights that share a scale: 64 for nf4; 32 or 128 for int4."""

    G32 = 32
    G64 = 64
    G128 = 128


EvaluationTokens = Annotated[int, Field(strict=True, ge=256, le=10_000_000, examples=[8192])]


class QuantizationOptions(Closed):
    """How the dense weights are coded. nf4 has groups of 64, int4 of 32 or 128."""

    scheme: SchemeName = SchemeName.NF4
    group_size: Annotated[int, Field(strict=True, ge=32, le=128, examples=[64])] = 64
    evaluation_tokens: EvaluationTokens = 8192


class QuantizationCreate(QuantizationOptions):
    """Quantize a model. A mask's weights stay out of the groups' scales; a corpus adds perplexity."""

    model_id: Id
    mask_id: Id | None = None
    evaluation_corpus_id: Id | None = None


class TensorError(Closed):
    """Reconstruction error of one tensor: RMS of the difference over RMS of the weights."""

    name: str
    shape: list[Count]
    relative_error: Finite
    max_error: Finite | None = None


class Perplexity(Closed):
    """Perplexity on held-out text, before and after."""

    tokens: Count
    before: Finite
    after: Finite


class QuantizationReport(Closed):
    """The evidence behind a quantization."""

    quantization_id: Id
    tensors: list[TensorError]
    perplexity: Perplexity | None


class Quantization(Closed):
    """A quantized dense layer."""

    id: Id
    model_id: Id
    mask_id: Id | None
    job_id: Id
    options: QuantizationOptions
    digest: Digest
    size_bytes: Count
    created_at: Timestamp

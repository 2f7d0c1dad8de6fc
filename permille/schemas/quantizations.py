"""Quantizations: the dense layer of a package, and what it costs."""

from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from permille.schemas.fields import Closed, Count, Digest, Id, Timestamp, WholeNumber


class SchemeName(StrEnum):
    """How dense weights are coded."""

    NF4 = "nf4"
    INT4 = "int4"


EvaluationTokens = Annotated[int, Field(strict=True, ge=256, le=10_000_000, examples=[8192]), WholeNumber]


CalibrationSequences = Annotated[int, Field(strict=True, ge=1, le=4096, examples=[128]), WholeNumber]
CalibrationLength = Annotated[int, Field(strict=True, ge=8, le=4096, examples=[512]), WholeNumber]


class Nf4(Closed):
    """NormalFloat codes in flat blocks of 64."""

    scheme: Literal[SchemeName.NF4]
    group_size: Annotated[Literal[64], WholeNumber] = 64
    evaluation_tokens: EvaluationTokens = 8192


class Rounding(StrEnum):
    """How a weight finds its code: the nearest one, or with the outputs of its block in view."""

    NEAREST = "nearest"
    AUTO_ROUND = "auto-round"


class Int4(Closed):
    """Symmetric integers in groups along a row. `auto-round` (groups of 128) calibrates rounding and scales
    on texts of a corpus: it loses less, and holds the whole model in memory, for minutes or hours."""

    scheme: Literal[SchemeName.INT4]
    group_size: Annotated[Literal[32, 128], WholeNumber] = 32
    evaluation_tokens: EvaluationTokens = 8192
    rounding: Rounding = Rounding.NEAREST
    calibration_corpus_id: Id | None = Field(default=None, description="for `auto-round`, which needs it")
    calibration_sequences: CalibrationSequences = 128
    calibration_length: CalibrationLength = Field(
        default=512, description="tokens of a sequence; at most the model's positions"
    )

    @model_validator(mode="after")
    def _has_what_it_needs(self) -> Self:
        if self.rounding is Rounding.NEAREST and self.calibration_corpus_id is not None:
            raise ValueError("expected rounding auto-round with calibration_corpus_id, got nearest")
        if self.rounding is Rounding.AUTO_ROUND and self.calibration_corpus_id is None:
            raise ValueError("expected calibration_corpus_id with rounding auto-round, got none")
        if self.rounding is Rounding.AUTO_ROUND and self.group_size != 128:
            raise ValueError(f"expected group_size 128 with rounding auto-round, got {self.group_size}")
        return self


def calibrates(options: Nf4 | Int4) -> bool:
    """Whether the codes depend on text."""
    return isinstance(options, Int4) and options.rounding is Rounding.AUTO_ROUND


QuantizationOptions = Annotated[Nf4 | Int4, Field(discriminator="scheme")]


class QuantizationCreate(Closed):
    """Quantize a model. A mask's weights stay out of the groups' scales; a corpus adds perplexity."""

    model_id: Id
    mask_id: Id | None = None
    evaluation_corpus_id: Id | None = None
    options: QuantizationOptions = Nf4(scheme=SchemeName.NF4)

    @model_validator(mode="after")
    def _knows_no_mask_where_it_calibrates(self) -> Self:
        if self.mask_id is not None and calibrates(self.options):
            raise ValueError("expected no mask_id with rounding auto-round, which knows of no mask")
        return self


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

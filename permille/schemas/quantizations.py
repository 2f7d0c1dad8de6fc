"""Quantizations: the dense layer of a package, and what it costs."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from permille.schemas.fields import Closed, Count, Digest, Id, Timestamp, WholeNumber


class SchemeName(StrEnum):
    """How dense weights are coded."""

    NF4 = "nf4"
    INT4 = "int4"
    AUTO_ROUND = "auto-round"


EvaluationTokens = Annotated[int, Field(strict=True, ge=256, le=10_000_000, examples=[8192]), WholeNumber]


CalibrationSequences = Annotated[int, Field(strict=True, ge=1, le=4096, examples=[128]), WholeNumber]
CalibrationLength = Annotated[int, Field(strict=True, ge=8, le=4096, examples=[512]), WholeNumber]


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


class AutoRound(Closed):
    """int4 in groups of 128 whose rounding and scales auto-round calibrates on texts of a corpus. It loses
    less, and holds the whole model in memory, for minutes or hours; devices read it as any
    int4."""

    scheme: Literal[SchemeName.AUTO_ROUND]
    group_size: Annotated[Literal[128], WholeNumber] = 128
    evaluation_tokens: EvaluationTokens = 8192
    calibration_corpus_id: Id
    calibration_sequences: CalibrationSequences = 128
    calibration_length: CalibrationLength = Field(
        default=512, description="tokens of a sequence; at most the model's positions"
    )


AnyOptions = Nf4 | Int4 | AutoRound


def payload_of(options: AnyOptions) -> dict[str, Any]:
    """As a worker and the database have them: by the scheme that devices read, and how it is rounded."""
    found = options.model_dump(mode="json")
    if isinstance(options, AutoRound):
        found |= {"scheme": SchemeName.INT4.value, "rounding": SchemeName.AUTO_ROUND.value}
    return found


def options_of(payload: Mapping[str, Any]) -> AnyOptions:
    """The inverse of `payload_of`. Raises ValidationError."""
    if payload.get("rounding") == SchemeName.AUTO_ROUND.value:
        rest = {name: value for name, value in payload.items() if name != "rounding"}
        return AutoRound.model_validate({**rest, "scheme": SchemeName.AUTO_ROUND})
    return _OPTIONS.validate_python(dict(payload))


QuantizationOptions = Annotated[AnyOptions, Field(discriminator="scheme")]


_OPTIONS: TypeAdapter[AnyOptions] = TypeAdapter(QuantizationOptions)


class QuantizationCreate(Closed):
    """Quantize a model. A corpus adds perplexity."""

    model_id: Id
    evaluation_corpus_id: Id | None = None
    options: QuantizationOptions = Nf4(scheme=SchemeName.NF4)


class Quantization(Closed):
    """A quantized dense layer."""

    id: Id
    model_id: Id
    job_id: Id
    options: QuantizationOptions
    evaluation_corpus_id: Id | None
    digest: Digest = Field(description="of the dense layer")
    size_bytes: Count
    created_at: Timestamp

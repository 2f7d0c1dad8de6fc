"""Quantizations: the dense layer of a package, and its cost."""

from enum import StrEnum
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from permille.choices import Embeddings
from permille.schemas.fields import EXAMPLE_CORPUS, EXAMPLE_MODEL, Closed, Examples, Flag, Id, WholeNumber
from permille.schemas.jobs import Result


class SchemeName(StrEnum):
    """Coding scheme of the frozen weights."""

    NF4 = "nf4"
    INT4 = "int4"
    # The package format has no scheme of this name: the resulting packages have the scheme int4.
    AUTO_ROUND = "auto-round"
    INT8 = "int8"
    SOURCE = "source"


EvaluationTokens = Annotated[
    int,
    Field(
        strict=True,
        ge=256,
        le=10_000_000,
        examples=[8192],
        description="number of tokens to measure perplexity on",
    ),
    WholeNumber,
]
EvaluationCorpus = Annotated[
    Id | None, Flag("--evaluate-on"), Field(description="corpus to measure perplexity on")
]
CalibrationSequences = Annotated[int, Field(strict=True, ge=1, le=4096, examples=[128]), WholeNumber]
CalibrationLength = Annotated[int, Field(strict=True, ge=8, le=4096, examples=[512]), WholeNumber]


class Tables(Closed):
    """Options that all schemes share: the storage of embedding and head, and the perplexity measurement."""

    embeddings: Embeddings = Field(
        default=Embeddings.Q8_0,
        description="storage of embedding and head: 8 bits (q8_0), or the model's own type (source)",
    )
    evaluation_tokens: EvaluationTokens = 8192


class Nf4(Tables):
    """NormalFloat codes in flat blocks of 64."""

    scheme: Literal[SchemeName.NF4] = Field(
        description="storage of the frozen weights; auto-round is int4 calibrated on text, source keeps the "
        "codes of a GGUF file"
    )
    group_size: Annotated[Literal[64], WholeNumber] = Field(
        default=64,
        description="weights that share a scale: 64 for nf4, 32 or 128 for int4, 32 for source, 128 for int8 "
        "and auto-round",
    )


class Int4(Tables):
    """Symmetric integers in groups along a row."""

    scheme: Literal[SchemeName.INT4]
    group_size: Annotated[Literal[32, 128], WholeNumber] = 32


class AutoRound(Tables):
    """int4 in groups of 128, with rounding and scales that auto-round calibrates on texts of a corpus.

    The model loses less quality than with int4. Calibration needs the whole model in memory, and takes
    minutes or hours. Devices read the result as they read other int4 weights.
    """

    scheme: Literal[SchemeName.AUTO_ROUND]
    group_size: Annotated[Literal[128], WholeNumber] = 128
    calibration_corpus_id: Annotated[Id, Flag("--calibrate-on")] = Field(
        description="corpus to calibrate auto-round on"
    )
    calibration_sequences: CalibrationSequences = Field(
        default=128, description="number of sequences to calibrate auto-round on"
    )
    calibration_length: CalibrationLength = Field(
        default=512,
        description="tokens in a sequence to calibrate on; at most as many as the model has positions",
    )


class Int8(Tables):
    """Symmetric integers of 8 bits in groups of 128 along a row. They take twice as many bytes as integers of
    4 bits, and the model loses hardly any quality.
    """

    scheme: Literal[SchemeName.INT8]
    group_size: Annotated[Literal[128], WholeNumber] = 128


class Source(Tables):
    """The codes of the GGUF file from which the model was added, bit for bit: Q4_0, Q4_1 and Q8_0."""

    scheme: Literal[SchemeName.SOURCE]
    group_size: Annotated[Literal[32], WholeNumber] = 32


AnyOptions = Nf4 | Int4 | AutoRound | Int8 | Source
QuantizationOptions = Annotated[AnyOptions, Field(discriminator="scheme")]


class QuantizationCreate(Closed):
    """Quantize a model. With a corpus, also measure perplexity."""

    examples: ClassVar[Examples] = {
        "nf4, perplexity measured": {
            "model_id": EXAMPLE_MODEL,
            "options": {"scheme": "nf4", "evaluation_tokens": 8192},
            "evaluation_corpus_id": EXAMPLE_CORPUS,
        },
        "int4 in groups of 32": {
            "model_id": EXAMPLE_MODEL,
            "options": {"scheme": "int4", "group_size": 32},
        },
        "int8": {"model_id": EXAMPLE_MODEL, "options": {"scheme": "int8"}},
        "int4 in groups of 128, calibrated on texts": {
            "model_id": EXAMPLE_MODEL,
            "options": {"scheme": "auto-round", "calibration_corpus_id": EXAMPLE_CORPUS},
        },
    }

    model_id: Id = Field(description="model to quantize")
    evaluation_corpus_id: EvaluationCorpus = None
    options: QuantizationOptions = Nf4(scheme=SchemeName.NF4)


class Quantization(Result):
    """A quantized dense layer. `digest` is the digest of the layer."""

    id: Id
    request: QuantizationCreate

"""Packages: what a device downloads."""

from typing import Annotated, Final

from pydantic import Field

from permille.schemas.fields import Closed, Count, Digest, Finite, Id, Positive, Timestamp

MANIFEST_MEDIA_TYPE: Final = "application/vnd.permille.manifest+json"


class PackageCreate(Closed):
    """Make a package of a mask and a quantization of the same model. A basis must be of the very same mask;
    `fisher_exponents` adds powers of two from the scores of a fisher mask; `measure_precision` measures how
    far the projected gradient is from the exact one, on a few sequences of `precision_corpus_id`, which is
    the mask's corpus unless another is named."""

    mask_id: Id
    quantization_id: Id
    basis_id: Id | None = None
    fisher_exponents: bool = False
    measure_precision: bool = False
    precision_corpus_id: Id | None = None


class PackageLayer(Closed):
    """One layer of a package."""

    role: str
    media_type: str
    digest: Digest
    size_bytes: Count
    path: str | None


class PackageRecord(Closed):
    """A package, addressed by the digest of its manifest."""

    digest: Digest
    model_id: Id | None
    mask_id: Id | None
    quantization_id: Id | None
    job_id: Id | None
    k: Count
    size_bytes: Count
    layers: list[PackageLayer]
    created_at: Timestamp


class MeasuredPrecision(Closed):
    """The error of the projected gradient by differences: one engine, one compute type, one epsilon."""

    engine: str = Field(examples=["torch"])
    version: str = Field(examples=["permille 0.1.0, torch 2.13.0, transformers 5.23.0"])
    compute_dtype: str = Field(examples=["float32"])
    epsilon: Annotated[Finite, Field(gt=0, examples=[0.000477])]
    relative_error: Annotated[Finite, Field(ge=0)] | None = Field(
        examples=[0.0021],
        description="rms of the error over rms of the exact derivative; an error of 1 knows nothing; null "
        "where an estimate was not finite",
    )
    cosine: Finite = Field(
        examples=[1.0], description="between the intended perturbation and what float32 values carry"
    )
    bfloat16_cosine: Finite = Field(examples=[0.41], description="the same for values rounded to bfloat16")
    directions: Positive = Field(examples=[32])
    tokens: Positive = Field(examples=[124])


class PackageReport(Closed):
    """What was measured of a package. `precision` is empty where nothing was; `best_epsilon` has the smallest
    error in float32, and is where a device's own search begins."""

    digest: Digest
    precision: list[MeasuredPrecision]
    best_epsilon: Annotated[Finite, Field(gt=0)] | None = Field(examples=[0.000477])

"""Packages, which devices download, and builds, which make a package in a single request."""

from typing import Annotated, Any, ClassVar, Final, Self

from pydantic import ConfigDict, Field, model_validator
from pydantic.config import JsonDict

from permille.choices import AdapterKind, ProgramWeights
from permille.schemas.fields import (
    EXAMPLE_CORPUS,
    EXAMPLE_DIGEST,
    EXAMPLE_MODEL,
    EXAMPLE_ULID,
    Closed,
    Count,
    Digest,
    Examples,
    Flag,
    Id,
    Seed,
    Timestamp,
    WholeNumber,
)
from permille.schemas.jobs import JobState, Result
from permille.schemas.masks import FisherMask, FisherMaskCreate, MaskRequest, Scope, WeightMaskCreate
from permille.schemas.quantizations import (
    EvaluationCorpus,
    Nf4,
    QuantizationCreate,
    QuantizationOptions,
    SchemeName,
)

MANIFEST_MEDIA_TYPE: Final = "application/vnd.permille.manifest+json"
_EITHER: Final = "Give either a mask or an adapter"


class Adapter(Closed):
    """Low-rank matrices beside the linear layers. Devices train these matrices instead of masked weights."""

    kind: Annotated[AdapterKind, Flag("--adapter")] = Field(
        description="adapter to train in place of sensitive weights: lora, or lora-fa (which trains only one "
        "matrix of each pair)"
    )
    rank: Annotated[
        # The limits of rank and alpha are those of FORMAT 3.1 and `permille.package.limits`.
        int, Field(strict=True, ge=1, le=256, description="rank of the adapter's matrices"), WholeNumber
    ] = 16
    alpha: Annotated[
        int,
        Field(
            strict=True,
            ge=1,
            le=1024,
            description="scale of the adapter: its product is multiplied by alpha / rank",
        ),
        WholeNumber,
    ] = 16
    scope: Annotated[Scope, Flag("--adapter-scope")] = "all"
    seed: Annotated[Seed, Flag("--adapter-seed")] = Field(
        default=0, description="seed of the initial matrices"
    )


def _either(mask: str, kind: str) -> ConfigDict:
    """Return the rule of `_check_trainable` as JSON schema: a request has either a mask or an adapter.

    Args:
        mask: the name of the field for the mask.
        kind: the JSON type of this field.
    """
    # pydantic cannot express this rule in JSON schema, so write it out for clients.
    nothing: JsonDict = {"type": "null"}
    with_mask: JsonDict = {"required": [mask], "properties": {mask: {"type": kind}, "adapter": nothing}}
    with_adapter: JsonDict = {
        "required": ["adapter"],
        "properties": {"adapter": {"type": "object"}, mask: nothing},
    }
    return ConfigDict(json_schema_extra={"oneOf": [with_mask, with_adapter]})


def _check_trainable(mask: object, adapter: object) -> None:
    if (mask is None) == (adapter is None):
        raise ValueError(_EITHER)


Basis = Annotated[
    bool,
    Field(
        strict=True,
        description="learn the first directions of zeroth order from the corpus of the mask, or else of the "
        "evaluation. This takes minutes or more. Devices then need fewer forward passes",
    ),
]


def public_text(mask: MaskRequest | None, evaluation_corpus_id: str | None) -> str | None:
    """Return the corpus of a package's reference and basis: the mask's, or else the evaluation's, or None."""
    return mask.corpus_id if isinstance(mask, FisherMask) else evaluation_corpus_id


class PackageCreate(Closed):
    """Make a package from a quantization and a mask of the same model, or from a quantization and an
    adapter.
    """

    examples: ClassVar[Examples] = {
        "a mask and a quantization": {
            "mask_id": f"mask_{EXAMPLE_ULID}",
            "quantization_id": f"quant_{EXAMPLE_ULID}",
        }
    }

    model_config = _either("mask_id", "string")

    # Both mask and adapter are optional fields, but `_check` demands exactly one of them.
    mask_id: Id | None = Field(default=None, description="mask of the model")
    adapter: Adapter | None = None
    quantization_id: Id = Field(description="quantization of the same model")
    basis: Basis = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        _check_trainable(self.mask_id, self.adapter)
        return self


class ExportCreate(Closed):
    """Export a package as a program for ExecuTorch's runtime, and make a package that carries it."""

    examples: ClassVar[Examples] = {
        "weights in float32": {"package_digest": EXAMPLE_DIGEST},
        "4-bit weights; one pass computes both signs of 8 directions on 2 sequences": {
            "package_digest": EXAMPLE_DIGEST,
            "weights": "int4",
            "variants": 16,
            "rows": 32,
        },
    }

    package_digest: Digest = Field(
        description="package to start from; the new one differs only in its program"
    )
    weights: ProgramWeights = Field(
        default=ProgramWeights.FLOAT32,
        description="storage of the frozen weights; int4 needs an int4 package and rounds inputs to 8 bits",
    )
    variants: Annotated[
        int,
        Field(strict=True, ge=1, le=256, description="number of variants of the sparse values in one pass"),
        WholeNumber,
    ] = 8
    rows: Annotated[
        int,
        Field(strict=True, ge=1, le=1024, description="sequences in one pass, summed over all variants"),
        WholeNumber,
    ] = 16
    tokens: Annotated[
        int,
        Field(strict=True, ge=8, le=8192, description="tokens in a sequence; devices use 128"),
        WholeNumber,
    ] = 128


class PackageLayer(Closed):
    """A layer of a package."""

    role: str
    media_type: str
    digest: Digest
    size_bytes: Count
    path: str | None


class PackageRecord(Result):
    """A package. Its id is the digest of its manifest.

    If the package has the layer `program`, an inference engine can run this program.
    """

    request: PackageCreate | ExportCreate
    k: Count
    layers: list[PackageLayer]


class BuildCreate(Closed):
    """Make a package of a model in one request."""

    examples: ClassVar[Examples] = {
        "sensitive weights and nf4": {
            "model_id": EXAMPLE_MODEL,
            "mask": {"method": "fisher", "corpus_id": EXAMPLE_CORPUS, "density": 0.001, "sequences": 100},
            "quantization": {"scheme": "nf4"},
        },
        "an adapter in place of sensitive weights": {
            "model_id": EXAMPLE_MODEL,
            "adapter": {"kind": "lora-fa", "rank": 16},
        },
    }

    model_config = _either("mask", "object")

    model_id: Id = Field(description="model to make a package of")
    mask: MaskRequest | None = None
    adapter: Adapter | None = None
    # The field `scheme` has no default, because pydantic uses it to choose between `Nf4` and the other
    # classes. So it must be given even here.
    quantization: QuantizationOptions = Nf4(scheme=SchemeName.NF4)
    evaluation_corpus_id: EvaluationCorpus = None
    basis: Basis = False

    @model_validator(mode="before")
    @classmethod
    def _check_either(cls, data: Any) -> Any:
        # This runs before the fields are parsed. Otherwise, errors about a mask would confuse a user who
        # wants an adapter.
        if isinstance(data, dict) and data.get("adapter") is not None and isinstance(data.get("mask"), dict):
            raise ValueError(f"{_EITHER}: {', '.join(data['mask'])} do not go with an adapter")
        return data

    @model_validator(mode="after")
    def _check(self) -> Self:
        _check_trainable(self.mask, self.adapter)
        return self

    def mask_request(self) -> FisherMaskCreate | WeightMaskCreate | None:
        """Return the request of the mask job, or None if an adapter is trained."""
        if self.mask is None:
            return None
        create = FisherMaskCreate if isinstance(self.mask, FisherMask) else WeightMaskCreate
        return create.model_validate({**self.mask.model_dump(), "model_id": self.model_id})

    def quantization_request(self) -> QuantizationCreate:
        """Return the request of the quantization job."""
        return QuantizationCreate(
            model_id=self.model_id,
            evaluation_corpus_id=self.evaluation_corpus_id,
            options=self.quantization,
        )

    def package_request(self, mask_id: str | None, quantization_id: str) -> PackageCreate:
        """Return the request of the package job, once the other parts have succeeded."""
        return PackageCreate(
            mask_id=mask_id,
            adapter=self.adapter,
            quantization_id=quantization_id,
            basis=self.basis,
        )


class _OfJob(Closed):
    """Fields that builds and exports have in common. Their ids are those of their jobs."""

    id: Id
    state: JobState
    created_at: Timestamp


class Build(_OfJob):
    """A build and its results so far. Its id is that of its job."""

    model_id: Id
    request: BuildCreate
    mask_id: Id | None
    quantization_id: Id | None
    package_digest: Digest | None


class Export(_OfJob):
    """An export of a package. Its id is that of its job."""

    request: ExportCreate
    package_digest: Digest | None = Field(
        description="digest of the package with the program, once it exists"
    )

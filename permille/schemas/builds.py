"""Builds: mask, quantization, package, and a basis if asked for, in one request."""

from permille.schemas.bases import BasisRequest
from permille.schemas.fields import Closed, Digest, Id, Timestamp
from permille.schemas.jobs import JobState
from permille.schemas.masks import MaskRequest
from permille.schemas.quantizations import Nf4, QuantizationOptions, SchemeName


class BuildCreate(Closed):
    """Make a package of a model in one go. `mask_aware` leaves the mask's weights out of the groups' scales;
    `basis` adds learned directions, `fisher_exponents` powers of two from the scores of a fisher mask;
    `measure_precision` measures how far the projected gradient is from the exact one, on a few sequences of
    `precision_corpus_id`, which is the mask's corpus unless another is named."""

    model_id: Id
    mask: MaskRequest
    quantization: QuantizationOptions = Nf4(scheme=SchemeName.NF4)
    mask_aware: bool = False
    evaluation_corpus_id: Id | None = None
    basis: BasisRequest | None = None
    fisher_exponents: bool = False
    measure_precision: bool = False
    precision_corpus_id: Id | None = None


class Build(Closed):
    """One build; its id is its job's."""

    id: Id
    state: JobState
    model_id: Id
    mask_id: Id | None
    quantization_id: Id | None
    basis_id: Id | None
    package_digest: Digest | None
    created_at: Timestamp

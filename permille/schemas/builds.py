"""Builds: mask, quantization and package in one request."""

from permille.schemas.fields import Closed, Digest, Id, Timestamp
from permille.schemas.jobs import JobState
from permille.schemas.masks import MaskRequest
from permille.schemas.quantizations import Nf4, QuantizationOptions, SchemeName


class BuildCreate(Closed):
    """Make a package of a model in one go. `fisher_exponents` adds powers of two from the scores of a fisher
    mask."""

    model_id: Id
    mask: MaskRequest
    quantization: QuantizationOptions = Nf4(scheme=SchemeName.NF4)
    evaluation_corpus_id: Id | None = None
    fisher_exponents: bool = False


class Build(Closed):
    """One build; its id is its job's."""

    id: Id
    state: JobState
    model_id: Id
    mask_id: Id | None
    quantization_id: Id | None
    package_digest: Digest | None
    created_at: Timestamp

"""Builds: mask, quantization and package in one request."""

from permille.schemas.fields import Closed, Digest, Id, Timestamp
from permille.schemas.jobs import JobState
from permille.schemas.masks import MaskOptions
from permille.schemas.quantizations import QuantizationOptions


class BuildCreate(Closed):
    """Make a package of a model in one go."""

    model_id: Id
    corpus_id: Id | None = None
    evaluation_corpus_id: Id | None = None
    mask: MaskOptions = MaskOptions()
    quantization: QuantizationOptions = QuantizationOptions()
    mask_aware: bool = True


class Build(Closed):
    """One build; its id is its job's."""

    id: Id
    state: JobState
    model_id: Id
    mask_id: Id | None
    quantization_id: Id | None
    package_digest: Digest | None
    created_at: Timestamp

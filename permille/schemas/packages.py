"""Packages: what a device downloads."""

from typing import Final

from permille.schemas.fields import Closed, Count, Digest, Id, Timestamp

MANIFEST_MEDIA_TYPE: Final = "application/vnd.permille.manifest+json"


class PackageCreate(Closed):
    """Make a package of a mask and a quantization of the same model. `fisher_exponents` adds powers of two
    from the scores of a fisher mask."""

    mask_id: Id
    quantization_id: Id
    fisher_exponents: bool = False


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

"""A package as an artifact of the ModelPack specification: one blob of the package is one raw layer.

So a layer has the digest that the package's manifest states, and is fetched, resumed and checked by it.
Registries and other tools read the artifact's manifest, and collect blobs that no manifest names as garbage.
This manifest is not signed, and permille never reads it.
"""

from dataclasses import dataclass
from typing import Final

from permille.digests import JSON, canonical_json, digest_of
from permille.package.limits import Role
from permille.package.manifest import Layer, Manifest

MANIFEST_TYPE: Final = "application/vnd.oci.image.manifest.v1+json"
ARTIFACT_TYPE: Final = "application/vnd.cncf.model.manifest.v1+json"
CONFIG_TYPE: Final = "application/vnd.cncf.model.config.v1+json"
_KIND_TYPE: Final = "application/vnd.cncf.model.{}.v1.raw"


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """A layer of the artifact. `path` is the name of its file for tools that unpack the artifact."""

    digest: str
    size_bytes: int
    kind: str
    path: str


def blobs_of(package: bytes) -> list[Blob]:
    """Return the layers of a package: its manifest, then its blobs.

    Raises:
        PackageError: the manifest is invalid.
    """
    manifest = Manifest.from_bytes(package)
    first = Blob(
        digest=digest_of(package), size_bytes=len(package), kind="weight.config", path="package.json"
    )
    return [first, *map(_blob, manifest.layers)]


def _blob(layer: Layer) -> Blob:
    kind = "weight" if layer.role is not Role.FILE else "weight.config"
    return Blob(
        digest=layer.digest,
        size_bytes=layer.size_bytes,
        kind="doc" if layer.path == "LICENSE" else kind,
        path=layer.path or layer.role,
    )


def config_of(name: str, version: int, package: bytes) -> bytes:
    """Return the artifact's config, which describes the model. The same version gives the same bytes."""
    manifest = Manifest.from_bytes(package)
    return canonical_json(
        {
            "descriptor": {"name": name, "version": str(version), "family": manifest.model.family},
            "config": {"format": "permille", "quantization": manifest.scheme.name},
            "modelfs": {"type": "layers", "diffIds": [blob.digest for blob in blobs_of(package)]},
        }
    )


def artifact_of(config: bytes, package: bytes) -> bytes:
    """Return the artifact's manifest."""
    layers: list[JSON] = [
        {
            "mediaType": _KIND_TYPE.format(blob.kind),
            "digest": blob.digest,
            "size": blob.size_bytes,
            "annotations": {"org.cncf.model.filepath": blob.path},
        }
        for blob in blobs_of(package)
    ]
    return canonical_json(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "artifactType": ARTIFACT_TYPE,
            "config": {"mediaType": CONFIG_TYPE, "digest": digest_of(config), "size": len(config)},
            "layers": layers,
        }
    )

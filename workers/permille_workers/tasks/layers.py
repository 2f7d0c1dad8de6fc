"""Layers that earlier jobs have stored, read again."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from permille.package.blobs import BlobFolder
from permille.package.limits import Role
from permille.package.manifest import Layer
from permille.package.safetensors_io import SafetensorsFile


def layer_of(record: dict[str, Any]) -> Layer:
    """A layer as its row has it."""
    return Layer(
        role=Role(record["role"]),
        digest=record["digest"],
        size_bytes=record["size_bytes"],
    )


def layer_record(layer: Layer) -> dict[str, Any]:
    """A layer as its row keeps it."""
    return {
        "role": layer.role.value,
        "media_type": layer.media_type,
        "digest": layer.digest,
        "size_bytes": layer.size_bytes,
    }


def read_mask(blobs: BlobFolder, digest: str) -> dict[str, NDArray[np.uint32]]:
    """Indices by tensor of a stored mask layer, its digest checked.

    Raises:
        PackageError: the blob is missing or damaged.
    """
    blobs.check(digest)
    file = SafetensorsFile(blobs.path(digest), dtypes=["U32"])
    return {name: file.tensor(name).data.view("<u4").astype(np.uint32) for name in file.names}

"""Forge packages: take a good package apart, let a test change one thing, and seal it with correct digests.

Because all digests are correct, the reader must find the change itself.
"""

from collections.abc import Callable
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray

from permille.digests import canonical_json, parse_canonical
from permille.package.blobs import BlobFolder
from permille.package.limits import BLOCK_BYTES, BLOCKED_ROLES, MAX_FILE_BYTES, MAX_MANIFEST_BYTES, Role
from permille.package.safetensors_io import SafetensorsWriter
from tests.unit.package.tiny import Tiny


class Container:
    """A safetensors layer in pieces: `entries` is the header, `body` the bytes of the tensors."""

    def __init__(self, data: bytes) -> None:
        length = int.from_bytes(data[:8], "little")
        entries = parse_canonical(data[8 : 8 + length].rstrip(b" "), length)
        assert isinstance(entries, dict)
        self.entries: dict[str, Any] = entries
        self.body = bytearray(data[8 + length :])

    def view(self, name: str, dtype: str) -> NDArray[Any]:
        """Return the numbers of a tensor. They can be changed in place."""
        begin, end = self.entries[name]["data_offsets"]
        return np.frombuffer(self.body, np.uint8)[begin:end].view(dtype)

    def data(self) -> bytes:
        """Return the bytes of the layer."""
        return container_bytes(canonical_json(self.entries), bytes(self.body))


def container_bytes(header: bytes, body: bytes) -> bytes:
    """Return a layer with this header, padded as FORMAT 4.1 prescribes."""
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + body


class Forge:
    """A package in pieces: `manifest` as JSON, `layers` by role or file name."""

    def __init__(self, tiny: Tiny, target: BlobFolder) -> None:
        self.tiny = tiny
        self.target = target
        manifest = parse_canonical(tiny.manifest.to_bytes(), MAX_MANIFEST_BYTES)
        assert isinstance(manifest, dict)
        self.manifest: dict[str, Any] = manifest
        self.layers = {
            layer["path"] or layer["role"]: tiny.blobs.read(layer["digest"], limit=MAX_FILE_BYTES)
            for layer in manifest["layers"]
        }

    def entry(self, name: str) -> dict[str, Any]:
        """Return the manifest's entry of a role or a file."""
        found: dict[str, Any] = next(
            layer for layer in self.manifest["layers"] if name in (layer["path"], layer["role"])
        )
        return found

    def container(self, role: str) -> Container:
        """Return a layer in pieces. Store a changed one with `replace`."""
        return Container(self.layers[role])

    def replace(self, name: str, data: bytes) -> None:
        """Replace the bytes of a layer, and correct its digest and size in the manifest."""
        self.layers[name] = data
        digest = self.target.put_bytes(data)
        self.entry(name).update(digest=digest, size_bytes=len(data))
        if name == "config.json":
            self.manifest["model"]["config"] = digest

    def rewrite(self, role: str, name: str, dtype: str, numbers: NDArray[Any]) -> None:
        """Write a layer again, with another dtype and other numbers for one tensor."""
        container = self.container(role)
        del container.entries["__metadata__"]
        with SafetensorsWriter(self.target) as writer:
            for other, entry in container.entries.items():
                if other == name:
                    writer.add(name, dtype, numbers.shape, numbers)
                else:
                    writer.add(other, entry["dtype"], tuple(entry["shape"]), container.view(other, "u1"))
            digest, _ = writer.finish()
        self.replace(role, self.target.read(digest, limit=MAX_FILE_BYTES))

    def rename(self, path: str, other: str) -> None:
        """Rename a file and sort the files again."""
        self.entry(path)["path"] = other
        self.layers[other] = self.layers.pop(path)
        roles = [role.value for role in Role]
        self.manifest["layers"].sort(key=lambda layer: (roles.index(layer["role"]), layer["path"] or ""))

    def seal(self) -> str:
        """Store everything with the correct hashes of blocks. Return the digest of the forged package."""
        parts = [self.layers[role.value] for role in BLOCKED_ROLES]
        hashes = [
            sha256(part[at : at + BLOCK_BYTES]).digest()
            for part in parts
            for at in range(0, len(part), BLOCK_BYTES)
        ]
        self.replace("blocks", b"".join(hashes))
        return self.seal_as_it_is()

    def seal_as_it_is(self) -> str:
        """Store everything like `seal`, but keep the hashes of blocks as they are."""
        return self.seal_bytes(canonical_json(self.manifest))

    def seal_bytes(self, manifest: bytes) -> str:
        """Store all layers and this manifest. Return its digest."""
        for data in self.layers.values():
            self.target.put_bytes(data)
        return self.target.put_bytes(manifest)

    def overwrite(self, digest: str, data: bytes) -> None:
        """Damage a stored blob: write other bytes under the same name."""
        path = self.target.path(digest)
        path.chmod(0o644)
        path.write_bytes(data)


Attack = Callable[[Forge], str]


class Register:
    """Attacks with the codes by which the reader must refuse them. An attack returns the digest to open."""

    def __init__(self) -> None:
        self.attacks: list[tuple[str, Attack]] = []
        self.names: list[str] = []

    def add(self, code: str, name: str, function: Attack) -> None:
        """Add an attack with a name."""
        self.attacks.append((code, function))
        self.names.append(name)

    def attack(self, code: str) -> Callable[[Attack], Attack]:
        """Decorate a function that is an attack."""

        def decorate(function: Attack) -> Attack:
            self.add(code, function.__name__, function)
            return function

        return decorate

"""Forged programs of a package: refused before a runtime reads them, or by the package that they name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from permille.digests import canonical_json, parse_canonical
from permille.engines.executorch.engine import ExecutorchEngine
from permille.errors import PackageError
from permille.package.limits import MAX_MANIFEST_BYTES, PROGRAM_HEADER_BYTES, Role
from permille.package.reader import Package, verify_package
from tests.packages import program_bytes, program_package, tiny_package

pytestmark = pytest.mark.attack(13, "forges the program of a package")

Forge = Callable[[bytes], bytes]
ATTACKS: list[tuple[str, Forge]] = [
    ("layer-size", lambda data: data[: PROGRAM_HEADER_BYTES - 1]),
    ("layer-size", lambda _: bytes((64 << 20) + (1 << 20))),
    ("program-header", lambda data: b"MZ" + data[2:4] + b"ET13" + data[8:]),
    ("program-header", lambda data: data.replace(b"eh00", b"eh01")),
    ("program-header", lambda data: data.replace(b"\x20\0\0\0", b"\x18\0\0\0")),
    ("program-header", lambda data: data + b"\0"),
    ("program-header", lambda data: data[:-1]),
    # The description is said to have 41 bytes, but the segments begin at byte 40.
    ("program-header", lambda data: data[:16] + b"\x29" + data[17:]),
    ("program-header", lambda data: data[:16] + b"\x27" + data[17:]),
    ("program-header", lambda data: data[:32] + b"\xff" * 8 + data[40:]),
]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return program_package(tiny_package(tmp_path_factory.mktemp("blobs")))


def test_an_honest_program_is_read(good: Package) -> None:
    path = verify_package(good.blobs, good.digest).program()
    assert path is not None and path.read_bytes() == program_bytes()


@pytest.mark.parametrize(("code", "forge"), ATTACKS)
def test_a_forged_program_is_refused(good: Package, code: str, forge: Forge) -> None:
    data, layer = forge(program_bytes()), good.manifest.layer(Role.PROGRAM)
    document: Any = parse_canonical(good.manifest.to_bytes(), MAX_MANIFEST_BYTES)
    entry = next(entry for entry in document["layers"] if entry["digest"] == layer.digest)
    entry |= {"digest": good.blobs.put_bytes(data), "size_bytes": len(data)}
    with pytest.raises(PackageError, match=f"^{code}:"):
        verify_package(good.blobs, good.blobs.put_bytes(canonical_json(document)))


def twice(layers: list[dict[str, Any]], program: dict[str, Any]) -> None:
    layers.insert(layers.index(program), program)


def before_the_mask(layers: list[dict[str, Any]], program: dict[str, Any]) -> None:
    layers.remove(program)
    layers.insert(3, program)


def as_a_file(_: list[dict[str, Any]], program: dict[str, Any]) -> None:
    program["path"] = "LICENSE"


@pytest.mark.parametrize(
    ("code", "change"),
    [("manifest-layers", twice), ("manifest-layers", before_the_mask), ("layer-path", as_a_file)],
)
def test_a_forged_manifest_is_refused(good: Package, code: str, change: Callable[..., None]) -> None:
    document: Any = parse_canonical(good.manifest.to_bytes(), MAX_MANIFEST_BYTES)
    change(document["layers"], next(entry for entry in document["layers"] if entry["role"] == "program"))
    with pytest.raises(PackageError, match=f"^{code}:"):
        verify_package(good.blobs, good.blobs.put_bytes(canonical_json(document)))


class OtherProgram:
    """A runtime with a program of another package, or with another number of weights."""

    def __init__(self, digest: str, k: int) -> None:
        self._digest = bytes.fromhex(digest.removeprefix("sha256:"))
        self._k = k

    def input_shape(self, _method: str, index: int) -> tuple[int, ...]:
        return (4, self._k) if index == 0 else (8, 16)

    def run(self, method: str, _inputs: object, out: NDArray[Any]) -> None:
        out[:] = np.frombuffer(self._digest, np.uint8) if method == "package" else 32


BINDINGS: list[tuple[str, Callable[[Package], OtherProgram]]] = [
    # This is the digest of the package itself instead of its parent.
    ("program-binding", lambda package: OtherProgram(package.digest, package.k)),
    ("program-binding", lambda package: OtherProgram(package.manifest.parent().digest, package.k + 1)),
]


@pytest.mark.parametrize(("code", "program"), BINDINGS)
def test_a_program_of_another_package_is_refused(
    good: Package, code: str, program: Callable[[Package], OtherProgram], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = program(good)
    monkeypatch.setattr("permille.engines.executorch.engine.Program", lambda _path, threads: found)
    with pytest.raises(PackageError, match=f"^{code}:"):
        ExecutorchEngine(good)


def test_a_damaged_or_absent_program_is_refused_where_it_is_wanted_alone(tmp_path: Path) -> None:
    package = program_package(tiny_package(tmp_path))
    path = package.blobs.path(package.manifest.layer(Role.PROGRAM).digest)
    path.chmod(0o644)
    path.write_bytes(program_bytes(b"not a Program"))
    with pytest.raises(PackageError, match=r"^blob-digest:"):
        Package.open(package.blobs, package.digest).program()
    with pytest.raises(PackageError, match=r"^blob-digest:"):
        verify_package(package.blobs, package.digest)
    path.unlink()
    assert verify_package(package.blobs, package.digest).k == package.k
    with pytest.raises(PackageError, match=r"^blob-missing:"):
        package.program()


def test_a_package_without_its_program_is_the_parent(tmp_path: Path) -> None:
    parent = tiny_package(tmp_path)
    one = program_package(parent)
    assert one.digest != parent.digest
    assert one.manifest.parent().to_bytes() == parent.manifest.to_bytes()
    assert set(one.manifest.layers) - set(parent.manifest.layers) == {one.manifest.layer(Role.PROGRAM)}
    again = program_package(one, program_bytes(b"another"))
    assert len(again.manifest.layers) == len(one.manifest.layers)
    assert again.manifest.parent() == parent.manifest

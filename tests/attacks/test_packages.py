"""At least one malformed package for each code of a refused package. All bytes are made here."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from permille.errors import PackageError
from permille.package.blobs import BlobFolder
from permille.package.limits import MAX_MANIFEST_BYTES
from permille.package.manifest import Manifest
from permille.package.reader import verify_package
from tests.attacks import malformed_layers, malformed_manifests
from tests.attacks.forge import Attack, Forge
from tests.unit.package.tiny import Tiny, write_tiny

pytestmark = pytest.mark.attack(13, "malformed packages")

ATTACKS: list[tuple[str, Attack]] = [
    *malformed_manifests.REGISTER.attacks,
    *malformed_layers.REGISTER.attacks,
]
NAMES = [*malformed_manifests.REGISTER.names, *malformed_layers.REGISTER.names]
BYTES_ATTACKS: list[tuple[str, bytes]] = [
    ("json-size", b" " * (MAX_MANIFEST_BYTES + 1)),
    ("json-malformed", b"{"),
    ("manifest-version", b"{}"),
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return write_tiny(BlobFolder(tmp_path_factory.mktemp("good")))


@pytest.fixture
def forge(tiny: Tiny, tmp_path: Path) -> Iterator[Forge]:
    yield Forge(tiny, BlobFolder(tmp_path))


def test_a_package_that_was_only_taken_apart_and_sealed_again_verifies(forge: Forge, tiny: Tiny) -> None:
    for role in ("dense", "plain", "mask", "values"):
        forge.replace(role, forge.container(role).data())
    assert forge.seal() == tiny.digest
    assert verify_package(forge.target, tiny.digest).k == tiny.manifest.k


@pytest.mark.parametrize(("code", "build"), ATTACKS, ids=NAMES)
def test_reader_refuses(code: str, build: Attack, forge: Forge) -> None:
    with pytest.raises(PackageError, match=f"^{code}:"):
        verify_package(forge.target, build(forge))


@pytest.mark.parametrize(("code", "manifest"), BYTES_ATTACKS, ids=[code for code, _ in BYTES_ATTACKS])
def test_a_manifest_is_refused_before_a_download(code: str, manifest: bytes) -> None:
    with pytest.raises(PackageError, match=f"^{code}:"):
        Manifest.from_bytes(manifest)

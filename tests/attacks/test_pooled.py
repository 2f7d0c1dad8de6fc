"""Forged pooled states with correct digests, each refused by a code of FORMAT 4.9 or 11."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from permille.digests import canonical_json, parse_canonical
from permille.errors import PackageError
from permille.package.limits import MAX_MANIFEST_BYTES, Role
from permille.package.manifest import Manifest
from permille.package.reader import Package
from permille.zo.packed_state import StateHeader, StateOrigin, encode_state, pooled_state
from tests.packages import pooled_package, tiny_package

pytestmark = pytest.mark.attack(13, "forges the pooled state of a package")

OTHER = "sha256:" + "c" * 64


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Package:
    package = tiny_package(tmp_path_factory.mktemp("blobs"))
    return pooled_package(package, np.arange(package.k) - 7, -14)


def opened(package: Package, manifest: bytes) -> list[int]:
    """Read a package with this manifest as a device does."""
    state = pooled_state(Package.open(package.blobs, package.blobs.put_bytes(manifest)))
    assert state is not None
    numbers: list[int] = state.s_K.tolist()
    return numbers


def state_of(package: Package, **changes: Any) -> bytes:
    fields: dict[str, Any] = {
        "package_digest": package.manifest.parent().digest,
        "mask_digest": package.mask_digest,
        "step_unit_exponent": -14,
        "k": package.k,
        "origin": StateOrigin.POOLED,
        **changes,
    }
    return encode_state(StateHeader(**fields), np.zeros(fields["k"], np.int64))


def test_an_honest_state_is_read(good: Package) -> None:
    assert opened(good, good.manifest.to_bytes()) == list(range(-7, good.k - 7))


STATES: list[tuple[str, str, Callable[[Package], bytes]]] = [
    ("state-binding", "of_the_package_itself", lambda p: state_of(p, package_digest=p.digest)),
    ("state-binding", "of_another_package", lambda p: state_of(p, package_digest=OTHER)),
    ("state-binding", "of_another_mask", lambda p: state_of(p, mask_digest=OTHER)),
    ("state-binding", "of_fewer_weights", lambda p: state_of(p, k=p.k - 1)),
    ("state-limit", "of_more_weights", lambda p: state_of(p, k=p.k + 1)),
    ("state-binding", "of_one_person", lambda p: state_of(p, origin=StateOrigin.PERSONAL)),
    ("state-corrupt", "that_is_cut", lambda p: state_of(p)[:-1]),
    ("state-corrupt", "of_zeros", lambda p: bytes(200)),
    ("layer-size", "smaller_than_any", lambda p: b"PMLSTA1\n"),
    ("layer-size", "larger_than_any", lambda p: bytes(8 * p.k + 2000)),
]


@pytest.mark.parametrize(
    ("code", "forge"), [(code, forge) for code, _, forge in STATES], ids=[name for _, name, _ in STATES]
)
def test_a_forged_state_is_refused(good: Package, code: str, forge: Callable[[Package], bytes]) -> None:
    layer = good.manifest.layer(Role.POOLED)
    data = forge(good)
    document = parse_canonical(good.manifest.to_bytes(), MAX_MANIFEST_BYTES)
    assert isinstance(document, dict)
    for entry in document["layers"]:
        if entry["digest"] == layer.digest:
            entry |= {"digest": good.blobs.put_bytes(data), "size_bytes": len(data)}
    with pytest.raises(PackageError, match=f"^{code}:"):
        opened(good, canonical_json(document))


def with_other_values(document: dict[str, Any]) -> None:
    """Change the provenance, so that the parent is not the package that the state names."""
    document["provenance"]["mask"] = "another"


def with_two_states(document: dict[str, Any]) -> None:
    state = next(entry for entry in document["layers"] if entry["role"] == "pooled")
    document["layers"].insert(document["layers"].index(state), dict(state))


def with_a_media_type_of_tensors(document: dict[str, Any]) -> None:
    state = next(entry for entry in document["layers"] if entry["role"] == "pooled")
    state["media_type"] = "application/vnd.permille.pooled+safetensors"


def with_a_path(document: dict[str, Any]) -> None:
    state = next(entry for entry in document["layers"] if entry["role"] == "pooled")
    state["path"] = "config.json"


def out_of_order(document: dict[str, Any]) -> None:
    document["layers"] = document["layers"][::-1]


MANIFESTS: list[tuple[str, Callable[[dict[str, Any]], None]]] = [
    ("state-binding", with_other_values),
    ("manifest-layers", with_two_states),
    ("manifest-schema", with_a_media_type_of_tensors),
    ("layer-path", with_a_path),
    ("manifest-layers", out_of_order),
]


@pytest.mark.parametrize(("code", "forge"), MANIFESTS)
def test_a_forged_manifest_is_refused(
    good: Package, code: str, forge: Callable[[dict[str, Any]], None]
) -> None:
    document = parse_canonical(good.manifest.to_bytes(), MAX_MANIFEST_BYTES)
    assert isinstance(document, dict)
    forge(document)
    with pytest.raises(PackageError, match=f"^{code}:"):
        opened(good, canonical_json(document))


def test_a_damaged_state_is_refused_by_its_digest(tmp_path: Path) -> None:
    package = tiny_package(tmp_path / "blobs")
    made = pooled_package(package, np.ones(package.k, np.int64), -14)
    path = made.blobs.path(made.manifest.layer(Role.POOLED).digest)
    path.chmod(0o644)
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(PackageError, match=r"^blob-digest:"):
        Package.open(made.blobs, made.digest)


# Golden: both manifests as bytes, so that the parent is compared with fixed bytes.
_HEAD = (
    b'{"format":"permille-package","layers":['
    b'{"digest":"sha256:%(d)s","media_type":"application/vnd.permille.dense+safetensors","path":null,'
    b'"role":"dense","size_bytes":1300},'
    b'{"digest":"sha256:%(d)s","media_type":"application/vnd.permille.plain+safetensors","path":null,'
    b'"role":"plain","size_bytes":9},'
    b'{"digest":"sha256:%(d)s","media_type":"application/vnd.permille.blocks","path":null,'
    b'"role":"blocks","size_bytes":64},'
    b'{"digest":"sha256:%(d)s","media_type":"application/vnd.permille.mask+safetensors","path":null,'
    b'"role":"mask","size_bytes":100},'
    b'{"digest":"sha256:%(d)s","media_type":"application/vnd.permille.values+safetensors","path":null,'
    b'"role":"values","size_bytes":100},'
)
_STATE = (
    b'{"digest":"sha256:%(s)s","media_type":"application/vnd.permille.state","path":null,'
    b'"role":"pooled","size_bytes":300},'
)
_FILE = (
    b'{"digest":"sha256:%(c)s","media_type":"application/vnd.permille.file","path":"config.json",'
    b'"role":"file","size_bytes":2}],'
    b'"lengths":{"perturbation":"0x1.0000000000000p-1","step":"0x1.8000000000000p+0"},'
    b'"mask":{"density":"0.01","k":3,"method":"random","scope":"all"},'
    b'"model":{"config":"sha256:%(c)s","family":"llama"},"provenance":{"mask":{"seed":1}'
)
_TAIL = (
    b'},"scheme":{"group_size":32,"name":"int4"},'
    b'"tensors":[{"count":3,"name":"a","shape":[32,64]}],"version":1}'
)
_POOLING = b',"pooling":{"corpus":"c4"}'
_DIGESTS = {b"d": b"d" * 64, b"s": b"5" * 64, b"c": b"c" * 64}


def test_the_parent_is_these_bytes() -> None:
    parent = (_HEAD + _FILE + _TAIL) % _DIGESTS
    child = (_HEAD + _STATE + _FILE + _POOLING + _TAIL) % _DIGESTS
    assert Manifest.from_bytes(child).to_bytes() == child
    assert Manifest.from_bytes(child).parent().to_bytes() == parent
    assert Manifest.from_bytes(parent).parent().digest == "sha256:" + hashlib.sha256(parent).hexdigest()

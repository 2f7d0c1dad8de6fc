"""Forged bases of a package, which would crash a training or move its weights anywhere, are refused."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from permille.digests import canonical_json, parse_canonical
from permille.errors import PackageError
from permille.package.limits import MAX_MANIFEST_BYTES, Role
from permille.package.reader import Package, verify_package
from permille.package.safetensors_io import SafetensorsWriter
from tests.packages import tiny_package

pytestmark = pytest.mark.attack(13, "forges the basis of a package")

Tensors = dict[str, tuple[str, NDArray[Any]]]
Forge = Callable[[Tensors], object]


def columns(change: Callable[[NDArray[np.int8]], NDArray[Any]], dtype: str = "I8") -> Forge:
    return lambda tensors: tensors.update(columns=(dtype, change(tensors["columns"][1])))


def lengths(*numbers: float, dtype: str = "F32") -> Forge:
    found = np.array(numbers, "<f4").view("<i4" if dtype == "I32" else "<f4")
    return lambda tensors: tensors.update(lengths=(dtype, found))


def longer_row(columns_RK: NDArray[np.int8]) -> NDArray[np.int8]:
    return np.concatenate([columns_RK[:1] * np.int8(2), columns_RK[1:]])


ATTACKS: list[tuple[str, Forge]] = [
    ("basis", lambda tensors: tensors.pop("lengths")),
    ("basis", lambda tensors: tensors.update(more=tensors["lengths"])),
    ("basis", columns(lambda columns_RK: columns_RK[:1])),
    ("basis", columns(lambda columns_RK: np.tile(columns_RK, (6, 1))[:17])),
    ("basis", columns(lambda columns_RK: columns_RK[:, 1:])),
    ("basis", columns(lambda columns_RK: columns_RK.reshape(-1))),
    ("basis", columns(lambda columns_RK: columns_RK.astype("<f4"), "F32")),
    ("basis", columns(lambda columns_RK: columns_RK * np.int8(0))),
    ("basis", columns(lambda columns_RK: np.full_like(columns_RK, -128))),
    ("basis", columns(longer_row)),
    *(("basis", lengths(*numbers)) for numbers in ((np.nan, 1), (1, np.inf), (0, 1), (1, -1), (2**21, 1))),
    ("basis", lengths(1)),
    ("basis", lengths(1, 1, 1)),
]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return tiny_package(tmp_path_factory.mktemp("blobs"))


def forged(package: Package, forge: Forge) -> str:
    """Return the digest of a package with this basis."""
    signs_RK = np.random.default_rng(0).choice([-1, 1], (3, package.k))
    tensors: Tensors = {
        "columns": ("I8", (60 * signs_RK).astype(np.int8)),
        "lengths": ("F32", np.array([0.25, 0.5], "<f4")),
    }
    forge(tensors)
    with SafetensorsWriter(package.blobs) as writer:
        for name, (dtype, data) in tensors.items():
            writer.add(name, dtype, data.shape, np.ascontiguousarray(data))
        digest, size = writer.finish()
    document: Any = parse_canonical(package.manifest.to_bytes(), MAX_MANIFEST_BYTES)
    entry = {"role": Role.BASIS, "digest": digest, "size_bytes": size, "path": None}
    entry["media_type"] = "application/vnd.permille.basis+safetensors"
    files = [layer["role"] == Role.FILE for layer in document["layers"]].index(True)
    document["layers"].insert(files, entry)
    return package.blobs.put_bytes(canonical_json(document))


def test_a_good_basis_is_read(good: Package) -> None:
    basis = verify_package(good.blobs, forged(good, lambda _: None)).basis()
    assert basis is not None and basis.columns_RK.shape == (3, good.k)


@pytest.mark.parametrize(("code", "forge"), ATTACKS)
def test_a_forged_basis_is_refused(good: Package, code: str, forge: Forge) -> None:
    with pytest.raises(PackageError, match=f"^({code}|layer-size):"):
        verify_package(good.blobs, forged(good, forge))

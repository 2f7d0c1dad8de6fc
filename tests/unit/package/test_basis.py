"""Tests of the basis layer: it is a part of the package, and comes back whole."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from permille.errors import InputError, PackageError
from permille.package.basis import Basis, stored_basis, write_basis
from permille.package.build import write_manifest
from permille.package.manifest import Manifest
from permille.package.reader import Package, verify_package
from tests.packages import tiny_package


def basis_for(k: int, rows: int = 3) -> Basis:
    """Return a basis of random signs times 90."""
    columns_RK = 90 * np.random.default_rng(0).choice([-1, 1], (rows, k))
    return Basis(columns_RK=columns_RK.astype(np.int8), reach=0.25, length=0.5)


def with_basis(package: Package) -> Manifest:
    return package.manifest.with_part(write_basis(package.blobs, basis_for(package.k)), {"corpus": "numbers"})


def test_a_basis_is_part_of_the_parent_and_comes_back(tmp_path: Path) -> None:
    package = tiny_package(tmp_path / "blobs")
    manifest = with_basis(package)
    assert manifest.parent() == manifest
    assert manifest.provenance["basis"] == {"corpus": "numbers"}
    opened = verify_package(package.blobs, write_manifest(package.blobs, manifest))
    found, expected = opened.basis(), basis_for(package.k)
    assert found is not None
    np.testing.assert_array_equal(found.columns_RK, expected.columns_RK)
    assert (found.reach, found.length) == (0.25, 0.5)
    assert found.norm == pytest.approx(90 * package.k**0.5)
    assert 128 <= found.length / found.norm / 2.0**found.step_unit_exponent < 256
    assert package.basis() is None and stored_basis(package.blobs, package.manifest) is None


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"reach": 1e-7}, "has the lengths 1e-07"),
        ({"length": np.nan}, "nan"),
        ({"columns_RK": None}, "norms"),
    ],
)
def test_a_basis_that_devices_refuse_is_not_stored(tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    package = tiny_package(tmp_path / "blobs")
    good = basis_for(package.k)
    if "columns_RK" in changes:
        changes = {"columns_RK": good.columns_RK // np.array([[1], [1], [2]], np.int8)}
    before = set(package.blobs.entries())
    with pytest.raises(InputError, match=why):
        write_basis(package.blobs, replace(good, **changes))
    assert set(package.blobs.entries()) == before


def test_a_stored_basis_is_checked_against_its_digest(tmp_path: Path) -> None:
    package = tiny_package(tmp_path / "blobs")
    manifest = with_basis(package)
    found = stored_basis(package.blobs, manifest)
    assert found is not None and found.columns_RK.shape == (3, package.k)
    path = package.blobs.path(next(layer.digest for layer in manifest.layers if layer.role == "basis"))
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    with pytest.raises(PackageError, match=r"^blob-digest"):
        stored_basis(package.blobs, manifest)

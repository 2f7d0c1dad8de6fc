"""Exponents, a basis and measurements come back, are optional, and nothing wrong is written."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from permille.errors import InputError, PackageError
from permille.package.blobs import BlobFolder
from permille.package.direction_layers import write_basis, write_exponents
from permille.package.limits import Role
from permille.package.manifest import Manifest
from permille.package.reader import Package, verify_package
from permille.package.writer import add_measurements
from tests.unit.package.tiny import write_tiny

K = 70
EXPONENTS = (np.arange(K) % 16).astype(np.int8)
BASIS = (np.arange(K * 3).reshape(K, 3) % 255 - 127).astype(np.int8)
COUNTS = {"a": 2, "b": 0, "c": 3}


@pytest.fixture
def blobs(tmp_path: Path) -> BlobFolder:
    return BlobFolder(tmp_path)


def test_both_come_back_in_flat_order(blobs: BlobFolder) -> None:
    tiny = write_tiny(blobs, exponents=EXPONENTS, basis=BASIS)
    package = Package.open(blobs, tiny.digest)
    exponents, basis = package.exponents(), package.basis()
    assert exponents is not None and basis is not None
    assert exponents.dtype == basis.dtype == np.dtype(np.int8)
    assert np.array_equal(exponents, EXPONENTS) and np.array_equal(basis, BASIS)
    assert package.basis_rank == 3
    roles = [layer.role for layer in package.manifest.layers]
    assert roles[:7] == [*list(Role)[:6], Role.FILE]
    assert {layer.role for layer in verify_package(blobs, tiny.digest).layers} == set(Role)


def test_a_package_without_them_has_none_and_the_bytes_it_always_had(tmp_path: Path) -> None:
    """The digest is that of version 0.1.0, before these layers were known."""
    tiny = write_tiny(BlobFolder(tmp_path))
    package = Package.open(tiny.blobs, tiny.digest)
    assert package.exponents() is None and package.basis() is None and package.basis_rank is None
    assert tiny.digest == "sha256:e35c4d3d91b0b749d09778a9d3fd5dff71025684c1fd93f33a9862799ee707ce"


def test_either_may_come_alone_and_changes_nothing_else(blobs: BlobFolder) -> None:
    without = set(write_tiny(blobs).manifest.layers)
    for made in (write_tiny(blobs, exponents=EXPONENTS), write_tiny(blobs, basis=BASIS)):
        assert len(set(made.manifest.layers) - without) == 1 and without < set(made.manifest.layers)
        assert Manifest.from_bytes(made.manifest.to_bytes()) == made.manifest
        package = Package.open(blobs, made.digest)
        assert (package.exponents() is None) != (package.basis() is None)


@pytest.mark.parametrize("role", [Role.EXPONENTS, Role.BASIS])
def test_bytes_that_changed_in_the_blob_folder_are_not_used(blobs: BlobFolder, role: Role) -> None:
    tiny = write_tiny(blobs, exponents=EXPONENTS, basis=BASIS)
    package = Package.open(blobs, tiny.digest)
    path = blobs.path(package.manifest.layer(role).digest)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # one number, still in range
    path.chmod(0o644)
    path.write_bytes(data)
    with pytest.raises(PackageError, match="blob-digest"):
        package.basis() if role is Role.BASIS else package.exponents()


def test_a_tensor_without_masked_weights_has_no_rows(blobs: BlobFolder) -> None:
    layer = write_basis(blobs, np.ones((5, 2), np.int8), COUNTS)
    same = write_basis(blobs, np.ones((5, 2), np.int8), dict(COUNTS))
    assert layer == same
    assert layer != write_basis(blobs, np.ones((5, 2), np.int8), COUNTS | {"a": 3, "c": 2})


def test_measurements_are_added_and_replaced_without_touching_the_rest(blobs: BlobFolder) -> None:
    tiny = write_tiny(blobs, basis=BASIS)
    package = Package.open(blobs, tiny.digest)
    assert package.measurements() is None
    measured = {"torch": {"bf16": {"0.01": 0.05}}}
    first = Package.open(blobs, add_measurements(package, {"torch": {}}))
    second = Package.open(blobs, add_measurements(first, measured))
    assert second.measurements() == measured
    assert set(package.manifest.layers) < set(second.manifest.layers)
    assert len(second.manifest.layers) == len(package.manifest.layers) + 1
    assert second.mask_digest == package.mask_digest
    with pytest.raises(ValueError, match="JSON compliant"):
        add_measurements(package, {"error": float("nan")})


@pytest.mark.parametrize(
    "exponents",
    [
        np.zeros(4, np.int8),
        np.zeros((5, 1), np.int8),
        np.zeros(5, np.int16),
        np.ones(5, np.int8),
        np.array([0, 0, 0, 0, 16], np.int8),
        np.array([0, 0, 0, 0, -1], np.int8),
    ],
)
def test_exponents_are_refused(blobs: BlobFolder, exponents: NDArray[np.int8]) -> None:
    with pytest.raises(InputError):
        write_exponents(blobs, exponents, COUNTS)
    assert list(blobs.iterate()) == []


@pytest.mark.parametrize(
    "basis",
    [
        np.ones(5, np.int8),
        np.ones((4, 2), np.int8),
        np.ones((5, 0), np.int8),
        np.ones((5, 257), np.int8),
        np.ones((5, 2), np.float32),
        np.full((5, 2), -128, np.int8),
        np.zeros((5, 2), np.int8),
    ],
)
def test_a_basis_is_refused(blobs: BlobFolder, basis: NDArray[np.int8]) -> None:
    with pytest.raises(InputError):
        write_basis(blobs, basis, COUNTS)
    assert list(blobs.iterate()) == []

"""The basis of a package: directions that were learned from public text (FORMAT 4.13).

The first steps of a log may move the weights along these columns instead of random directions. Replay adds
the coefficients of each column first, and then multiplies each column once.

Shapes: R = columns, Q = coefficients of a step, K = masked weights, T = steps.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from permille.errors import InputError, PackageError
from permille.package.blobs import BlobFolder
from permille.package.limits import LARGEST_ELEMENT, MAX_COLUMNS, MAX_LENGTH_EXPONENT, Role
from permille.package.manifest import Layer, Manifest
from permille.package.safetensors_io import SafetensorsFile, SafetensorsWriter

DTYPES = frozenset({"I8", "F32"})
_UNITS = 128  # so that rounding changes a step by some 1 %
_SPREAD = 1.1  # the largest quotient of two columns' squared norms


@dataclass(frozen=True, kw_only=True, eq=False)
class Basis:
    """Columns of nearly equal norms, and the lengths of the steps in them.

    Attributes:
        columns_RK: int8, elements from -127 to 127. The columns that matter most come first.
        reach: the length of a perturbation, as the norm of the change of the weights.
        length: the length of the first step, as such a norm.
    """

    columns_RK: NDArray[np.int8]
    reach: float
    length: float

    @cached_property
    def norm(self) -> float:
        """Return the root mean square of the columns' norms (FORMAT 7.4)."""
        return math.sqrt(sum(self.squares()) / len(self.columns_RK))

    @property
    def step_unit_exponent(self) -> int:
        """Return the exponent of the largest unit with which the first step has `_UNITS` units or more."""
        return math.frexp(self.length / (_UNITS * self.norm))[1] - 1

    def squares(self) -> list[int]:
        """Return the squared norm of each column."""
        # Sum integers, because the order of additions cannot change their sum.
        return [int(np.square(column_K, dtype=np.int64).sum()) for column_K in self.columns_RK]

    def sums(self, coefficients_TQ: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sum over steps t and columns i of `c[t, i] * column[i]`, int64 [K].

        The caller checks that `127 * sum |c|` is within 2**53 (FORMAT 7.3).

        Raises:
            InputError: a step moves more columns than there are.
        """
        columns = len(self.columns_RK)
        if coefficients_TQ[:, columns:].any():
            raise InputError(f"A step moves more columns than the {columns} of the package's basis.")
        sums_K = np.zeros(self.columns_RK.shape[1], np.int64)
        for c, column_K in zip(coefficients_TQ.sum(axis=0).tolist(), self.columns_RK, strict=False):
            sums_K += c * column_K.astype(np.int64)
        return sums_K


def required(basis: Basis | None) -> Basis:
    """Return the basis of a package.

    Raises:
        InputError: the package has none.
    """
    if basis is None:
        raise InputError("The first steps of the log are in a basis, and the package has none.")
    return basis


def write_basis(blobs: BlobFolder, basis: Basis) -> Layer:
    """Store a basis as a layer.

    Raises:
        InputError: a device would refuse the basis.
        OSError: from the file system. No blob is left.
    """
    if fault := _fault(basis):
        raise InputError(f"The basis that was learned from this text {fault}. Choose other text.")
    lengths = np.array([basis.reach, basis.length], "<f4")
    with SafetensorsWriter(blobs) as writer:
        writer.add("columns", "I8", basis.columns_RK.shape, np.ascontiguousarray(basis.columns_RK))
        writer.add("lengths", "F32", lengths.shape, lengths)
        digest, size = writer.finish()
    return Layer(role=Role.BASIS, digest=digest, size_bytes=size)


def stored_basis(blobs: BlobFolder, manifest: Manifest) -> Basis | None:
    """Read the basis of a stored package, and none of its other layers. Return None if it has no basis.

    Raises:
        PackageError: `blob-missing`, `blob-digest`, a rule of FORMAT 4.1, or `basis`.
    """
    if not manifest.has_layer(Role.BASIS):
        return None
    digest = manifest.layer(Role.BASIS).digest
    blobs.check(digest)
    return read_basis(SafetensorsFile(blobs.path(digest), dtypes=DTYPES), manifest.k)


def read_basis(layer: SafetensorsFile, k: int) -> Basis:
    """Read the basis of a layer whose digest was checked, for `k` masked weights.

    Raises:
        PackageError: `basis`: a tensor is missing, has another shape or dtype, or a value is out of range.
    """
    if set(layer.names) != {"columns", "lengths"}:
        raise _refused(f"has the tensors {sorted(layer.names)!r:.200}, not columns and lengths")
    columns, lengths = layer.tensor("columns"), layer.tensor("lengths")
    rows = columns.shape[0] if len(columns.shape) == 2 else 0
    if columns.dtype != "I8" or columns.shape != (rows, k) or not 2 <= rows <= MAX_COLUMNS:
        got = f"{columns.dtype} {list(columns.shape)}"
        raise _refused(f"has columns of {got}, not I8 of 2 to {MAX_COLUMNS} times {k}")
    if lengths.dtype != "F32" or lengths.shape != (2,):
        raise _refused(f"has lengths of {lengths.dtype} {list(lengths.shape)}, not F32 [2]")
    reach, length = lengths.float32().tolist()
    basis = Basis(columns_RK=columns.data.view(np.int8).reshape(rows, k), reach=reach, length=length)
    if fault := _fault(basis):
        raise _refused(fault)
    return basis


def _fault(basis: Basis) -> str:
    """Return why the numbers of a basis are out of range, or ""."""
    least, most = 2.0**-MAX_LENGTH_EXPONENT, 2.0**MAX_LENGTH_EXPONENT
    # NaN fails the comparisons, too.
    if not (least <= basis.reach <= most and least <= basis.length <= most):
        return f"has the lengths {basis.reach} and {basis.length}, not 2^-20 to 2^20"
    if int(basis.columns_RK.min()) < -LARGEST_ELEMENT:
        return "has an element below -127"
    squares = basis.squares()
    return "" if 0 < max(squares) <= _SPREAD * min(squares) else "has columns of different norms"


def _refused(why: str) -> PackageError:
    return PackageError("basis", f"The basis of the package {why}.")

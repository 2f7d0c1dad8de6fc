"""Matrix products with numpy's BLAS library. A product can be written to a column range of a wider matrix.

numpy itself writes a product only to a contiguous array. Its BLAS library also accepts arrays with gaps
between the rows. (scipy's wrappers of BLAS would copy such arrays, and a device needs scipy for nothing
else.) This module looks for the library where numpy's wheels put it. If it is not there (another BLAS, or a
distribution's numpy), numpy writes each product to a temporary array, which is then copied.

The library is set to one thread, because the engine has threads of its own. This affects the whole process.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]

# CBLAS_ORDER and CBLAS_TRANSPOSE of cblas.h.
_ROW_MAJOR, _AS_IS, _TRANSPOSED = 101, 111, 112
# Where wheels put their libraries: auditwheel, older wheels, and delocate on macOS.
_FOLDERS = ("../numpy.libs", ".libs", ".dylibs")


class Blas:
    """Single-threaded float32 products."""

    def __init__(self) -> None:
        self._library = _library()
        if self._library is not None:
            self._library.set_threads(1)

    @property
    def name(self) -> str:
        """Return the name of the BLAS library, which affects the bits of results."""
        return "numpy's matmul" if self._library is None else self._library.name

    def product(self, a_MK: Array, b_NK: Array, out_MN: Array) -> None:
        """Set `out = a b^T`. Each row must be contiguous, but there may be gaps between rows."""
        self._multiply(a_MK, b_NK, out_MN, _TRANSPOSED, 0.0)

    def plain_product(self, a_MK: Array, b_KN: Array, out_MN: Array) -> None:
        """Set `out = a b`."""
        self._multiply(a_MK, b_KN, out_MN, _AS_IS, 0.0)

    def add_product(self, a_MK: Array, b_KN: Array, out_MN: Array) -> None:
        """Add `a b` to `out`."""
        self._multiply(a_MK, b_KN, out_MN, _AS_IS, 1.0)

    def add_transposed(self, a_MK: Array, b_NK: Array, out_MN: Array) -> None:
        """Add `a b^T` to `out`."""
        self._multiply(a_MK, b_NK, out_MN, _TRANSPOSED, 1.0)

    def _multiply(self, a: Array, b: Array, out: Array, second: int, kept: float) -> None:
        if self._library is None or not (_rows(a) and _rows(b) and _rows(out)) or out.size == 0:
            # `kept` is the beta of sgemm: 0 overwrites, 1 adds.
            found = a @ (b.T if second == _TRANSPOSED else b)
            np.add(found, out, out=out) if kept else np.copyto(out, found)
            return
        self._library.sgemm(
            _ROW_MAJOR, _AS_IS, second, out.shape[0], out.shape[1], a.shape[1],
            1.0, a.ctypes.data, _distance(a), b.ctypes.data, _distance(b),
            kept, out.ctypes.data, _distance(out),
        )  # fmt: skip


class _Library:
    """The functions of an OpenBLAS that are used here."""

    def __init__(self, library: ctypes.CDLL, prefix: str, suffix: str) -> None:
        configuration = _function(library, f"{prefix}openblas_get_config{suffix}")
        configuration.restype = ctypes.c_char_p
        words = configuration().decode().split()
        # The configuration tells the size of the library's integers. With a wrong size, the library would
        # misread the arguments.
        size = ctypes.c_int64 if "USE64BITINT" in words else ctypes.c_int32
        self.sgemm = _function(library, f"{prefix}cblas_sgemm{suffix}")
        number, place, choice = ctypes.c_float, ctypes.c_void_p, ctypes.c_int
        self.sgemm.argtypes = [
            choice, choice, choice, size, size, size,
            number, place, size, place, size, number, place, size,
        ]  # fmt: skip
        self.sgemm.restype = None
        self.set_threads: Callable[[int], None] = _function(
            library, f"{prefix}openblas_set_num_threads{suffix}"
        )
        # Keep version and kernel names of the configuration. The other words describe the build.
        kinds = [word for word in words[2:] if not word.isupper() and "=" not in word]
        self.name = " ".join(words[:2] + kinds)


@cache
def _library() -> _Library | None:
    root = Path(np.__file__).parent
    for folder in _FOLDERS:
        for path in sorted((root / folder).glob("*openblas*")):
            # numpy 2 prefixes the symbols of its OpenBLAS; older builds and distributions do not.
            for prefix in ("scipy_", ""):
                for suffix in ("64_", ""):
                    try:
                        return _Library(ctypes.CDLL(str(path)), prefix, suffix)
                    except (OSError, AttributeError):
                        continue
    return None


def _function(library: ctypes.CDLL, name: str) -> "ctypes._NamedFuncPointer":
    found: ctypes._NamedFuncPointer = getattr(library, name)
    return found


def _rows(array: Array) -> bool:
    """Return whether BLAS accepts the array: its rows are contiguous and do not overlap."""
    return array.ndim == 2 and array.strides[1] == 4 and array.strides[0] >= 4 * array.shape[1]


def _distance(array: Array) -> int:
    """Return how many numbers lie between the starts of two rows."""
    return max(int(array.strides[0]) // 4, int(array.shape[1]), 1)

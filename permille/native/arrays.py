"""Checks of arrays before a kernel gets pointers to them. A kernel cannot check where a pointer leads."""

import numpy as np
from numpy.typing import NDArray

from permille.errors import InputError


def check_array(
    name: str, array: NDArray[np.generic], dtype: type[np.generic], shape: tuple[int | None, ...]
) -> None:
    """Check type, shape and C-contiguity of an array. None in `shape` allows any size.

        >>> check_array("x", np.zeros((2, 3), np.float32), np.float32, (None, 3))

    Raises:
        InputError: the array has another type or shape, or is not C-contiguous.
    """
    fits = array.ndim == len(shape) and all(
        want in (None, got) for want, got in zip(shape, array.shape, strict=True)
    )
    # With an array that does not fit, a kernel would read or write memory outside of it.
    if array.dtype != dtype or not fits or not array.flags.c_contiguous:
        sizes = ["any" if size is None else size for size in shape]
        order = "" if array.flags.c_contiguous else ", not contiguous"
        raise InputError(
            f"expected {name} as contiguous {np.dtype(dtype).name} {sizes}, "
            f"got {array.dtype} {list(array.shape)}{order}"
        )


def check_output(
    name: str, array: NDArray[np.generic], dtype: type[np.generic], shape: tuple[int | None, ...]
) -> None:
    """Check an array as `check_array` does, and that a kernel may write to it.

    Raises:
        InputError: as for `check_array`, or the array is read-only.
    """
    check_array(name, array, dtype, shape)
    if not array.flags.writeable:
        raise InputError(f"expected {name} to be writable, got a read-only array")


def check_range(first: int, last: int, size: int) -> None:
    """Check that `first` to `last` is a range within `size`.

    Raises:
        InputError: it is not such a range.
    """
    if not 0 <= first <= last <= size:
        raise InputError(f"expected a range within 0..{size}, got {first}..{last}")

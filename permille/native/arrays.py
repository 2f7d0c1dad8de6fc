"""Checks of arrays for kernels, which cannot check behind a pointer."""

import numpy as np
from numpy.typing import NDArray

from permille.errors import InputError


def check_array(
    name: str, array: NDArray[np.generic], dtype: type[np.generic], shape: tuple[int | None, ...]
) -> None:
    """Type, shape (None: any size) and C-contiguity.

    Raises:
        InputError: one of them is another.
    """
    fits = array.ndim == len(shape) and all(
        want in (None, got) for want, got in zip(shape, array.shape, strict=True)
    )
    if array.dtype != dtype or not fits or not array.flags.c_contiguous:
        sizes = ["any" if size is None else size for size in shape]
        order = "" if array.flags.c_contiguous else ", not contiguous"
        raise InputError(
            f"expected {name} as contiguous {np.dtype(dtype).name} {sizes}, "
            f"got {array.dtype} {list(array.shape)}{order}"
        )


def check_writable(name: str, array: NDArray[np.generic]) -> None:
    """
    Raises:
        InputError: the array is read-only.
    """
    if not array.flags.writeable:
        raise InputError(f"expected {name} to be writable, got a read-only array")


def check_range(first: int, last: int, size: int) -> None:
    """
    Raises:
        InputError: not 0 <= first <= last <= size.
    """
    if not 0 <= first <= last <= size:
        raise InputError(f"expected a range within 0..{size}, got {first}..{last}")

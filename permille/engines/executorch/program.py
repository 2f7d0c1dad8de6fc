"""An exported program on this device: open it, read its shapes, run it. Needs numpy and the runtime."""

import ctypes
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from permille.engines.executorch.build import LIBRARY, runtime_folder
from permille.errors import InputError

_TYPES = {np.dtype(np.uint8): 0, np.dtype(np.int64): 4, np.dtype(np.float32): 6}  # ExecuTorch's ScalarType


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramShape:
    """Input sizes of a program, fixed at its export.

    Attributes:
        variants: the number of variants of the sparse values.
        rows: the number of sequences of all variants together.
        tokens: the number of tokens of each row.
    """

    variants: int
    rows: int
    tokens: int

    def __post_init__(self) -> None:
        """Check the sizes (InputError)."""
        if not 1 <= self.variants <= self.rows or self.tokens < 2:
            raise InputError(f"expected 1 <= variants <= rows and 2 tokens or more, got {self}")


class Program:
    """An open program. It must not be called from several threads at a time."""

    def __init__(self, path: Path, *, threads: int) -> None:
        """Map a program.

        Raises:
            InputError: the runtime is not installed, the library that connects to it is not built, or the
                runtime refuses the file.
        """
        self._library = _library()
        self._opened = ctypes.c_void_p()
        code = self._library.program_open(str(path).encode(), threads, ctypes.byref(self._opened))
        if code:
            raise InputError(f"This is no program of ExecuTorch: {self._error(code)}")
        # `finalize` closes the program when this object is collected or the interpreter ends. So no caller
        # has to close it.
        self._close = weakref.finalize(self, self._library.program_close, self._opened)

    def input_shape(self, method: str, index: int) -> tuple[int, ...]:
        """Return the sizes of one input.

        Raises:
            InputError: the method or input does not exist.
        """
        sizes, rank = (ctypes.c_int64 * 4)(), ctypes.c_int()
        code = self._library.program_input(self._opened, method.encode(), index, sizes, ctypes.byref(rank))
        if code:
            raise InputError(f"The program has no such input of {method}: {self._error(code)}")
        return tuple(sizes[: rank.value])

    def run(self, method: str, inputs: tuple[NDArray[Any], ...], out: NDArray[Any]) -> None:
        """Run `method`, whose only output fills `out`.

        Args:
            method: the name.
            inputs: uint8, int64 or float32 arrays of the program's shapes.
            out: the array for the output.

        Raises:
            InputError: the runtime refuses the call.
        """
        # Keep references to the arrays, so that the memory behind the pointers lives until the call has
        # ended.
        arrays = [np.ascontiguousarray(array) for array in inputs]
        sizes = np.array([size for array in arrays for size in array.shape], np.int32)
        code = self._library.program_run(
            self._opened,
            method.encode(),
            len(arrays),
            (ctypes.c_void_p * len(arrays))(*(array.ctypes.data for array in arrays)),
            (ctypes.c_int * len(arrays))(*(_TYPES[array.dtype] for array in arrays)),
            (ctypes.c_int * len(arrays))(*(array.ndim for array in arrays)),
            sizes.ctypes.data_as(ctypes.c_void_p),
            out.ctypes.data_as(ctypes.c_void_p),
            ctypes.c_size_t(out.nbytes),
        )
        if code:
            raise InputError(f"{method} does not run: {self._error(code)}")

    def _error(self, code: int) -> str:
        message = self._library.program_message().decode(errors="replace")
        return f"error {code} of the runtime: {message or 'no message'}"


def _library() -> ctypes.CDLL:
    runtime_folder()
    if not LIBRARY.is_file():
        raise InputError(
            'The library of the engine "executorch" is not built here: '
            "python -m permille.engines.executorch.build"
        )
    library = ctypes.CDLL(str(LIBRARY))
    library.program_message.restype = ctypes.c_char_p
    return library

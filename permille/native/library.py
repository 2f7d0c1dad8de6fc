"""Find the compiled kernels, and select the code path for this processor.

By default, this is the path with the widest registers that the processor supports. `PERMILLE_NATIVE=off`
disables the kernels. The values `scalar`, `avx2`, `avx512` and `neon` select a path. Each call of `load`
reads the variable, so nothing is decided at import.
"""

import ctypes
import os
import struct
import warnings
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from permille.errors import OperatorError

VARIABLE = "PERMILLE_NATIVE"
LIBRARY_NAME = "_kernels.so"
"""The same value as in `permille.native.build`, which is imported only when it is needed."""

# The number of each path in `permille_has` (`src/dispatch.c`).
_PATHS = {"scalar": 0, "avx2": 1, "avx512": 2, "neon": 3}
_WIDEST_FIRST = ("avx512", "avx2", "neon", "scalar")


class Held:
    """An array with its address.

    numpy takes 2.6 us to return an address, and a generated token needs thousands of addresses.
    """

    def __init__(self, array: NDArray[np.generic]) -> None:
        """Keep the array. The caller must check it as for `Library.call`."""
        self.array = array
        self.address: int = array.ctypes.data


Argument = NDArray[np.generic] | Held | int


class Library:
    """The kernels of one path.

    Attributes:
        path: "avx512", "avx2", "neon" or "scalar".
    """

    def __init__(self, dll: ctypes.CDLL, path: str) -> None:
        self.path = path
        self._dll = dll
        self._kernels: dict[str, Callable[..., int]] = {}

    def call(self, name: str, *arguments: Argument) -> int:
        """Run a kernel without the interpreter's lock, and return its result, if it has one.

        The caller must check that arrays are C-contiguous and have the right types and sizes. Arrays are
        passed as pointers, and integers are passed as 64 bits.
        """
        kernel = self._kernels.get(name)
        if kernel is None:
            kernel = self._kernels[name] = self._find(name, arguments)
        return kernel(
            *[argument if isinstance(argument, int) else _address(argument) for argument in arguments]
        )

    def _find(self, name: str, arguments: tuple[Argument, ...]) -> Callable[..., int]:
        """Look up a kernel. The arguments of its first call fix the argument types for all later calls."""
        try:
            function = self._dll[f"{name}_{self.path}"]
        except AttributeError as exc:
            raise OperatorError(
                f"{LIBRARY_NAME} has no kernel {name}_{self.path}. "
                "Build it again: python -m permille.native.build"
            ) from exc
        function.restype = ctypes.c_int64
        function.argtypes = [
            ctypes.c_int64 if isinstance(argument, int) else ctypes.c_void_p for argument in arguments
        ]
        return function


def _address(argument: NDArray[np.generic] | Held) -> int:
    if isinstance(argument, Held):
        return argument.address
    if argument.flags.writeable and argument.flags.c_contiguous and argument.size:
        # This takes a quarter of the time of `array.ctypes`, but does not work for read-only arrays.
        return ctypes.addressof(ctypes.c_char.from_buffer(argument))  # type: ignore[arg-type]
    return argument.ctypes.data


def load() -> Library | None:
    """Return the kernels, or None if they are not built, are built from other sources, or are disabled.

    Raises:
        OperatorError: `PERMILLE_NATIVE` names a path that the library or the processor lacks.
    """
    return _load(os.environ.get(VARIABLE, ""))


def cpu_path() -> str:
    """Return the path in use: "avx512", "avx2", "neon" or "scalar", or "numpy" without a library."""
    library = load()
    return "numpy" if library is None else library.path


def paths() -> list[str]:
    """Return the code paths that both library and processor support, the widest first.

    Without a library, the result is empty.
    """
    dll = _open()
    return [] if dll is None else [name for name in _WIDEST_FIRST if dll.permille_has(_PATHS[name])]


@lru_cache(maxsize=8)
def _load(wanted: str) -> Library | None:
    if wanted == "off":
        return None
    found = paths()
    if wanted and wanted not in found:
        raise OperatorError(f"{VARIABLE} must be off or one of {found}, not {wanted!r}.")
    dll = _open()
    return None if dll is None else Library(dll, wanted or found[0])


@lru_cache(maxsize=1)
def _open() -> ctypes.CDLL | None:
    file = Path(__file__).parent / LIBRARY_NAME
    if not file.exists():
        return None
    from permille.native.build import source_number

    try:
        _check_whole(file)
        dll = ctypes.CDLL(str(file))
        abi = dll.permille_abi()
    except (OSError, AttributeError) as exc:  # built for another system, or by another project
        warnings.warn(
            f"{file.name} cannot be loaded, so numpy does its work: {exc}", RuntimeWarning, stacklevel=2
        )
        return None
    if abi != source_number():
        message = (
            f"{file.name} was built from other sources ({abi}, not {source_number()}). numpy does its work. "
            "Build it again: python -m permille.native.build"
        )
        warnings.warn(message, RuntimeWarning, stacklevel=2)
        return None
    return dll


def _check_whole(file: Path) -> None:
    """Refuse a truncated ELF file. If it were loaded, the process would crash at the first missing page.

    Linkers write the table of sections last. The header states its position (ELF-64: e_shoff, e_shentsize,
    e_shnum).

    Raises:
        OSError: the file is shorter than its header says.
    """
    with file.open("rb") as stream:
        header = stream.read(64)
    # Check only ELF files of 64 bits in little-endian order.
    if header[:6] == b"\x7fELF\x02\x01" and len(header) == 64:
        (start,), (entry, count) = struct.unpack_from("<Q", header, 40), struct.unpack_from("<HH", header, 58)
        expected, got = start + entry * count, file.stat().st_size
        if got < expected:
            raise OSError(f"the file is cut off after {got} of {expected} bytes")

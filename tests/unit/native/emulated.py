"""The NEON path on other machines: a library for Arm, of which an emulator runs each call.

The arguments of a call are written to a file. `neon_driver.c` calls the kernel and writes all arrays back.
"""

import shutil
import struct
import subprocess
import threading
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from permille.native.build import LIBRARY_NAME, build
from permille.native.library import Argument, Held, Library

COMPILER = "aarch64-linux-gnu-gcc"
EMULATOR = ("qemu-aarch64-static", "-L", "/usr/aarch64-linux-gnu")


class EmulatedNeon(Library):
    """A library that runs each call in an emulator. A call takes some 20 ms."""

    def __init__(self, folder: Path, built: Path | None = None) -> None:
        """Use the library `built`, for example that of a wheel. None compiles the sources."""
        self.path = "neon"
        self._folder = folder
        self._program = folder / "driver"
        self._one_at_a_time = threading.Lock()
        missing = [name for name in (COMPILER, EMULATOR[0]) if shutil.which(name) is None]
        if missing:
            raise RuntimeError(f"expected {missing} on PATH: see `make test-neon`")
        self._library = built or folder / LIBRARY_NAME
        if built is None:
            build(self._library, compiler=COMPILER, machine="aarch64")
        driver = Path(__file__).with_name("neon_driver.c")
        subprocess.run([COMPILER, "-Wall", "-Wextra", driver, "-o", self._program], check=True)

    def call(self, name: str, *arguments: Argument) -> int:
        """Run a kernel, and copy its arrays back."""
        plain = [given.array if isinstance(given, Held) else given for given in arguments]
        request, answer = self._folder / "request", self._folder / "answer"
        with self._one_at_a_time:
            request.write_bytes(_encode(name, plain))
            subprocess.run([*EMULATOR, self._program, self._library, request, answer], check=True)
            data = answer.read_bytes()
        offset = 8
        for argument in plain:
            if isinstance(argument, np.ndarray):
                _write_back(argument, data[offset : offset + argument.nbytes])
                offset += argument.nbytes
        assert offset == len(data)
        return int(struct.unpack_from("<q", data)[0])


def _encode(name: str, arguments: list[NDArray[np.generic] | int]) -> bytes:
    parts = [name.encode().ljust(32, b"\0"), struct.pack("<q", len(arguments))]
    for argument in arguments:
        if isinstance(argument, np.ndarray):
            parts += [struct.pack("<qq", 1, argument.nbytes), argument.tobytes()]
        else:
            parts.append(struct.pack("<qQ", 0, argument % (1 << 64)))
    return b"".join(parts)


def _write_back(array: NDArray[np.generic], data: bytes) -> None:
    if array.flags.writeable:
        array[...] = np.frombuffer(data, dtype=array.dtype).reshape(array.shape)
    else:
        assert array.tobytes() == data, "a kernel wrote to a read-only array"

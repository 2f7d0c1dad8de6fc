"""Compile the library that connects to ExecuTorch's runtime: `python -m permille.engines.executorch.build`.

The library is written beside this file. It is compiled on the machine that uses it, by a C++ compiler, with
the headers and libraries of the `executorch` wheel. These headers and libraries need no torch, so a device
installs the wheel without its dependencies. For Android, use the NDK (docs/howto/run-on-android.md).
"""

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

from permille.errors import InputError, OperatorError

LIBRARY = Path(__file__).resolve().parent / "_runtime.so"
SOURCE = Path(__file__).resolve().parent / "runtime.cpp"

# `-march=native`, since the library runs on the machine that compiles it.
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-shared", "-fvisibility=hidden")
_DEFINES = ("-DET_USE_THREADPOOL", "-DC10_USING_CUSTOM_GENERATED_MACROS")
_NEEDED = ("", "_threadpool", "_kernels_optimized", "_backend_xnnpack")


def runtime_folder() -> Path:
    """Return the folder of the installed wheel.

    Raises:
        InputError: the wheel is not installed.
    """
    spec = importlib.util.find_spec("executorch")
    places = list(spec.submodule_search_locations or ()) if spec else []
    if not places:
        raise InputError('The engine "executorch" needs its runtime: pip install --no-deps executorch==1.5.1')
    return Path(places[0])


def programs_run_here() -> bool:
    """Return whether this machine has ExecuTorch's runtime and the library that connects to it."""
    return LIBRARY.is_file() and importlib.util.find_spec("executorch") is not None


def build(library: Path = LIBRARY) -> Path:
    """Compile the library.

    Raises:
        InputError: the wheel is not installed.
        OperatorError: there is no C++ compiler, it failed, or the library cannot be written.
    """
    wheel = runtime_folder()
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), None)
    if compiler is None:
        raise OperatorError("There is no C++ compiler. Install one (c++, g++ or clang++), or name it in CXX.")
    portable = wheel / "include/executorch/runtime/core/portable_type/c10"
    # Rename the finished file, because another process may have the old library mapped.
    part = library.with_name(f"{library.name}.{os.getpid()}.part")
    command = [
        *compiler.split(),
        *_FLAGS,
        *_DEFINES,
        f"-I{wheel / 'include'}",
        f"-I{portable}",
        "-w",
        str(SOURCE),
    ]
    # Some of these libraries only register kernels or a backend. No symbol refers to them, so the linker
    # would drop them.
    libraries = ["-Wl,--no-as-needed", *(f"-lexecutorch{name}" for name in _NEEDED)]
    # The path is stored in the library, so the wheel's libraries are found without LD_LIBRARY_PATH.
    found = [f"-L{wheel / 'lib'}", f"-Wl,-rpath,{wheel / 'lib'}"]
    try:
        done = subprocess.run(
            [*command, "-o", str(part), *found, *libraries], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise OperatorError(f"{compiler}: {(done.stderr.strip() or 'failed').splitlines()[0]}")
        part.replace(library)
    except OSError as exc:
        raise OperatorError(f"{exc.filename}: {exc.strerror}") from exc
    finally:
        part.unlink(missing_ok=True)
    return library


if __name__ == "__main__":
    made = build()
    print(f"permille: {made.name}, {made.stat().st_size // 1024} KiB")

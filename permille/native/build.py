"""Compile the kernels with the system's C compiler: `python -m permille.native.build`.

The result is one shared library. Every kernel is compiled once for each target (a set of processor
instructions, such as AVX2) that the compiler supports. At run time, a target is chosen that the processor
supports. `hatch_build.py` runs this file at installation, so this file imports only the standard library.
Without a working compiler, there is no library, and numpy does the work of the kernels.
"""

import os
import platform
import shutil
import subprocess
import tempfile
import zlib
from pathlib import Path

SOURCES = Path(__file__).resolve().parent / "src"
"""The C sources, which are installed with the package. A library made from other sources is not used."""
LIBRARY_NAME = "_kernels.so"

_FLAGS = (
    "-std=gnu11",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    # Fuse a product and an addition only where a kernel asks for it.
    "-ffp-contract=off",
    "-fno-math-errno",  # makes a square root one instruction instead of a call into libm
    "-Wall",
    "-Wextra",
    "-Werror=vla",
)
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
# By default, GCC uses vectors of 256 bits, even with AVX-512. The last flag asks for 512 bits.
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512")
_TARGETS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86": {"scalar": (), "avx2": _AVX2, "avx512": _AVX512},
    # NEON is part of arm64, so it needs no flag.
    "arm64": {"scalar": (), "neon": ()},
    "other": {"scalar": ()},
}


class BuildError(Exception):
    """There is no working compiler, or the file cannot be written. The message is one line."""


def source_number() -> int:
    """Return 31 bits of a checksum over sources, flags and targets.

    A library stores the number of the sources it was built from, so a library of other sources is noticed.
    """
    # Include flags and targets, because kernels built with other flags could give other bits.
    number = zlib.crc32(repr((_FLAGS, _TARGETS)).encode())
    for source in sorted(SOURCES.glob("*.[chi]*")):
        number = zlib.crc32(source.name.encode() + b"\0" + source.read_bytes(), number)
    # Keep 31 bits, since the library returns the number as a C `int`.
    return number & 0x7FFFFFFF


def build(
    library: Path, *, compiler: str | None = None, machine: str | None = None, flags: str = ""
) -> list[str]:
    """Compile all targets into `library`, which is replaced as a whole.

    Args:
        library: the file.
        compiler: a command. None takes $CC, or the first of cc, gcc and clang.
        machine: the machine to compile for. None takes this machine.
        flags: further flags, separated by spaces.

    Returns:
        The targets in the library. Targets that the compiler does not support are left out.

    Raises:
        BuildError: there is no compiler, `scalar` does not compile, or the file cannot be written.
    """
    command = [*_compiler(compiler), *_FLAGS]
    try:
        return _build(library, command, flags.split(), _targets(machine or platform.machine()))
    except OSError as exc:
        raise BuildError(f"{exc.filename or library}: {exc.strerror or exc}") from exc


def _build(
    library: Path, command: list[str], flags: list[str], targets: dict[str, tuple[str, ...]]
) -> list[str]:
    command = [*command, f"-DPERMILLE_ABI={source_number()}", *flags]
    with tempfile.TemporaryDirectory(prefix="permille-native-") as folder:
        objects: dict[str, Path] = {}
        for target, options in targets.items():
            unit = Path(folder) / f"{target}.o"
            define = (f"-DTARGET={target}", f"-DPATH_{target.upper()}")
            # Compile the same source for every target. `TARGET` becomes a suffix of the kernels' names.
            error = _run([*command, *options, *define, "-c", str(SOURCES / "kernels.c"), "-o", str(unit)])
            if not error:
                objects[target] = unit
            elif target == "scalar":
                raise BuildError(error)
        # `dispatch.c` offers a path only if it was compiled.
        have = [f"-DWITH_{target.upper()}" for target in objects]
        linked = Path(folder) / LIBRARY_NAME
        sources = [str(SOURCES / "dispatch.c"), *map(str, objects.values())]
        error = _run([*command, *have, "-shared", *sources, "-o", str(linked)])
        if error:
            raise BuildError(error)
        # Rename the finished file, because another process may have the old library mapped.
        part = library.with_name(f"{library.name}.{os.getpid()}.part")
        try:
            shutil.copyfile(linked, part)
            part.chmod(0o755)
            part.replace(library)
        finally:
            part.unlink(missing_ok=True)
    return list(objects)


def _compiler(named: str | None) -> list[str]:
    if named or os.environ.get("CC"):
        return (named or os.environ["CC"]).split()
    found = next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), None)
    if found is None:
        raise BuildError("no C compiler (cc, gcc or clang) is installed")
    return [found]


def _targets(machine: str) -> dict[str, tuple[str, ...]]:
    name = machine.lower()
    kind = "x86" if name in {"x86_64", "amd64"} else "arm64" if name in {"aarch64", "arm64"} else "other"
    return _TARGETS[kind]


def _run(command: list[str]) -> str:
    """Run a command. Return an empty text, or the first line of its error."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as exc:
        return f"{command[0]}: {exc.strerror}"
    if done.returncode == 0:
        return ""
    lines = [line for line in done.stderr.splitlines() if "error" in line] or [f"status {done.returncode}"]
    return f"{command[0]}: {lines[0]}"


def main() -> None:
    """Build the library beside this file, and print the result."""
    library = Path(__file__).resolve().parent / LIBRARY_NAME
    try:
        targets = build(library)
    except BuildError as exc:
        print(f"permille: no native kernels, numpy does their work: {exc}")
        return
    print(f"permille: {library.name}, {library.stat().st_size // 1024} KiB, targets {' '.join(targets)}")


if __name__ == "__main__":
    main()

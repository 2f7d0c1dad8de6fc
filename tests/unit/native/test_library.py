"""Building and finding the library: what is missing or foreign is replaced by numpy, never by a crash."""

import platform
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from permille.errors import OperatorError
from permille.native import build as native_build
from permille.native import library
from permille.native.build import LIBRARY_NAME, BuildError, build

ROOT = Path(library.__file__).resolve().parents[2]


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing was loaded yet, and nothing of the test stays."""
    monkeypatch.delenv(library.VARIABLE, raising=False)
    library._open.cache_clear()
    library._load.cache_clear()
    yield
    library._open.cache_clear()
    library._load.cache_clear()


def test_the_sources_compile_for_every_target_of_this_machine(tmp_path: Path) -> None:
    targets = build(tmp_path / LIBRARY_NAME)
    assert LIBRARY_NAME == library.LIBRARY_NAME
    assert targets == list(native_build._targets(platform.machine()))
    assert [file.name for file in tmp_path.iterdir()] == [LIBRARY_NAME]


def test_without_a_compiler_there_is_one_line_and_no_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(BuildError, match="no-such-compiler: No such file"):
        build(tmp_path / LIBRARY_NAME)
    monkeypatch.delenv("CC")
    monkeypatch.setattr(shutil, "which", lambda _: None)
    native_build.main()
    printed = capsys.readouterr().out
    assert printed == (
        "permille: no native kernels, numpy does their work: no C compiler (cc, gcc or clang) is installed\n"
    )
    assert not list(tmp_path.iterdir())


def test_a_compiler_that_knows_no_avx_still_builds_the_rest(tmp_path: Path) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text(
        '#!/bin/sh\ncase "$*" in *-mavx*) echo "error: -mavx" >&2; exit 1;; esac\nexec cc "$@"\n'
    )
    compiler.chmod(0o755)
    assert build(tmp_path / LIBRARY_NAME, compiler=str(compiler), machine="x86_64") == ["scalar"]


def test_the_widest_path_is_taken_and_another_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(library.VARIABLE, raising=False)
    assert library.cpu_path() == library.paths()[0]
    for path in library.paths():
        monkeypatch.setenv(library.VARIABLE, path)
        assert library.cpu_path() == path
    monkeypatch.setenv(library.VARIABLE, "off")
    assert library.load() is None
    assert library.cpu_path() == "numpy"


def test_a_path_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.VARIABLE, "sse9")
    with pytest.raises(OperatorError, match=r"expected PERMILLE_NATIVE to be off or one of .*, got 'sse9'"):
        library.load()


@pytest.mark.usefixtures("fresh")
def test_a_library_of_another_abi_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(tmp_path / LIBRARY_NAME, flags="-DPERMILLE_ABI=99 -O0")
    monkeypatch.setattr(library, "__file__", str(tmp_path / "library.py"))
    with pytest.warns(RuntimeWarning, match=f"expected {LIBRARY_NAME} of ABI {library.ABI}, got 99"):
        assert library.load() is None
    assert library.paths() == []


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("content", [b"", b"not a library"])
def test_a_file_that_is_no_library_is_not_used(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / LIBRARY_NAME).write_bytes(content)
    monkeypatch.setattr(library, "__file__", str(tmp_path / "library.py"))
    with pytest.warns(RuntimeWarning, match="cannot be loaded, numpy does its work"):
        assert library.cpu_path() == "numpy"


@pytest.mark.usefixtures("fresh")
def test_a_library_that_was_never_built_is_no_news(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "__file__", str(tmp_path / "library.py"))
    assert library.load() is None


def test_importing_the_library_loads_and_compiles_nothing() -> None:
    program = (
        "import sys, permille.zo.estimators, permille.zo.replay, permille.native.weights\n"
        "from permille.native import library\n"
        "assert library._open.cache_info().misses == 0\n"
        "assert not {'torch', 'permille.native.build'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_wheels_carry_the_library_and_the_platform_or_are_pure(tmp_path: Path) -> None:
    system = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    for compiler, tag in (("cc", f"py3-none-{system}"), ("no-such-compiler", "py3-none-any")):
        folder = tmp_path / compiler
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={"CC": compiler, "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=True,
        )
        (wheel,) = folder.iterdir()
        assert tag in wheel.name
        names = zipfile.ZipFile(wheel).namelist()
        assert (f"permille/native/{LIBRARY_NAME}" in names) is (compiler == "cc")
        assert "permille/native/src/kernels.c" in names
        assert ("no native kernels, numpy does" in done.stdout + done.stderr) is (compiler != "cc")

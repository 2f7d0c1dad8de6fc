"""Tests of building and finding the library: numpy replaces a missing or foreign library without a crash."""

import errno
import os
import platform
import re
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
from permille.native.build import LIBRARY_NAME, BuildError, build, source_number

ROOT = Path(library.__file__).resolve().parents[2]


def forget() -> None:
    library._open.cache_clear()
    library._load.cache_clear()


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield the path of a library that does not exist. Forget loaded libraries before and after the test."""
    monkeypatch.delenv(library.VARIABLE, raising=False)
    monkeypatch.setattr(library, "__file__", str(tmp_path / "library.py"))
    forget()
    yield tmp_path / LIBRARY_NAME
    forget()


def test_the_sources_compile_for_every_target_of_this_machine(tmp_path: Path) -> None:
    targets = build(tmp_path / LIBRARY_NAME, flags="-O0")  # -O3 is tested with a wheel below
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
    made = build(tmp_path / LIBRARY_NAME, compiler=str(compiler), machine="x86_64", flags="-O0")
    assert made == ["scalar"]


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
    with pytest.raises(OperatorError, match=r"PERMILLE_NATIVE must be off or one of .*, not 'sse9'"):
        library.load()


def test_a_library_of_other_sources_is_not_used(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(fresh, flags="-O0")
    sources = fresh.parent / "src"
    shutil.copytree(native_build.SOURCES, sources)
    monkeypatch.setattr(native_build, "SOURCES", sources)
    assert library.load() is not None
    forget()
    made_of = source_number()

    with (sources / "layers.inc").open("a") as changed:
        changed.write("/* another signature */\n")

    expected = f"from other sources \\({made_of}, not {source_number()}\\).* Build it again"
    with pytest.warns(RuntimeWarning, match=expected):
        assert library.load() is None
    assert library.paths() == []


def test_a_kernel_that_is_not_there_is_an_error_that_says_what_to_do() -> None:
    loaded = library.load()
    assert loaded is not None
    with pytest.raises(OperatorError, match=f"has no kernel fly_{loaded.path}. Build it again"):
        loaded.call("fly", 1)


def test_a_cut_library_is_not_mapped(fresh: Path) -> None:
    """Otherwise, access to the missing pages would kill the process."""
    build(fresh, flags="-O0")
    content = fresh.read_bytes()
    for size in (len(content) - 1, len(content) // 2):
        fresh.write_bytes(content[:size])
        forget()
        with pytest.warns(RuntimeWarning, match=f"cut off after {size} of [0-9]+ bytes"):
            assert library.load() is None


def test_a_place_that_cannot_be_written_is_one_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BuildError, match="No such file"):
        build(tmp_path / "missing" / LIBRARY_NAME, flags="-O0")

    def full(_source: Path, target: Path) -> None:
        target.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(BuildError, match="No space left"):
        build(tmp_path / LIBRARY_NAME, flags="-O0")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [b"", b"not a library"])
def test_a_file_that_is_no_library_is_not_used(content: bytes, fresh: Path) -> None:
    assert library.load() is None  # without a build, there is no warning
    fresh.write_bytes(content)
    forget()
    with pytest.warns(RuntimeWarning, match="cannot be loaded, so numpy does its work"):
        assert library.cpu_path() == "numpy"


def test_importing_the_library_loads_and_compiles_nothing() -> None:
    program = (
        "import sys, permille.zo.estimators, permille.zo.replay, permille.native.weights\n"
        "from permille.native import library\n"
        "assert library._open.cache_info().misses == 0\n"
        "assert not {'torch', 'permille.native.build'} & sys.modules.keys()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_wheels_carry_the_library_and_the_platform_or_are_pure(tmp_path: Path) -> None:
    system = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    for compiler, tag in (("cc", f"py3-none-{system}"), ("no-such-compiler", "py3-none-any")):
        folder, temporary = tmp_path / compiler, tmp_path / f"{compiler}-temporary"
        temporary.mkdir()
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={"CC": compiler, "PATH": "/usr/bin:/bin", "TMPDIR": str(temporary)},
            capture_output=True,
            text=True,
            check=True,
        )
        (wheel,) = folder.iterdir()
        assert not list(temporary.iterdir())
        assert tag in wheel.name
        names = zipfile.ZipFile(wheel).namelist()
        assert (f"permille/native/{LIBRARY_NAME}" in names) is (compiler == "cc")
        assert "permille/native/src/kernels.c" in names
        assert ("no native kernels, numpy does" in done.stdout + done.stderr) is (compiler != "cc")


def _what_the_image_copies() -> list[str]:
    copies = re.findall(r"^COPY (?!--from)(.+) \S+$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    return [name for line in copies for name in line.split()]


def test_the_image_gets_what_it_copies_and_no_library_of_the_host() -> None:
    rules = (ROOT / ".dockerignore").read_text().split()
    copied = _what_the_image_copies()
    assert "hatch_build.py" in copied
    assert [name for name in copied if f"!{name}" not in rules or not (ROOT / name).exists()] == []
    assert rules[0] == "*"
    last_of_permille = max(place for place, rule in enumerate(rules) if rule == "!permille")
    assert f"permille/native/{LIBRARY_NAME}*" in rules[last_of_permille:]


@pytest.mark.slow
def test_a_wheel_never_carries_a_library_that_was_built_before(tmp_path: Path) -> None:
    """This is the case in an image, which has no .gitignore."""
    for name in _what_the_image_copies():
        place = tmp_path / "tree" / name
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, place, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            place.parent.mkdir(exist_ok=True)
            shutil.copyfile(ROOT / name, place)
    (tmp_path / "tree" / "permille" / "native" / LIBRARY_NAME).write_bytes(b"of another machine")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "wheel")],
        cwd=tmp_path / "tree",
        env={"CC": "no-such-compiler", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        check=True,
    )
    (wheel,) = (tmp_path / "wheel").iterdir()
    assert f"permille/native/{LIBRARY_NAME}" not in zipfile.ZipFile(wheel).namelist()


def test_make_builds_again_what_was_deleted(tmp_path: Path) -> None:
    shutil.copyfile(ROOT / "Makefile", tmp_path / "Makefile")
    (tmp_path / "permille" / "native").mkdir(parents=True)
    (tmp_path / ".venv").mkdir()
    made = ["pyproject.toml", "constraints.txt", "permille/native/build.py"]
    made += [f"permille/native/{LIBRARY_NAME}", ".venv/.installed", ".venv/.native"]
    for age, name in enumerate(made):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (1_000_000 + age, 1_000_000 + age))

    def dry_run(target: str) -> str:
        command = ["make", "--no-print-directory", "-n", target]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    assert "native.build" not in dry_run(".venv/.native")
    assert f"permille/native/{LIBRARY_NAME}" in dry_run("clean")
    (tmp_path / "permille" / "native" / LIBRARY_NAME).unlink()
    assert "native.build" in dry_run(".venv/.native")

"""The files with text below the paths that a user has named.

Folders are read recursively in the order of names. Every path below them is accounted for in the report: it
is read, skipped with a reason, or ignored by kind. Hidden files and links are ignored, because a link could
lead out of the folder.
"""

import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from permille.errors import InputError
from permille.text_files import TEXT_SUFFIXES, advice, is_mail_folder, text_kind
from permille_agent.text.report import DataReport

MAX_TOTAL_BYTES = 256 << 20  # all text is held in memory
_MOST_LETTERS: Final = 12  # of an ending; a longer one is a part of the name


def text_files(paths: Sequence[Path], report: DataReport) -> Iterator[tuple[Path, str]]:
    """Yield each file with text once, with its kind (`permille.text_files`). Count all other files.

    Raises:
        InputError: no path was named.
    """
    if not paths:
        raise InputError("Name at least one file or folder with text.")
    seen: set[Path] = set()
    size_bytes = 0
    for path in paths:
        for file, kind in _files(path, report):
            try:
                real, more_bytes = file.resolve(), file.stat().st_size
            except OSError as exc:  # a mail program has moved it meanwhile
                _skip(file, f"cannot be read: {exc.strerror}", report)
                continue
            # A file may be named twice, by itself and by its folder.
            if real in seen:
                continue
            seen.add(real)
            report.files += 1
            if size_bytes + more_bytes > MAX_TOTAL_BYTES:
                report.bad(file, f"over the limit of {MAX_TOTAL_BYTES} bytes in all")
                continue
            size_bytes += more_bytes
            yield file, kind


def _files(path: Path, report: DataReport) -> Iterator[tuple[Path, str]]:
    try:
        if path.is_dir():
            yield from _below(path, report)
        elif not path.exists():
            _skip(path, "not found", report)
        elif not path.is_file():  # a pipe or a device, which may have no end
            _skip(path, "not a regular file", report)
        elif (kind := text_kind(path, is_named=True)) is None:
            kinds = f"{', '.join(TEXT_SUFFIXES[:-1])} or {TEXT_SUFFIXES[-1]}"
            _skip(path, f"not {kinds}{advice(path)}", report)
        else:
            yield path, kind
    except OSError as exc:
        _skip(path, f"cannot be read: {exc.strerror}", report)


def _below(root: Path, report: DataReport) -> Iterator[tuple[Path, str]]:
    def refuse(error: OSError) -> None:
        _skip(error.filename, f"cannot be read: {error.strerror}", report)

    hidden: set[Path] = set()
    for name, folders, names in os.walk(root, onerror=refuse):
        folder = Path(name)
        # Sort the names, because the order of the file system differs between machines.
        folders.sort()
        below = [folder / one for one in folders]
        report.ignored["link"] += sum(one.is_symlink() for one in below)
        hidden.update(one for one in below if folder in hidden or _is_hidden(one))
        for path in (folder / one for one in sorted(names)):
            try:
                yield from _one(path, report, is_hidden=folder in hidden)
            except OSError as exc:
                _skip(path, f"cannot be read: {exc.strerror}", report)
    report.ignored = +report.ignored


def _one(path: Path, report: DataReport, *, is_hidden: bool) -> Iterator[tuple[Path, str]]:
    mode = path.lstat().st_mode
    if stat.S_ISLNK(mode):
        report.ignored["link"] += 1
    elif is_hidden or path.name.startswith((".", "~$")):  # `~$` is the lock of an open file of Word
        report.ignored["hidden"] += 1
    elif not stat.S_ISREG(mode):
        _skip(path, "not a regular file", report)
    elif (kind := text_kind(path)) is not None:
        yield path, kind
    else:
        ending = path.suffix.lower()
        known = ending[1:].isalnum() and len(ending) <= _MOST_LETTERS
        report.ignored[ending if known else "no known ending"] += 1


def _is_hidden(folder: Path) -> bool:
    return folder.name.startswith(".") and not is_mail_folder(folder)


def _skip(path: str | Path, reason: str, report: DataReport) -> None:
    report.files += 1
    report.bad(path, reason)

"""Write files so that a crash leaves the old or the new content, and resolve paths that stay in a folder."""

import errno
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path, PurePath

from permille.errors import OperatorError
from permille.system import set_mode

_MOST_LINKS = 40  # the limit of Linux


def fsync_folder(folder: Path) -> None:
    """Make a rename inside `folder` durable. Windows cannot open folders, so nothing is done there."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_private(folder: Path) -> None:
    """Create a folder with mode 0700, or change an existing folder to that mode.

    Raises:
        OperatorError: the folder cannot be created, or its mode cannot be changed: it is shared by all users,
            it belongs to another user, or the disk is read-only.
    """
    try:
        # An existing folder keeps its mode, so the mode is checked below.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as exc:
        raise OperatorError(f"{folder} cannot be made: {exc.strerror}. Name another folder") from exc
    mode = stat.S_IMODE(folder.stat().st_mode)
    if mode & stat.S_ISVTX and mode & stat.S_IWOTH:  # such as /tmp, which every program of the system uses
        raise OperatorError(f"{folder} is shared by all users. Name a folder below it")
    if mode & 0o077:
        try:
            folder.chmod(0o700)
        except OSError as exc:
            if exc.errno == errno.EROFS:
                raise OperatorError(f"{folder} is on a disk that is read-only. Name another folder") from exc
            raise OperatorError(
                f"{folder} lets other users in (mode {mode:04o}) and belongs to another user. Type: "
                f"chmod 700 {folder}, or name a folder below it"
            ) from exc


def write_atomic(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Replace a file atomically: write a temporary file beside it, flush that to disk, and rename it.

        write_atomic(Path("state.json"), b"{}", mode=0o600)

    Args:
        path: the file.
        data: its new content.
        mode: its permissions.

    Raises:
        OSError: the file system failed. `path` is unchanged.
    """
    write_atomic_parts(path, (data,), mode=mode)


def write_atomic_parts(path: Path, parts: Iterable[bytes], *, mode: int = 0o644) -> None:
    """Replace a file as `write_atomic` does, with content that comes in parts.

    Raises:
        OSError: the file system failed. `path` is unchanged.
    """
    # The temporary file is in the same folder, because a rename is atomic only within one file system.
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.writelines(parts)
            file.flush()
            set_mode(file.fileno(), mode)
            os.fsync(file.fileno())
        temporary.replace(path)
    # This includes KeyboardInterrupt, because no temporary file may remain.
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def made_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """Return a folder. If it does not exist, make it.

    A temporary folder is filled and renamed, so that the folder never exists without its whole content. Its
    name must determine its content, for example by a digest:

        made_once(root / "gguf" / digest, lambda temporary: convert(path, temporary))

    Args:
        folder: the folder.
        make: a function that fills the temporary folder. If it fails, no folder is left.

    Raises:
        OSError: the file system failed.
    """
    if folder.exists():
        return folder
    # Use random digits. A process id is not unique: threads share it, and so may containers on one disk.
    temporary = folder.with_name(f".{folder.name[:16]}-{secrets.token_hex(8)}")
    temporary.mkdir(parents=True)
    try:
        make(temporary)
        try:
            temporary.rename(folder)
        except OSError:
            if not folder.exists():  # else another process or thread made the same folder meanwhile
                raise
        fsync_folder(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def follow_inside(root: Path, relative: str) -> Path | None:
    """Return the real path of `relative` below `root`, or None if it leads out of `root`.

    The path need not exist. Symbolic links are followed here, one by one, so nothing outside of the root is
    ever looked up. So not even the time that this takes reveals what exists there.
    """
    if "\0" in relative or relative.startswith("/"):
        return None
    real_root = path = root.resolve()
    parts = list(reversed(PurePath(relative).parts))
    links = 0
    while parts:
        part = parts.pop()
        if part == "..":
            # One step up from the root leads out.
            if path == real_root:
                return None
            path = path.parent
            continue
        try:
            target = PurePath((path / part).readlink())
        except OSError:  # no link, or nothing there
            path /= part
            continue
        links += 1
        if links > _MOST_LINKS:
            return None
        # An absolute link may begin with the root's real path, or with the path by which the caller named the
        # root.
        if target.is_absolute():
            base = next((base for base in (real_root, root.absolute()) if target.is_relative_to(base)), None)
            if base is None:
                return None
            target, path = target.relative_to(base), real_root
        parts += reversed(target.parts)
    return path

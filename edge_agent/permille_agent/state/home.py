"""Paths in the agent's home folder, and reading and writing of its state files.

Folders have the mode 0700 and files 0600, except the blobs, which are not secret. Files are replaced
atomically. A state file is the JSON of one record, with a checksum that detects flipped bits:

    write_record(home.daemon, DaemonState(failures=1))
    state = read_record(home.daemon, DaemonState)
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import platformdirs

from permille.errors import OperatorError
from permille.files import fsync_folder, write_atomic
from permille.system import user_id

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError

HOME_VARIABLE = "PERMILLE_AGENT_HOME"
STATE_LIMIT_BYTES = 16 << 20  # the largest records have one loss per piece of a test split
CHECKSUM = "sha256"
_CHUNK_BYTES = 1 << 20
_REMEDIES = {
    "enrolment.json": "move it away and `permille-agent enroll` again",
    "releases.json": "move it away and `permille-agent pull`",
    "current.json": "move it away: the base is used until a training adopts a model again",
    "data.json": "run `permille-agent data repair`, which keeps what can still be read, or move it away",
    "decisions.json": "move it away: decisions are counted from 1 again",
    "consent.json": "run `permille-agent share-log off` to write it again",
    "daemon.json": "move it away: the daemon writes a new one",
    "ledger.json": "restore it from a backup; until then, this device takes part in no private round; if you "
    "move it away, the privacy cost of earlier rounds is forgotten",
    "rollout.json": "move it away: the service may then lack this device's report on the current rollout",
    "registry.json": "run `permille-agent registry use` or `registry off` to write it again",
    "joined.json": "run `permille-agent federations join` to write it again",
}

Record = TypeVar("Record")
_ADAPTERS: dict[Any, Any] = {}  # cached by type, because making an adapter takes longer than parsing


class _Below:
    """A path below the home folder."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, home: "Home", _owner: object = None) -> Path:
        return home.root / self.name


@dataclass(frozen=True, slots=True)
class Home:
    """Paths below a home folder. Use `open_home` to make one.

    Example:
        >>> Home(Path("/home/anna/agent")).current
        PosixPath('/home/anna/agent/current.json')
    """

    root: Path

    identity_key = _Below("identity.key")  # Ed25519 private key of this device; never leaves it
    enrolment = _Below("enrolment.json")  # server, device, release, and the root metadata of the invitation
    ca_file = _Below("ca.pem")  # certificate authority of the server, if it is a private one
    releases = _Below("releases.json")  # the installed release, and the one before it
    trust = _Below("trust")  # accepted signed metadata; nothing older is accepted again
    blobs = _Below("blobs")  # content-addressed files of packages; manifests are blobs, too
    partial = _Below("partial")  # downloads that are not complete yet
    runs = _Below("runs")  # one folder per training run
    federations = _Below("federations")  # one folder per federation: choice, history and rounds
    current = _Below("current.json")  # the active model, and what was active before
    data = _Below("data.json")  # references to the user's files; the files stay where they are
    notes = _Below("notes.sqlite")  # index of the user's text, for answers; it holds a copy of the text
    base = _Below("base.json")  # general loss and answers of the package's base, measured once
    decisions = _Below("decisions.json")  # how many decisions this device has made
    consent = _Below("consent.json")  # the user's choices to share logs and states, made on this device only
    ledger = _Below("ledger.json")  # privacy cost of the rounds; survives `forget`
    rollout = _Below("rollout.json")  # the version that this device tries, and what it has reported
    registry = _Below("registry.json")  # the registry from which blobs are fetched, if the user chose one
    policy = _Below("policy.toml")  # when the daemon may train, written by the user
    daemon = _Below("daemon.json")  # what the daemon did last; minutes used today
    progress = _Below("progress.json")  # progress of the running training
    reports = _Below("reports")  # reports that wait for the server, and receipts of those that were sent
    serve_token = _Below("serve.token")  # token for the programs that use `serve`
    lock = _Below("agent.lock")  # the one lock of all writers
    daemon_lock = _Below("daemon.lock")  # held by the one daemon of this folder
    rounds_lock = _Below("rounds.lock")  # held while rounds are exchanged with the service


def default_root() -> Path:
    """Return the folder that the environment names, or the one of this user and system."""
    named = os.environ.get(HOME_VARIABLE)
    return Path(named) if named else platformdirs.user_data_path("permille-agent", appauthor=False)


def open_home(root: Path) -> Home:
    """Create the home folder and its subfolders if missing, and deny access to other users.

    For example, `home = open_home(Path("home"))`.

    Raises:
        OperatorError: the folder cannot be created, is not a folder, belongs to another user, or holds other
            files.
    """
    home = Home(root)
    try:
        if root.is_dir() and (others := _others(root)):
            raise OperatorError(
                f"{root} is not an agent's home: it holds {others[0]}. Name an agent's folder, or a new one."
            )
        for folder in (root, home.trust, home.blobs, home.partial, home.runs, home.reports):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        own = user_id()
        if own is not None and (owner := root.stat().st_uid) != own:
            raise OperatorError(f"{root} belongs to user {owner}, not to user {own}. Choose another --home.")
        if root.stat().st_mode & 0o077:
            root.chmod(0o700)
    except OSError as exc:
        raise OperatorError(f"Cannot write the folder {root}: {exc}") from exc
    return home


def _others(root: Path) -> list[str]:
    """Return the foreign names in a folder that is not a home.

    As a home, it would become private, and `forget` would erase it.
    """
    names = {path.name for path in root.iterdir()}
    # Every home has these two folders. A restored home may lack them, because they are often empty.
    if {"partial", "reports"} <= names or names & {"identity.key", "enrolment.json", "releases.json"}:
        return []
    own = {below.name for below in vars(Home).values() if isinstance(below, _Below)}
    # A new disk has this folder.
    return sorted(name for name in names - own - {"lost+found"} if not name.startswith("."))


@contextmanager
def telling_disk() -> Iterator[None]:
    """Convert an OSError, for example of a full disk, to an OperatorError."""
    try:
        yield
    except OSError as exc:
        raise OperatorError(
            f"The disk refused a file: {exc}. Free some space or make the folder writable, then start again: "
            "what was done so far is kept."
        ) from exc


def read_record(path: Path, kind: type[Record]) -> Record | None:
    """Read a record, or return None if there is no such file.

    Raises:
        OperatorError: the file is damaged, larger than 16 MiB or not readable.
    """
    try:
        with path.open("rb") as file:
            data = file.read(STATE_LIMIT_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise OperatorError(f"Cannot read {path}: {exc}") from exc
    if len(data) > STATE_LIMIT_BYTES:
        raise OperatorError(
            f"{path} is larger than {STATE_LIMIT_BYTES} bytes, so it is damaged: {_remedy(path)}"
        )
    try:
        return parse_record(data, kind, str(path))
    except OperatorError as exc:
        raise OperatorError(f"{exc}: {_remedy(path)}") from exc


def parse_record(data: bytes, kind: type[Record], source: str) -> Record:
    """Parse a record from its JSON.

    Raises:
        OperatorError: the JSON is not a record of this kind. The message names `source` and the field.
            It does not contain the value, which may be personal.
    """
    try:
        document = json.loads(data)
        if isinstance(document, dict) and (checksum := document.pop(CHECKSUM, None)) is not None:
            if checksum != _checksum(document):
                raise ValueError("its checksum differs")
            data = json.dumps(document).encode()
        return _adapter(kind).validate_json(data, strict=True)
    except (ValueError, RecursionError) as exc:  # pydantic's ValidationError is a ValueError
        raise OperatorError(f"{source} is damaged and holds no {kind.__name__}: {_words(exc)}") from exc


def write_record(path: Path, record: object) -> None:
    """Replace the record at `path` atomically. Only the owner can read it.

    Raises:
        OperatorError: the disk is full or read-only. The old content is kept.
    """
    try:
        write_atomic(path, encode_record(record, indent=2) + b"\n", mode=0o600)
    except OSError as exc:
        raise OperatorError(f"Cannot write {path}: {exc}") from exc


def overwrite_record(path: Path, record: object) -> None:
    """Replace the record at `path`. If that fails, as on a full disk, overwrite the file in place.

    A crash while the file is overwritten may damage it.

    Raises:
        OperatorError: the file cannot be overwritten in place, either.
    """
    try:
        write_record(path, record)
    except OperatorError:
        if not path.is_file():
            raise
        data = encode_record(record, indent=2)
        try:
            with path.open("r+b", buffering=0) as file:
                # Spaces replace the rest of a longer old record, so that no byte of it remains.
                file.write(data.ljust(os.fstat(file.fileno()).st_size - 1) + b"\n")
                os.fsync(file.fileno())
        except OSError as exc:
            raise OperatorError(f"Cannot write {path}: {exc}") from exc


def encode_record(record: object, *, indent: int | None = None) -> bytes:
    """Encode a record with the checksum of its fields."""
    # A lone surrogate, as in a message about a file name that is not UTF-8, would make the record unreadable.
    # UTF-8 cannot encode one, so it becomes a question mark. Paths are escaped before (`stored_path`).
    text = json.dumps(as_json(record), ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")
    fields = json.loads(text)
    document = {**fields, CHECKSUM: _checksum(fields)}
    return json.dumps(document, indent=indent, sort_keys=True, allow_nan=False).encode()


def erase(path: Path) -> int:
    """Overwrite and remove a file. Links are only removed. Return the number of overwritten bytes."""
    size_bytes = 0
    # A link may lead to the user's own data, which must not be overwritten.
    if path.is_file() and not path.is_symlink() and path.stat().st_nlink == 1:
        # A file without write permission could not be overwritten.
        path.chmod(0o600)
        with path.open("r+b", buffering=0) as file:
            size_bytes = overwrite(file)
    path.unlink()
    return size_bytes


def erase_folder(folder: Path) -> tuple[int, int]:
    """Erase a folder with all its files. Return the numbers of erased files and of overwritten bytes."""
    files = size_bytes = 0
    # In reverse order, files and inner folders come before the folders that hold them.
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            size_bytes += erase(path)
            files += 1
    folder.rmdir()
    fsync_folder(folder.parent)
    return files, size_bytes


def overwrite(file: FileIO) -> int:
    """Overwrite all bytes of an open file with zeros, and return their number."""
    size_bytes = os.fstat(file.fileno()).st_size
    for start in range(0, size_bytes, _CHUNK_BYTES):
        file.write(bytes(min(_CHUNK_BYTES, size_bytes - start)))
    # Without this call, the zeros may never reach the disk, because the file is removed at once.
    os.fsync(file.fileno())
    return size_bytes


def stored_path(path: Path) -> str:
    r"""Return a path as a string for a record. Bytes that are not UTF-8 become a NUL and two digits.

    Example:
        >>> stored_path(Path("bad\udce9.txt"))
        'bad\x00e9.txt'
    """
    # No path has a NUL, so `path_of` always gives the same path again.
    return re.sub("[\udc80-\udcff]", lambda byte: f"\0{ord(byte[0]) - 0xDC00:02x}", str(path))


def path_of(stored: str) -> Path:
    r"""Return the path that `stored_path` has made into a string.

    Example:
        >>> path_of("bad\x00e9.txt") == Path("bad\udce9.txt")
        True
    """
    return Path(re.sub("\0([89a-f][0-9a-f])", lambda byte: chr(0xDC00 + int(byte[1], 16)), stored))


def _checksum(fields: Mapping[str, Any]) -> str:
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _remedy(path: Path) -> str:
    """Return advice for a damaged file."""
    if path.parent.parent.name == "runs":
        return (
            f"`permille-agent forget --run {path.parent.name}` erases this run. If it is in use, "
            "`permille-agent train --from base --seed 1` replaces it"
        )
    return _REMEDIES.get(path.name, "move it away")


def as_json(record: object) -> Mapping[str, Any]:
    """Convert a record to JSON types, for its file and for the output of `--json`."""
    document: Mapping[str, Any] = _adapter(type(record)).dump_python(record, mode="json")
    return document


def _adapter(kind: type[Record]) -> "TypeAdapter[Record]":
    from pydantic import TypeAdapter  # here, so that `--help` does not wait for it

    if (known := _ADAPTERS.get(kind)) is None:
        known = _ADAPTERS[kind] = TypeAdapter(kind)
    return known


def _words(error: ValueError | RecursionError) -> str:
    from pydantic import ValidationError

    if not isinstance(error, ValidationError):
        return str(error)
    return first_error(error)


def first_error(error: "ValidationError") -> str:
    """Describe which field is wrong, without its value, which may be personal."""
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(map(str, first["loc"])) or "the whole"
    return f"{place}: {first['msg'].removeprefix('Value error, ')}"

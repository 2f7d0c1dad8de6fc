"""The home folder of the agent: which file lives where, and with which permissions.

    identity.key        Ed25519 private key of this device, 0600, never leaves it
    enrolment.json      server, device, release, pinned signing keys
    ca.pem              certificate authority of the server, where it has its own
    releases.json       per release: the highest version ever accepted, and what is installed
    blobs/              content-addressed files of packages (manifests are blobs, too)
    partial/            downloads that are not complete yet
    runs/               one folder a training run: journal, header, evaluation
    current.json        the active personalisation (`activation.py`)
    data.json           references to the user's files; the files stay where they are
    consent.json        whether logs may be shared, set by the user on this device only
    policy.toml         when the daemon may train, written by the user
    daemon.json         what the daemon did last; minutes used today
    reports/            reports that wait for the server, and receipts of those that were sent
    agent.lock          the one lock of all writers (`lock.py`)

Rules: every folder is 0700 and every file 0600, except the blobs, which are nobody's secret. Files are
replaced atomically.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from permille.errors import OperatorError
from permille.files import write_atomic

STATE_LIMIT_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Home:
    """Paths below one home folder. Make it with `open_home`."""

    root: Path

    @property
    def identity_key(self) -> Path:
        return self.root / "identity.key"

    @property
    def enrolment(self) -> Path:
        return self.root / "enrolment.json"

    @property
    def ca_file(self) -> Path:
        return self.root / "ca.pem"

    @property
    def releases(self) -> Path:
        return self.root / "releases.json"

    @property
    def blobs(self) -> Path:
        return self.root / "blobs"

    @property
    def partial(self) -> Path:
        return self.root / "partial"

    @property
    def runs(self) -> Path:
        return self.root / "runs"

    @property
    def current(self) -> Path:
        return self.root / "current.json"

    @property
    def data(self) -> Path:
        return self.root / "data.json"

    @property
    def consent(self) -> Path:
        return self.root / "consent.json"

    @property
    def policy(self) -> Path:
        return self.root / "policy.toml"

    @property
    def daemon(self) -> Path:
        return self.root / "daemon.json"

    @property
    def reports(self) -> Path:
        return self.root / "reports"

    @property
    def lock(self) -> Path:
        return self.root / "agent.lock"

    @property
    def daemon_lock(self) -> Path:
        return self.root / "daemon.lock"


def open_home(root: Path) -> Home:
    """Make the home folder and its subfolders where missing, and close them to other users.

    Raises:
        OperatorError: the folder cannot be made, is no folder, or belongs to another user.
    """
    home = Home(root)
    try:
        for folder in (root, home.blobs, home.partial, home.runs, home.reports):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if hasattr(os, "getuid") and (owner := root.stat().st_uid) != os.getuid():
            raise OperatorError(
                f"expected {root} to belong to user {os.getuid()}, it belongs to user {owner}"
            )
        if root.stat().st_mode & 0o077:
            root.chmod(0o700)
    except OSError as exc:
        raise OperatorError(f"expected a folder that can be written at {root}: {exc}") from exc
    return home


def read_state(path: Path) -> dict[str, Any] | None:
    """The JSON object at `path`, or None where there is no such file.

    Raises:
        OperatorError: the file is there and is not a JSON object of at most 16 MiB.
    """
    try:
        with path.open("rb") as file:
            data = file.read(STATE_LIMIT_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise OperatorError(f"expected to read {path}: {exc}") from exc
    if len(data) > STATE_LIMIT_BYTES:
        raise OperatorError(f"expected at most {STATE_LIMIT_BYTES} bytes in {path}, got more")
    try:
        state = json.loads(data)
    except ValueError as exc:
        raise OperatorError(f"expected JSON in {path}: {exc}") from exc
    if not isinstance(state, dict):
        raise OperatorError(f"expected a JSON object in {path}, got {type(state).__name__}")
    return state


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Replace the JSON object at `path` atomically, readable by its owner only.

    Raises:
        OperatorError: the disk is full or read-only; the old content is kept.
    """
    data = json.dumps(state, indent=2, sort_keys=True, allow_nan=False).encode() + b"\n"
    try:
        write_atomic(path, data, mode=0o600)
    except OSError as exc:
        raise OperatorError(f"expected to write {path}: {exc}") from exc

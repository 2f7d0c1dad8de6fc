"""Kill a device at writes of its metadata folder, and check that the next refresh is correct.

    python -m tests.attacks.kill_metadata FOLDER STEP     # at each STEP-th write

Run this as a process: it forks, which a process with threads should not do. The service has threads, so it
runs in a fork, too.
"""

import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from permille.errors import PackageError
from permille.trust.roles import target_path
from permille_agent.link.client import Connection
from permille_agent.link.enrolment import enroll, open_api, require_enrolment
from permille_agent.link.trust import TrustedReleases
from permille_agent.state.home import open_home
from tests.device_service import serving
from tests.packages import tiny_package

CALLS = ("replace", "fsync", "symlink", "remove", "mkdir", "open")


def _connect(server: str, ca_file: Path | None) -> Connection:
    return Connection(server, ca_file=ca_file, sleep=lambda _seconds: None, rng=random.Random(0))


def _serve(folder: Path, to_parent: int, from_parent: int) -> None:
    """Serve version 1, then version 2 or again the metadata of version 1, as the parent commands."""
    first, second = tiny_package(folder), tiny_package(folder, seed=1)
    with serving(folder) as service:
        service.publish(first.digest, 1)
        old, old_release = dict(service.metadata), service.release
        os.write(to_parent, f"{service.url} {service.invitation}\n".encode())
        while command := os.read(from_parent, 1):
            if command == b"2":
                if service.metadata == old:
                    service.publish(second.digest, 2)
                    new, new_release = dict(service.metadata), service.release
                service.metadata, service.release = new, new_release
            else:
                service.metadata, service.release = old, old_release
            os.write(to_parent, b"\n")


def _look(home: Path, version: int) -> bool:
    """Refresh the metadata. Return True if it lists a version for the device."""
    opened = open_home(home)
    enrolment, _ = require_enrolment(opened)
    with open_api(opened, connection=_connect) as api:
        trusted = TrustedReleases(opened.trust, enrolment.root.encode(), api.signed_file)
        return trusted.find(target_path(enrolment.release, version)) is not None


def _look_and_die(home: Path, at: int) -> bool:
    """Refresh in a fork that kills itself before its write number `at`. Return True if it was killed."""
    if (child := os.fork()) == 0:
        left = at

        def counted(call: Callable[..., Any]) -> Callable[..., Any]:
            def write(*args: Any, **more: Any) -> Any:
                nonlocal left
                writes = any(isinstance(arg, int) or "trust" in str(arg) for arg in args)
                if writes and (left := left - 1) < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*args, **more)

            return write

        for name in CALLS:
            setattr(os, name, counted(getattr(os, name)))
        try:
            _look(home, 2)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def _timestamp(home: Path) -> int:
    version: int = json.loads((home / "trust" / "timestamp.json").read_bytes())["signed"]["version"]
    return version


def main() -> None:
    """Kill at the first write, then at later ones, until a refresh ends before its kill."""
    folder = Path(sys.argv[1])
    (reader, to_parent), (from_parent, writer) = os.pipe(), os.pipe()
    if os.fork() == 0:
        os.close(writer)
        _serve(folder / "published", to_parent, from_parent)
        os._exit(0)
    url, invitation = os.read(reader, 1000).decode().split()

    def offer(version: bytes) -> None:
        os.write(writer, version)
        os.read(reader, 1)

    before, home = folder / "before", folder / "home"
    enroll(open_home(before), url, invitation, connection=_connect)
    assert _look(before, 1)
    kills, died, step = 0, True, int(sys.argv[2])
    while died:
        shutil.copytree(before, home, symlinks=True)
        offer(b"2")
        died = _look_and_die(home, kills * step)
        saw_new = _timestamp(home) > _timestamp(before)
        if saw_new:
            offer(b"1")  # the device has seen newer metadata, so it must refuse the old
            try:
                raise AssertionError(f"believed old metadata after kill {kills}: {_look(home, 1)}")
            except PackageError as exc:
                assert exc.code == "trust-rollback", exc
            offer(b"2")
        assert _look(home, 2), kills
        shutil.rmtree(home)
        kills += died
    os.close(writer)
    print(f"kills={kills}")


if __name__ == "__main__":
    main()

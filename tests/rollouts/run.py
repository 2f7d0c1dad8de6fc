"""Roll out a good version and four bad ones on the real service and its database: `make rollout`.

    python -m tests.rollouts.run --devices 1000 --kills 4

`permille up` runs API and worker as processes. Each device has its home and key, and pulls with the agent's
own code over HTTP, in a pool of threads. Two things are simulated: the trial of a package, which is a
process, and the training. API and worker are killed at random moments.

The bad versions fail to install on 5 % of devices, crash on 2 %, or leave 10 % silent. The last one makes the
model of 30 % worse by 0.05 nats.

A rollout is correct if each device that ended its part is counted once, with the code that it reported. The
last line is

    rollout: good=1000 stopped=4/4 touched_by_bad<=200 lost=0 twice=0
"""

import argparse
import os
import random
import shutil
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from sqlalchemy import select

from permille.errors import OperatorError, PermilleError, RetryableError
from permille.store.database import Database
from permille.store.tables import RolloutReport
from permille_agent.embed import install_package
from permille_agent.link import install as install_module
from permille_agent.link import pull as pull_module
from permille_agent.link.api import DeviceApi
from permille_agent.link.client import Connection
from permille_agent.link.enrolment import enroll, open_api, require_enrolment
from permille_agent.link.pull import pull
from permille_agent.state.choices import add_references
from permille_agent.state.home import Home, open_home
from permille_agent.state.models import installed_release
from permille_rollouts.agent.participation import MAX_ATTEMPTS, finish, note_failure, read_standing
from permille_rollouts.offer import ReportCode, place_of
from tests.api_service import running_api
from tests.rounds.run import Site

KINDS = ("good", "install", "crash", "silent", "worse")
# First wave in percent, then the standard deviation and the harm of a bad version in nats.
FIRST_WAVE = 20
NOISE, WORSE_BY = 0.01, 0.05
DAY_S = 86_400.0
DEADLINE_S = 120
THREADS = 8
MOST_PASSES = 30
_TRIES = 30
_here = threading.local()


class _DiedError(BaseException):
    """A device that disappears in the middle of an installation."""


@dataclass(slots=True)
class Device:
    """One device.

    Attributes:
        fate: Effect of the current version on the device.
        ended: Code with which its part ended, by rollout.
        said: The same for the parts whose report the service has confirmed.
    """

    home: Home
    api: DeviceApi
    id: str
    now_s: float
    fate: str = "good"
    is_gone: bool = False
    ended: dict[str, str] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)

    def visit(self, url: str, digest: str, rng: random.Random) -> None:
        """Poll as the agent does. Poll again if there is more to report, or if the service was down."""
        _here.device, _here.digest = self, digest
        self.api.connection = _connection(url)
        enrolment, _ = require_enrolment(self.home)
        tries = 0
        while not self.is_gone and tries < _TRIES:
            tries += 1
            try:
                pull(self.home, self.api, enrolment, now_s=self.now_s)
            except OperatorError:
                self.now_s += DAY_S
            except RetryableError:
                time.sleep(2)
                self.api.connection = _connection(url, fresh=True)
                continue
            except _DiedError:
                self.is_gone = True
            goes_on = self._train(rng)
            self._note()
            if not goes_on:
                break

    def _note(self) -> None:
        part = read_standing(self.home).part
        if part is not None and part.code is not None:
            self.ended[part.rollout] = str(part.code)
            if part.told:
                self.said[part.rollout] = str(part.code)

    def _train(self, rng: random.Random) -> bool:
        """End the training of an installed part. Return True if another poll is needed."""
        part = read_standing(self.home).part
        if part is None or part.code is not None:
            return part is not None and not part.told
        if not part.installed:
            return self.fate == "install"
        if self.fate == "crash":
            for _ in range(MAX_ATTEMPTS):
                note_failure(self.home, RetryableError("killed"), now_s=self.now_s, is_crash=True)
        else:
            worse_by = WORSE_BY if self.fate == "worse" else 0.0
            finish(self.home, ReportCode.OK, rng.gauss(worse_by, NOISE))
        return True


def _connection(url: str, *, fresh: bool = False) -> Connection:
    """Return the connection of this thread. Devices can share it, because requests name the device."""
    if fresh or getattr(_here, "url", None) != url:
        _here.connection, _here.url = Connection(url, attempts=2), url
    connection: Connection = _here.connection
    return connection


def _try_package(_blobs: Path, digest: str, *, size_bytes: int) -> None:
    """Replace the trial of a package: fail if that is the device's fate."""
    if digest != getattr(_here, "digest", None):
        return
    if _here.device.fate == "install":
        raise OperatorError(f"no room for {size_bytes} bytes")
    if _here.device.fate == "silent":
        raise _DiedError


@dataclass(slots=True)
class Outcome:
    """The result of one version.

    Attributes:
        touched: Number of devices that began to install it.
        has: Number of devices that have it at the end.
        wave: Number of devices in the first wave.
    """

    state: str
    wave_number: int
    touched: int
    has: int
    wave: int
    lost: int
    twice: int
    reason: str | None


def roll_out(
    site: Site, devices: list[Device], kind: str, digest: str, pool: ThreadPoolExecutor, seed: int
) -> Outcome:
    """Publish a version, roll it out, and let devices poll until the rollout ends or stops itself."""
    made = site.call("POST", "/v1/releases", {"name": "tiny", "package_digest": digest}, expected=201).json()
    rules = {
        "waves": [f"{FIRST_WAVE}%", "100%"],
        "min_reports": max(1, len(devices) * FIRST_WAVE // 200),
        "soak_s": 5,
        "success_percent": 99,
        "deadline_s": DEADLINE_S,
    }
    body = {"release": "tiny", "version": made["version"], "rules": rules, "on_stop": "revert"}
    rollout = site.call("POST", "/v1/rollouts", body, expected=201).json()
    path, rng = f"/v1/rollouts/{rollout['id']}", random.Random(seed)
    ranked = sorted(devices, key=lambda one: place_of(rollout["id"], one.id))
    # (m, n): n of every m devices have the fate. The others are good.
    bad = {"install": (20, 1), "crash": (50, 1), "silent": (10, 1), "worse": (10, 3)}.get(kind)
    for number, device in enumerate(ranked):
        device.is_gone = False
        device.fate = kind if bad is not None and number % bad[0] < bad[1] else "good"
    found: dict[str, Any] = rollout

    def poll_all() -> None:
        order = devices[:]
        rng.shuffle(order)
        list(pool.map(lambda one: one.visit(site.url, digest, random.Random(f"{seed} {one.id}")), order))

    for _ in range(MOST_PASSES):
        poll_all()
        found = site.call("GET", path).json()
        if found["state"] != "running":
            break
        time.sleep(5)
    if found["state"] == "done":
        poll_all()  # Devices that polled before the end get the version with their next poll.
    has = [one for one in devices if _version(one) == made["version"]]
    return Outcome(
        state=found["state"],
        wave_number=found["wave"],
        touched=sum(wave["offered"] for wave in found["funnel"]),
        has=len(has),
        wave=sum(place_of(rollout["id"], one.id) < 100 * FIRST_WAVE for one in devices),
        reason=found["reason"],
        **_audit(site, rollout["id"], devices),
    )


def _version(device: Device) -> int:
    release = installed_release(device.home)
    return 0 if release is None else release.version


def _audit(site: Site, rollout: str, devices: list[Device]) -> dict[str, int]:
    """Compare the devices' reports with the database.

    A report is lost if a device had it confirmed but the database differs. It counts as "twice" if the
    database has a second row, or a code with which the device did not end. A device whose report arrives as
    the rollout ends forgets its part at once. Such a report counts only as ended, not as confirmed.
    """
    database = Database(f"sqlite:///{site.data_dir}/permille.db")
    query = select(RolloutReport.device_id, RolloutReport.code).where(RolloutReport.rollout_id == rollout)
    with database.read() as session:
        rows = session.execute(query).all()
    kept = dict(rows)
    database.close()
    said = {one.id: one.said[rollout] for one in devices if rollout in one.said}
    lost = sum(kept.get(device_id) != code for device_id, code in said.items())
    ended = {one.id: one.ended.get(rollout) for one in devices}
    unsaid = sum(code not in (None, ReportCode.SILENT, ended[device_id]) for device_id, code in kept.items())
    return {"lost": lost, "twice": len(rows) - len(kept) + unsaid}


@contextmanager
def killing(site: Site, kills: int, seed: int) -> Iterator[list[str]]:
    """Kill processes of the service at `kills` random moments, and start it again."""
    done, rng, killed = threading.Event(), random.Random(seed), list[str]()

    def loop() -> None:
        while len(killed) < kills and not done.wait(rng.uniform(10, 40)):
            killed.append(site.kill(rng))
            time.sleep(rng.uniform(0.1, 1.5))
            site.revive()

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    try:
        yield killed
    finally:
        done.set()
        thread.join()


def prepared_site(folder: Path) -> tuple[Site, Home, list[str]]:
    """Make a service with version 1 of a release and five more packages, and a home with version 1."""
    with running_api(folder) as api:
        package = api.package()
        api.publish(package)
        digests = [api.package(seed=seed).digest for seed in range(1, 1 + len(KINDS))]
        token = api.token
    installed = open_home(folder / "installed")
    install_package(installed, package, release="tiny")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return Site(data_dir=folder / "data", port=port, token=token), installed, digests


def enrolled(site: Site, folder: Path, installed: Home, count: int, pool: ThreadPoolExecutor) -> list[Device]:
    """Make `count` devices that have version 1 and some text."""
    text = folder / "text.txt"
    text.write_text("what a user wrote\n")

    def make_device(number: int) -> Device:
        home = open_home(folder / "homes" / str(number))
        for path in installed.blobs.rglob("*"):
            if path.is_file():
                target = home.blobs / path.relative_to(installed.blobs)
                target.parent.mkdir(parents=True, exist_ok=True)
                os.link(path, target)
        shutil.copy(installed.releases, home.releases)
        add_references(home, [text])
        body = {"release": "tiny", "alias": "stable"}
        invitation = site.call("POST", "/v1/invitations", body, expected=201).json()["invitation"]
        connection = _connection(site.url)
        enrolment = enroll(home, site.url, invitation, connection=lambda _server, _ca: connection)
        # the patch below keeps the connection open
        with open_api(home, connection=lambda _server, _ca: connection) as api:
            return Device(home=home, api=api, id=enrolment.device_id, now_s=time.time())

    # The next device of the thread needs the connection, too.
    with patch.object(Connection, "close", lambda _: None):
        return list(pool.map(make_device, range(count)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it and print the results. Return 1 if one of them is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=4, help="of API and worker, at random moments")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    with (
        tempfile.TemporaryDirectory() as name,
        ThreadPoolExecutor(max_workers=THREADS) as pool,
        patch.object(install_module, "try_package", _try_package),
        patch.object(pull_module, "try_package", _try_package),
    ):
        folder = Path(name)
        site, installed, digests = prepared_site(folder)
        site.start()
        try:
            devices = enrolled(site, folder, installed, options.devices, pool)
            print(f"enrolled {len(devices)} devices", flush=True)
            return _measured(site, devices, digests, pool, options)
        except PermilleError:
            traceback.print_exc()
            pool.shutdown(wait=False, cancel_futures=True)
            sys.stderr.write((folder / "up.log").read_text()[-4000:])
            raise
        finally:
            site.stop()


def _measured(
    site: Site,
    devices: list[Device],
    digests: list[str],
    pool: ThreadPoolExecutor,
    options: argparse.Namespace,
) -> int:
    found: dict[str, Outcome] = {}
    with killing(site, options.kills, options.seed) as killed:
        for kind, digest in zip(KINDS, digests, strict=True):
            begun = time.monotonic()
            one = found[kind] = roll_out(site, devices, kind, digest, pool, options.seed)
            print(
                f"rollout-{kind}: state={one.state} wave={one.wave_number} reason={one.reason} "
                f"touched={one.touched} wave_devices={one.wave} have_it={one.has} kills={len(killed)} "
                f"seconds={time.monotonic() - begun:.0f}",
                flush=True,
            )
    bad = [one for kind, one in found.items() if kind != "good"]
    stopped = [one for one in bad if one.reason and one.wave_number == 1 and one.touched <= one.wave]
    most = max(bad, key=lambda one: one.touched)
    lost, twice = (sum(getattr(one, what) for one in found.values()) for what in ("lost", "twice"))
    good = found["good"].has if found["good"].state == "done" else 0
    print(
        f"rollout: good={good} stopped={len(stopped)}/{len(bad)} touched_by_bad<={most.wave} "
        f"lost={lost} twice={twice}"
    )
    return int(bool(lost or twice or good < len(devices) or len(stopped) < len(bad)))


if __name__ == "__main__":
    sys.exit(main())

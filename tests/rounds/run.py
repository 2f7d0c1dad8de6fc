"""Run a federation on the real service, with many faults: `make federation`, `make federation-long`.

    python -m tests.rounds.run --devices 20 --rounds 5 --kills 2
    python -m tests.rounds.run --devices 1000 --rounds 20 --kills 4

`permille up` runs API and worker as processes. Each device has its home, key and sockets, and runs the
agent's own code in a pool of threads. Some devices are processes of `permille-agent`. A fifth of the invited
devices drops out. Others come too late, send twice, send other content, or forge. Some are revoked. In one
round nobody sends anything. API and worker are killed at random moments and started again.

A round is correct if its published bytes are exactly those of the accepted contributions. Then nothing was
lost and nothing counted twice. Three auditors must get the same final state: the library's replay, the
reference of FORMAT in another process, and a replay that begins at a checkpoint.
"""

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from permille.errors import RetryableError
from permille_agent.embed import install_package
from permille_agent.link.client import AccessRefusedError
from permille_agent.state.home import Home, open_home
from permille_rounds.agent.part import RoundPart
from permille_rounds.catch_up import caught_up
from permille_rounds.contribution import Contribution
from permille_rounds.definition import Definition
from permille_rounds.rounds import History, combine, decode_segment
from tests.api_service import running_api
from tests.packages import sentences
from tests.rounds.devices import Device, light_devices
from tests.running_service import UP, environment

NAME = "readers"
TEXTS, TEXT_SENTENCES = 12, 130
THREADS = 8
ORDERS = 100
# Shares of the invited devices.
DROPOUTS, LATE, TWICE, CONFLICTING, FORGING = 0.20, 0.05, 0.05, 0.03, 0.05
_WAIT_S, _POLL_S = 120.0, 0.1


@dataclass(slots=True)
class Tally:
    """The counts over all rounds."""

    counted: int = 0
    void: int = 0
    lost: int = 0
    counted_twice: int = 0
    kills: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Site:
    """The service's process, and the operator's client of it."""

    data_dir: Path
    port: int
    token: str
    process: subprocess.Popen[bytes] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start API and worker, and wait until they answer."""
        command = [*UP, "--data-dir", str(self.data_dir), "--port", str(self.port), "--json"]
        with (self.data_dir.parent / "up.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment(), start_new_session=True
            )
        until = time.monotonic() + 120
        while time.monotonic() < until:
            try:
                if httpx.get(f"{self.url}/v1/health", trust_env=False, timeout=5).status_code < 500:
                    return
            except httpx.TransportError:
                time.sleep(0.2)
        raise RuntimeError("expected the service to answer within two minutes")

    def kill(self, rng: random.Random) -> str:
        """Kill one of the service's processes, or all of them. Return "one" or "all"."""
        if self.process is None:
            raise RuntimeError("expected a service that runs")
        family = sorted(descendants(self.process.pid))
        victims = family if rng.random() < 0.5 else [rng.choice(family)]
        for pid in victims:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return "all" if len(victims) > 1 else "one"

    def revive(self) -> None:
        """End the remaining processes of the service, and start it again."""
        self.stop(signal.SIGKILL)
        self.start()

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        """End the service and all of its processes."""
        if self.process is None:
            return
        family = descendants(self.process.pid)
        if how is signal.SIGTERM:
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                how = signal.SIGKILL
        for pid in family if how is signal.SIGKILL else ():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(60)
        self.process = None

    def call(self, method: str, path: str, body: Any = None, *, expected: int = 200) -> httpx.Response:
        """Send one request of the operator. Repeat it while the service is down."""
        headers = {"Authorization": f"Bearer {self.token}"}
        until = time.monotonic() + _WAIT_S
        while True:
            try:
                answer = httpx.request(
                    method, self.url + path, json=body, headers=headers, timeout=60, trust_env=False
                )
            except httpx.TransportError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.3)
                continue
            if answer.status_code in (429, 503) and time.monotonic() < until:
                time.sleep(0.5)
                continue
            if answer.status_code != expected:
                raise RuntimeError(f"expected {expected} of {path}, got {answer.text[:300]}")
            return answer


@dataclass(slots=True)
class Run:
    """One federation, its devices, and the data that the checks need."""

    site: Site
    id: str
    definition: Definition
    devices: list[Device]
    seed: int
    revoked: int
    tally: Tally = field(default_factory=Tally)
    rounds: list[bytes] = field(default_factory=list)
    ranked: dict[int, list[Contribution]] = field(default_factory=dict)
    guard: threading.Lock = field(default_factory=threading.Lock)

    @property
    def path(self) -> str:
        return f"/v1/federations/{self.id}"

    def read(self) -> dict[str, Any]:
        """Return the federation as operators see it."""
        found: dict[str, Any] = self.site.call("GET", self.path).json()
        return found

    def refused(self, name: str) -> None:
        """Count a refusal by its name."""
        with self.guard:
            self.tally.refused[name] += 1

    def revoke(self, device: Device) -> None:
        """Revoke a device. Its contribution to the open round is removed."""
        device.revoked = True
        self.site.call("POST", f"/v1/devices/{device.id}/revoke")

    def expect(self, what: str, got: str, wanted: Sequence[str]) -> None:
        """Record an answer that is not among the expected ones."""
        if got not in wanted:
            with self.guard:
                self.tally.wrong.append(f"{what}: expected {wanted}, got {got!r}")


def one_round(run: Run, number: int, pool: ThreadPoolExecutor, *, nobody: bool) -> None:
    """Let all devices take part in a round, wait for its end, and compare the published bytes."""
    late: list[tuple[Device, RoundPart]] = []
    for found in [pool.submit(visit, run, device, number, late, nobody) for device in run.devices]:
        found.result()
    ended = wait_for_end(run, number)
    for device, part in late:
        with device.api() as api:
            got = device.send_bytes(api, number, part.contribution.read_bytes())
        run.expect("a late contribution", got, ("round-closed",))
        run.refused("late")
    compare(run, number, ended)


def visit(run: Run, device: Device, number: int, late: list[tuple[Device, RoundPart]], nobody: bool) -> None:
    """Let one device take part in one round, with its fault. Try again if the service was down."""
    until, trouble = time.monotonic() + _WAIT_S, RetryableError("none")
    while time.monotonic() < until:
        try:
            _visit(run, device, number, late, nobody)
            return
        except AccessRefusedError:
            if not device.revoked:
                raise
            run.refused("revoked")
            return
        except RetryableError as exc:
            trouble = exc
            time.sleep(0.5)
    raise RuntimeError(f"expected device {device.number} to get through, the last trouble was {trouble}")


def _visit(run: Run, device: Device, number: int, late: list[tuple[Device, RoundPart]], nobody: bool) -> None:
    draw = random.Random(f"{run.seed} {number} {device.number}").random()
    if device.program:
        if draw >= DROPOUTS and not nobody:
            device.run_program(number)
        return
    with device.api() as api:
        part = device.train(api)
        if part is None or int(part.path.name) != number:
            return
        if nobody or draw < DROPOUTS:
            run.refused("dropped")
            return
        if draw < (edge := DROPOUTS + LATE):
            with run.guard:
                late.append((device, part))
            return
        honest = part.contribution.read_bytes()
        if edge <= draw < edge + FORGING:
            for name, data in device.forgeries(part).items():
                got = device.send_bytes(api, number, data)
                run.expect(f"a forged {name}", got, ("package-refused", "round-closed"))
                run.refused("forged")
        taken = device.send(api, part)
        edge += FORGING
        if taken and edge <= draw < edge + TWICE:
            run.expect("the same bytes", device.send_bytes(api, number, honest), ("",))
            run.refused("duplicate")
        edge += TWICE
        if taken and number >= 1 and device.number < run.revoked:
            run.revoke(device)
            return
        if taken and edge <= draw < edge + CONFLICTING:
            got = device.send_bytes(api, number, device.other(part))
            run.expect("other content", got, ("contribution-conflict", "round-closed"))
            run.refused("conflict")


def wait_for_end(run: Run, number: int) -> dict[str, Any]:
    """Wait until a round is final. Return its record."""
    until = time.monotonic() + _WAIT_S
    while time.monotonic() < until:
        found: dict[str, Any] = run.site.call("GET", f"{run.path}/rounds/{number}").json()
        if found["state"] in ("published", "void"):
            return found
        time.sleep(_POLL_S)
    raise RuntimeError(f"expected round {number} to end, it is {found['state']}")


def compare(run: Run, number: int, ended: dict[str, Any]) -> None:
    """Count a round as wrong unless the accepted contributions give exactly the published bytes."""
    taken: list[Contribution] = []
    shut_out: list[Contribution] = []
    for device in run.devices:
        if number in device.made and number not in device.sent and not device.revoked:
            # The answer was lost. Sending the same bytes again shows whether they were accepted.
            with device.api() as api:
                if not device.send_bytes(api, number, device.made[number]):
                    device.sent[number] = device.made[number]
        data = device.sent.get(number)
        if data is not None:
            (shut_out if device.revoked else taken).append(device.read(data, run.definition))
    published = run.site.call("GET", f"{run.path}/rounds/{number}/record").content
    run.rounds.append(published)
    if ended["state"] == "void":
        run.tally.void += 1
        if len(taken) >= run.definition.minimum:
            run.tally.lost += len(taken)
            run.tally.wrong.append(f"round {number} is void: {ended['reason']}, {len(taken)} were taken")
        return
    if combine(run.definition, number, [*taken, *shut_out]).to_bytes() == published:
        taken += shut_out  # the round was closing already when they were revoked
    run.ranked[number] = taken
    run.tally.counted += ended["counted"]
    run.tally.lost += max(0, len(taken) - ended["counted"])
    run.tally.counted_twice += max(0, ended["counted"] - len(taken))
    if combine(run.definition, number, taken).to_bytes() != published:
        run.tally.wrong.append(
            f"round {number} of {ended['counted']} is not that of the {len(taken)} contributions taken"
        )


def orders(run: Run, count: int) -> int:
    """Count the shuffled orders whose bytes differ from the published ones."""
    rng, differing = random.Random(run.seed), 0
    published = {number: taken for number, taken in run.ranked.items() if taken}
    for _ in range(count):
        number = rng.choice(sorted(published))
        shuffled = rng.sample(published[number], len(published[number]))
        differing += combine(run.definition, number, shuffled).to_bytes() != run.rounds[number]
    return differing


def audit(run: Run, folder: Path) -> tuple[int, float]:
    """Audit the rounds in three ways, and let a device catch up.

    Return the number of wrong results, and the seconds that the device took.
    """
    said = run.read()
    expected = (said["chain"], said["state_digest"])
    segment, definition = folder / "segment", folder / "definition"
    segment.write_bytes(b"".join(run.rounds))
    definition.write_bytes(run.definition.to_bytes())
    begin = History.begin(run.definition)
    begun = time.perf_counter()
    data = run.site.call("GET", f"{run.path}/history?after=0").content
    from_checkpoint = caught_up(begin, data, max_bytes=1 << 28)
    seconds = time.perf_counter() - begun
    library = History.begin(run.definition)
    library.apply(decode_segment(segment.read_bytes(), run.definition, max_bytes=1 << 28))
    middle = run.site.call("GET", f"{run.path}/history?after=0&until={len(run.rounds) // 2}").content
    half = caught_up(begin, middle, max_bytes=1 << 28)
    half.apply(decode_segment(b"".join(run.rounds[half.number :]), run.definition, max_bytes=1 << 28))
    command = [sys.executable, "-m", "tests.rounds.audit", str(definition), str(segment)]
    told = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    found = [
        (library.chain, library.digest),
        (told["chain"], told["state"]),
        (half.chain, half.digest),
        (from_checkpoint.chain, from_checkpoint.digest),
    ]
    return sum(each != expected for each in found), seconds


def prepared_site(folder: Path) -> tuple[Site, Home]:
    """Make a service with a release, and a home with its package."""
    with running_api(folder) as api:
        package = api.package()
        api.publish(package)
        token = api.token
    installed = open_home(folder / "installed")
    install_package(installed, package, release="tiny")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return Site(data_dir=folder / "data", port=port, token=token), installed


def make_run(site: Site, options: argparse.Namespace) -> Run:
    """Make and start a federation without devices."""
    body = {
        "name": NAME,
        "release": "tiny",
        "schedule": {
            "rounds": options.rounds,
            "target": max(2, options.devices // 2),
            "minimum": 2,
            "deadline_s": options.deadline_s,
        },
        "training": {
            "method": "zeroth-order",
            "steps": 3,
            "queries": 4,
            "learning_rate": 0.01,
            "epsilon": 0.001,
            "batch_rows": 2,
            "row_tokens": 32,
        },
        "aggregation": {"few_devices": True},
    }
    found = site.call("POST", "/v1/federations", body, expected=201).json()
    data = site.call("GET", f"/v1/federations/{found['id']}/definition").content
    site.call("POST", f"/v1/federations/{found['id']}/start")
    return Run(
        site=site,
        id=found["id"],
        definition=Definition.from_bytes(data),
        devices=[],
        seed=options.seed,
        revoked=options.revoked,
    )


def enrolled(run: Run, folder: Path, installed: Home, count: int, pool: ThreadPoolExecutor) -> list[Device]:
    """Make `count` devices behind one address that are members of the federation."""
    texts = []
    for number in range(TEXTS):
        path = folder / f"text-{number}.txt"
        path.write_text("\n\n".join(sentences(TEXT_SENTENCES, seed=number)))
        texts.append(path)

    def make_device(number: int) -> Device:
        device = Device.make(number, folder / "homes" / str(number), texts[number % TEXTS], installed)
        body = {"release": "tiny", "alias": "stable"}
        answer = run.site.call("POST", "/v1/invitations", body, expected=201).json()
        device.enrol(run.site.url, answer["invitation"], NAME)
        return device

    return list(pool.map(make_device, range(count)))


@contextmanager
def killing(run: Run, kills: int, seed: int) -> Iterator[None]:
    """Kill processes of the service at `kills` random moments, and start it again."""
    done, rng = threading.Event(), random.Random(seed)

    def loop() -> None:
        while run.tally.kills < kills and not done.wait(rng.uniform(5, 20)):
            run.site.kill(rng)
            run.tally.kills += 1
            time.sleep(rng.uniform(0.1, 1.5))
            run.site.revive()

    thread = threading.Thread(target=loop, daemon=True)
    if kills:
        thread.start()
    try:
        yield
    finally:
        done.set()
        if kills:
            thread.join()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it and print the results. Return 1 if anything is lost, counted twice or different."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kills", type=int, default=0, help="of API and worker, at random moments")
    parser.add_argument("--programs", type=int, default=2, help="devices that are processes")
    parser.add_argument("--revoked", type=int, default=2)
    parser.add_argument("--deadline-s", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    begun = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as name,
        ThreadPoolExecutor(max_workers=THREADS) as pool,
        light_devices(),
    ):
        folder = Path(name)
        site, installed = prepared_site(folder)
        site.start()
        try:
            return _measured(site, installed, folder, pool, options, begun)
        except BaseException:
            traceback.print_exc()
            pool.shutdown(wait=False, cancel_futures=True)
            sys.stderr.write((folder / "up.log").read_text()[-4000:])
            raise
        finally:
            site.stop()


def _measured(
    site: Site,
    installed: Home,
    folder: Path,
    pool: ThreadPoolExecutor,
    options: argparse.Namespace,
    begun: float,
) -> int:
    run = make_run(site, options)
    run.devices = enrolled(run, folder, installed, options.devices, pool)
    for device in run.devices[options.revoked :][: options.programs]:
        device.program = True
    enrolled_s = time.monotonic() - begun
    for device in run.devices:
        device.meter.up = device.meter.down = 0
    with killing(run, options.kills, options.seed):
        for number in range(options.rounds):
            one_round(run, number, pool, nobody=number == 2)
    tally = run.tally
    differing, (astray, catch_up_s) = orders(run, ORDERS), audit(run, folder)
    parts = sum(len(device.sent) for device in run.devices)
    up, down = (
        sum(getattr(device.meter, way) for device in run.devices) / len(run.devices) for way in ("up", "down")
    )
    payload = sum(len(data) for device in run.devices for data in device.sent.values()) / max(1, parts)
    counts = tally.refused
    print(
        f"federation: devices={options.devices} rounds={options.rounds} counted={tally.counted} "
        f"dropped={counts['dropped']} late={counts['late']} duplicate={counts['duplicate']} "
        f"conflict={counts['conflict']} forged={counts['forged']} revoked={counts['revoked']} "
        f"programs={options.programs} void={tally.void} kills={tally.kills} lost={tally.lost} "
        f"counted_twice={tally.counted_twice} enrol_s={enrolled_s:.0f} seconds={time.monotonic() - begun:.0f}"
    )
    print(
        f"federation-exact: orders={ORDERS} auditors=3 differing={differing + astray} "
        f"catch_up_s={catch_up_s:.3f}"
    )
    print(
        f"federation-bytes: contribution={payload:.0f} socket_up_kb_device={up / 1e3:.1f} "
        f"socket_down_kb_device={down / 1e3:.1f}"
    )
    for wrong in tally.wrong[:20]:
        print(f"federation-wrong: {wrong}")
    return int(bool(tally.lost or tally.counted_twice or differing or astray or tally.wrong))


def descendants(pid: int) -> set[int]:
    """Return a process and all processes that it started."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found, waiting = set(), [pid]
    while waiting:
        found.add(one := waiting.pop())
        waiting += parents.get(one, [])
    return found


if __name__ == "__main__":
    sys.exit(main())

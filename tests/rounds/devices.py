"""Devices of a federation under test: each has its home, key and sockets, and runs the agent's own code.

Only two things differ from the agent: the bigram engine, and that each text is tokenized once instead of in
every round. The bytes that faulty devices send go through the same client.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpcore
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from permille.errors import RetryableError
from permille.package.reader import Package
from permille_agent.link.api import DeviceApi
from permille_agent.link.client import RequestRefusedError
from permille_agent.link.enrolment import enroll, open_api, require_enrolment
from permille_agent.state.home import Home, open_home
from permille_agent.state.lock import hold_lock
from permille_agent.text.preparation import Prepared
from permille_agent.training.options import RunContext
from permille_rounds.agent import part as part_module
from permille_rounds.agent.calls import FederationsApi, signed_contribution
from permille_rounds.agent.exchange import exchange, join_federation
from permille_rounds.agent.membership import memberships
from permille_rounds.agent.part import RoundPart, parts, train_part, waiting_part
from permille_rounds.contribution import Contribution, decode_contribution, encode_contribution
from permille_rounds.definition import Definition, decode_key
from tests.bigram_engine import bigram_engine
from tests.running_service import environment

CONTEXT = RunContext(engine_of=bigram_engine)


@dataclass(slots=True)
class Meter:
    """Bytes that a device's sockets sent and received."""

    up: int = 0
    down: int = 0


_metered = threading.local()


class _Stream(httpcore.NetworkStream):
    def __init__(self, stream: httpcore.NetworkStream, meter: Meter) -> None:
        self._stream = stream
        self._meter = meter

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        data = self._stream.read(max_bytes, timeout)
        self._meter.down += len(data)
        return data

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, timeout)
        self._meter.up += len(buffer)

    def close(self) -> None:
        self._stream.close()

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


class _Sockets(httpcore.SyncBackend):
    """Plain sockets that count the bytes for the device of this thread."""

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.NetworkStream:
        stream = super().connect_tcp(host, port, timeout, local_address, socket_options)
        meter = getattr(_metered, "meter", None)
        return stream if meter is None else _Stream(stream, meter)


@contextmanager
def light_devices() -> Iterator[None]:
    """Tokenize each text once, and count the bytes of sockets."""
    prepared, known = part_module._prepared, {}
    lock = threading.Lock()

    def once(paths: Sequence[Path], package: Package, rules: Definition) -> Prepared:
        with lock:
            if tuple(paths) not in known:
                known[tuple(paths)] = prepared(paths, package, rules)
            return known[tuple(paths)]

    with patch.object(part_module, "_prepared", once), patch.object(httpcore, "SyncBackend", _Sockets):
        yield


@dataclass(slots=True)
class Device:
    """One device.

    Attributes:
        made: Contributions that it tried to send, by round.
        sent: Contributions that the service accepted, by round.
        program: True if `permille-agent` does its part as a process, with the agent's own engine.
    """

    number: int
    home: Home
    text: Path
    id: str = ""
    revoked: bool = False
    program: bool = False
    federation_id: str = ""
    made: dict[int, bytes] = field(default_factory=dict)
    meter: Meter = field(default_factory=Meter)
    sent: dict[int, bytes] = field(default_factory=dict)

    @classmethod
    def make(cls, number: int, root: Path, text: Path, installed: Home) -> "Device":
        """Make a device with the package that is installed in another home."""
        home = open_home(root)
        for path in installed.blobs.rglob("*"):
            if path.is_file():
                target = home.blobs / path.relative_to(installed.blobs)
                target.parent.mkdir(parents=True, exist_ok=True)
                os.link(path, target)
        shutil.copy(installed.releases, home.releases)
        return cls(number=number, home=home, text=text)

    def enrol(self, url: str, invitation: str, federation: str) -> None:
        """Enrol and join the federation."""
        self.id = enroll(self.home, url, invitation).device_id
        self.federation_id = join_federation(self.home, federation).choice().federation_id

    def train(self, api: DeviceApi) -> RoundPart | None:
        """Follow the federation, and make the part to which the device is invited."""
        exchange(self.home, api, now=datetime.now(UTC), has_text=True)
        self.has_sent(-1)  # The exchange may have sent the part of an earlier pass.
        part = waiting_part(self.home, datetime.now(UTC))
        if part is None:
            return None
        _, identity = require_enrolment(self.home)
        return part if train_part(self.home, part, [self.text], identity, CONTEXT) else None

    def send(self, api: DeviceApi, part: RoundPart) -> bool:
        """Send a part as the agent does. Return True if the service accepted it."""
        number = int(part.path.name)
        self.made[number] = part.contribution.read_bytes()
        exchange(self.home, api, now=datetime.now(UTC), has_text=False)
        return self.has_sent(number)

    def has_sent(self, number: int) -> bool:
        """Record the contributions that the service accepted. Return True if one is of this round."""
        for membership in memberships(self.home):
            standing = membership.standing()
            for part in parts(membership):
                if (standing.last, str(standing.last_round)) == ("sent", part.path.name):
                    self.sent[int(part.path.name)] = part.contribution.read_bytes()
        return number in self.sent

    def run_program(self, number: int) -> None:
        """Run one pass of the program: follow, train, send."""
        command = [sys.executable, "-m", "permille_agent", "--home", str(self.home.root)]
        command += ["federations", "run", str(self.text), "--threads", "1", "--json"]
        done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
        for part in (each for membership in memberships(self.home) for each in parts(membership)):
            if part.path.name == str(number) and part.contribution.exists():
                self.made[number] = part.contribution.read_bytes()
        if done.returncode:
            raise RetryableError(f"expected a pass over the rounds, got {done.stdout}{done.stderr}")
        self.has_sent(number)

    def send_bytes(self, api: DeviceApi, number: int, data: bytes) -> str:
        """Send any bytes as this device's contribution. Return the name of the refusal, or ""."""
        try:
            FederationsApi(api).contribute(self.federation_id, number, data)
        except RequestRefusedError as exc:
            return exc.problem or str(exc.status)
        return ""

    def read(self, data: bytes, rules: Definition) -> Contribution:
        """Decode a contribution of this device."""
        _, identity = require_enrolment(self.home)
        return decode_contribution(data, rules, decode_key(identity.public_key))

    def forgeries(self, part: RoundPart) -> dict[str, bytes]:
        """Return forged messages by their fault."""
        honest = part.contribution.read_bytes()
        rules = part.membership.definition()
        _, identity = require_enrolment(self.home)
        found = self.read(honest, rules)
        other = replace(rules, log=replace(rules.log, seed=rules.log.seed + 1))
        digest = f"sha256:{hashlib.sha256(honest).hexdigest()}"
        return {
            "key": encode_contribution(found, Ed25519PrivateKey.generate()),
            "start": signed_contribution(identity, replace(found, start_digest=digest)),
            "federation": signed_contribution(identity, replace(found, definition=other)),
            "round": signed_contribution(
                identity, replace(found, round_number=(found.round_number + 1) % rules.rounds)
            ),
            "cut": honest[:-1],
        }

    def other(self, part: RoundPart) -> bytes:
        """Return a contribution with other integers and a valid signature."""
        rules = part.membership.definition()
        _, identity = require_enrolment(self.home)
        found = self.read(part.contribution.read_bytes(), rules)
        return signed_contribution(identity, replace(found, c_TQ=-found.c_TQ - 1))

    @contextmanager
    def api(self) -> Iterator[DeviceApi]:
        """Open a connection whose bytes are counted. Hold the device's lock of rounds meanwhile."""
        _metered.meter = self.meter
        try:
            with open_api(self.home) as api, hold_lock(self.home, "federations", of=self.home.rounds_lock):
                yield api
        finally:
            _metered.meter = None

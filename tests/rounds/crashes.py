"""Crash the ledger's transactions at any statement: `python -m tests.rounds.crashes`.

A federation with privacy runs round by round: devices are invited, send, withdraw, send again. A job or the
deadline closes the round. Each transaction is first crashed before some statement, or ends after its commit
but before the caller learns of it. Then it is repeated, as a device or a worker would do. One in a hundred
crashes is a SIGKILL of a forked process. The program records the summed vectors outside of the database and
compares them with the ledger's charges.
"""

import argparse
import os
import random
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import event, select
from sqlalchemy.orm import Session

from permille.digests import digest_of
from permille.errors import PermilleError
from permille.store import access, rows, tables
from permille.store.database import Database, now
from permille.store.errors import NotFoundError, RoundClosedError, StaleClaimError
from permille.store.ids import Prefix, new_id
from permille.store.jobs import claims
from permille.store.migrations.schema import migrate
from permille.store.tables import (
    Device,
    Federation,
    FederationMember,
    PrivacyCharge,
    Round,
)
from permille_rounds.definition import Definition
from permille_rounds.rounds import History, void_round
from permille_rounds.schemas import ChargeState, FederationState, RoundState
from permille_rounds.store import contributions, members, rounds
from permille_rounds.store.rounds import Ended
from tests.rounds.private import make_private

DEVICES, TARGET, MINIMUM, PARTICIPATIONS, ROUNDS = 4, 3, 2, 12, 40
_KILLED_SHARE = 0.01
_STATEMENTS = (9, 24)  # numbers of statements of a short and of the longest transaction


class Crash(BaseException):
    """The end of a process. No handler of `Exception` catches it."""


@dataclass(slots=True)
class Tally:
    """The counts of a number of trials."""

    trials: int = 0
    killed: int = 0
    after_commit: int = 0
    rounds: int = 0
    void: int = 0
    charged_twice: int = 0
    lost: int = 0
    beyond: int = 0

    def line(self) -> str:
        """Return the line for the log."""
        return (
            f"privacy-ledger: trials={self.trials} killed={self.killed} after_commit={self.after_commit} "
            f"rounds={self.rounds} void={self.void} charged_twice={self.charged_twice} lost={self.lost} "
            f"beyond_promise={self.beyond}"
        )


@dataclass(slots=True)
class World:
    """A database with a federation, and the vectors that were really summed."""

    db: Database
    rng: random.Random
    trials: int
    tally: Tally = field(default_factory=Tally)
    tenant_id: str = ""
    federation_id: str = ""
    devices: list[str] = field(default_factory=list)
    summed: dict[int, set[str]] = field(default_factory=dict)

    def do(self, work: Callable[[Session], Any]) -> Any:
        """Run a transaction. While trials are left, crash it first at a random statement."""
        if self.tally.trials < self.trials:
            self.tally.trials += 1
            before = self.rng.randrange(self.rng.choice(_STATEMENTS))
            if self.rng.random() < _KILLED_SHARE:
                self.tally.killed += 1
                self._in_a_killed_process(work, before)
            else:
                try:
                    with crashing(self.db, before):
                        self._once(work)
                    self.tally.after_commit += 1
                except Crash:
                    pass
        return self._once(work)

    def _once(self, work: Callable[[Session], Any]) -> Any:
        with self.db.write() as session:
            return work(session)

    def _in_a_killed_process(self, work: Callable[[Session], Any], before: int) -> None:
        self.db.close()  # SQLite's connections must not cross a fork
        child = os.fork()
        if child == 0:
            try:
                own = Database(self.db.url)
                with (
                    crashing(own, before, die=lambda: os.kill(os.getpid(), signal.SIGKILL)),
                    own.write() as session,
                ):
                    work(session)
            finally:
                _die()
        os.waitpid(child, 0)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def crashing(db: Database, before: int, die: Callable[[], None] | None = None) -> Iterator[None]:
    """Let the process die before its statement number `before`. By default, it raises Crash."""
    seen = 0

    def count(*_: Any) -> None:
        nonlocal seen
        if seen == before:
            if die is not None:
                die()
            raise Crash
        seen += 1

    event.listen(db._engine, "before_cursor_execute", count)
    try:
        yield
    finally:
        event.remove(db._engine, "before_cursor_execute", count)


def begin(world: World, turn: int) -> None:
    """Make a federation with its members and its first round."""
    definition = make_private(
        total_steps=3 * ROUNDS, minimum=MINIMUM, privacy={"participations": PARTICIPATIONS}, clip=1000 + turn
    )
    first = History.begin(definition)
    with world.db.write() as session:
        at = now(session)
        federation = Federation(
            id=new_id(Prefix.FEDERATION),
            tenant_id=world.tenant_id,
            created_at=at,
            name=f"turn-{turn}",
            release="tiny",
            version=1,
            package_digest=definition.log.package_digest,
            definition=definition.to_bytes(),
            definition_digest=definition.digest,
            state=FederationState.RUNNING.value,
            target=TARGET,
            minimum=MINIMUM,
            deadline_s=60,
            rounds=ROUNDS,
            number=0,
            chain=first.chain,
            state_digest=first.digest,
            reach=0,
            participations=PARTICIPATIONS,
        )
        session.add(federation)
        session.flush()
        for device_id in world.devices:
            session.add(
                FederationMember(
                    federation_id=federation.id,
                    device_id=device_id,
                    tenant_id=world.tenant_id,
                    joined_at=at,
                )
            )
        rounds.open_next(session, federation)
        world.federation_id, world.summed = federation.id, {}


def open_world(folder: Path, *, trials: int, seed: int) -> World:
    """Make a database with devices."""
    url = f"sqlite:///{folder / 'ledger.db'}"
    migrate(url)
    world = World(db=Database(url), rng=random.Random(seed), trials=trials)
    with world.db.write() as session:
        world.tenant_id = access.create_tenant(session, name="one").id
        for index in range(DEVICES):
            device = Device(
                id=new_id(Prefix.DEVICE),
                tenant_id=world.tenant_id,
                created_at=now(session),
                public_key=f"key-{index}",
                name=f"device-{index}",
                release="tiny",
                alias="stable",
            )
            session.add(device)
            session.flush()
            world.devices.append(device.id)
    return world


def run_round(world: World, number: int) -> bool:
    """Run one round with crashes. Return False if too few devices may still take part."""
    invited = []
    for device_id in world.rng.sample(world.devices, DEVICES):
        if world.do(partial(_invite, world, device_id)):
            invited.append(device_id)
    if len(invited) < MINIMUM:
        return False
    for device_id in invited:
        if world.rng.random() < 0.85:
            _send(world, number, device_id)
            if world.rng.random() < 0.15:
                world.do(partial(_withdraw, world, device_id))
                if world.rng.random() < 0.5:
                    _send(world, number, device_id)
    with world.db.read() as session:
        row = session.get_one(Round, (world.federation_id, number))
        state, job_id = row.state, row.job_id
    if state == RoundState.OPEN:
        job_id = world.do(lambda session: _end(session, world, number))
    if job_id is not None:
        _close(world, number, job_id)
    with world.db.read() as session:
        world.tally.void += session.get_one(Round, (world.federation_id, number)).state == RoundState.VOID
    world.tally.rounds += 1
    return True


def _federation(session: Session, world: World) -> Federation:
    return rows.lock(session, tables.Federation, tenant_id=world.tenant_id, row_id=world.federation_id)


def _send(world: World, number: int, device_id: str) -> None:
    data = f"{number} {device_id}".encode()
    sent = contributions.Sent(
        federation_id=world.federation_id,
        number=number,
        device_id=device_id,
        data=data,
        digest=digest_of(data),
    )

    def accept(session: Session) -> None:
        federation = session.get_one(Federation, world.federation_id)
        try:
            contributions.accept(session, federation=federation, sent=sent)
        except RoundClosedError:
            return

    world.do(accept)


def _invite(world: World, device_id: str, session: Session) -> bool:
    federation = _federation(session, world)
    return contributions.invite(session, federation=federation, device_id=device_id) is not None


def _withdraw(world: World, device_id: str, session: Session) -> None:
    members.withdraw(session, federation_id=world.federation_id, device_id=device_id)


def _end(session: Session, world: World, number: int) -> str | None:
    federation = _federation(session, world)
    row = rounds.lock(session, world.federation_id, number)
    assert row is not None
    if row.state != RoundState.OPEN:  # it was committed before the crash
        return row.job_id if row.state == RoundState.CLOSING else None
    row.deadline_at = now(session) - timedelta(seconds=1)
    return rounds.end(session, federation, row)


def _close(world: World, number: int, job_id: str) -> None:
    """Run a worker's attempt. What it received counts as summed, even if the round becomes void."""
    with world.db.write() as session:
        held = claims.claim(session, worker="crashes", lease_s=600, job_id=job_id)
    assert held is not None
    with world.db.read() as session:
        received = contributions.received(session, federation_id=world.federation_id, number=number)
        federation = session.get_one(Federation, world.federation_id)
        ended = Ended(
            record=void_round(Definition.from_bytes(federation.definition), number).to_bytes(),
            counted=len(received),
            state_digest=federation.state_digest,
            reach=0,
            state=b"state",
            gains=None,
        )
    world.summed[number] = {one.device_id for one in received}
    is_void = world.rng.random() < 0.1

    def publish(session: Session) -> None:
        try:
            claims.check(session, held)
            federation = _federation(session, world)
            if is_void:
                row = rounds.lock_closing(session, federation, number)
                rounds.void(session, federation, row, "round-limit")
            else:
                rounds.publish(session, federation=federation, number=number, ended=ended)
            claims.complete(session, held, result_id=f"rounds/{number}")
        except (StaleClaimError, NotFoundError):
            return  # it was committed before the crash

    world.do(publish)


def compare(world: World) -> None:
    """Compare the charges with the sums."""
    with world.db.read() as session:
        query = select(PrivacyCharge).where(PrivacyCharge.federation_id == world.federation_id)
        charged = [row for row in session.scalars(query) if row.state == ChargeState.SPENT]
        held = session.scalars(query.where(PrivacyCharge.state == ChargeState.RESERVED.value)).all()
    spent = Counter((row.number, row.device_id) for row in charged)
    truth = {(number, device_id) for number, devices in world.summed.items() for device_id in devices}
    world.tally.charged_twice += sum(count for place, count in spent.items() if place not in truth) + len(
        held
    )
    world.tally.charged_twice += sum(count - 1 for count in spent.values())
    world.tally.lost += len(truth - set(spent))
    per_device = Counter(device_id for _, device_id in truth)
    world.tally.beyond += sum(count > PARTICIPATIONS for count in per_device.values())


def measure(*, trials: int, seed: int = 0) -> Tally:
    """Crash `trials` transactions, with as many federations as necessary."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        world = open_world(Path(folder), trials=trials, seed=seed)
        turn = 0
        while world.tally.trials < trials:
            begin(world, turn)
            number = 0
            while number < ROUNDS and run_round(world, number):
                number += 1
            compare(world)
            turn += 1
        world.db.close()
    return world.tally


def main() -> None:
    """Measure and print one line. Raise an error if a charge is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    found = measure(trials=asked.trials, seed=asked.seed)
    print(found.line())
    if found.charged_twice or found.lost or found.beyond:
        raise PermilleError("expected every summed vector charged once")


if __name__ == "__main__":
    main()

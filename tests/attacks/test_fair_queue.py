"""If one device or tenant queues without end, others wait for at most one of its jobs per worker.

The test plays the workers, with its own clock and with random arrivals and durations.
"""

import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from sqlalchemy.orm import Session

from permille.schemas.jobs import JobKind
from permille.store import access
from permille.store.database import Database
from permille.store.jobs import claims, queue
from permille.store.jobs.claims import Claim
from permille.store.jobs.transitions import NewJob
from permille.store.migrations.schema import migrate
from permille.store.tables import Device

START = datetime(2030, 1, 1, tzinfo=UTC)


@dataclass
class Waiting:
    """A waiting job of a modest owner, and the greedy jobs that each worker began in the meantime."""

    owner: str
    seen: dict[int, set[str]] = field(default_factory=dict)


@dataclass
class Shop:
    """A queue, its workers, and the waiting jobs of modest owners."""

    db: Database
    greedy: set[str] = field(default_factory=set)  # ids of the greedy owner's jobs
    waiting: dict[str, Waiting] = field(default_factory=dict)
    # claim and remaining ticks, by worker
    running: dict[int, tuple[Claim, int]] = field(default_factory=dict)
    owner_of: dict[str, str] = field(default_factory=dict)
    began: Counter[str] = field(default_factory=Counter)
    worst: int = 0

    def submit(self, session: Session, tenant_id: str, device_id: str | None, owner: str) -> None:
        kind = JobKind.MASK if device_id is None else JobKind.REPLAY
        new = NewJob(tenant_id=tenant_id, kind=kind, payload={"run_id": "r"}, device_id=device_id)
        job_id = queue.submit(session, new).id
        self.owner_of[job_id] = owner
        if owner == "greedy":
            self.greedy.add(job_id)
        else:
            busy = {worker: {claim.job_id} & self.greedy for worker, (claim, _) in self.running.items()}
            self.waiting[job_id] = Waiting(owner=owner, seen=busy)

    def is_idle(self, owner: str) -> bool:
        """Return True if a modest owner has no job. It never has two at a time."""
        here = {waiting.owner for waiting in self.waiting.values()}
        return owner not in here | {self.owner_of[claim.job_id] for claim, _ in self.running.values()}

    def work(self, worker: int, ticks: int) -> None:
        """Let a free worker take the next job."""
        with self.db.write() as session:
            claim = claims.claim(session, worker=str(worker), lease_s=1e6)
        if claim is None:
            return
        self.running[worker] = (claim, ticks)
        self.began[self.owner_of[claim.job_id]] += 1
        self.waiting.pop(claim.job_id, None)
        if claim.job_id in self.greedy:
            for waiting in self.waiting.values():
                waiting.seen.setdefault(worker, set()).add(claim.job_id)
                self.worst = max(self.worst, len(waiting.seen[worker]))

    def tick(self) -> None:
        """Let one unit of time pass, and end the jobs whose time is over."""
        for worker, (claim, left) in list(self.running.items()):
            if left > 1:
                self.running[worker] = (claim, left - 1)
                continue
            del self.running[worker]
            with self.db.write() as session:
                claims.complete(session, claim, result_id="r")


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A migrated database that each test copies."""
    path = tmp_path_factory.mktemp("queue") / "permille.db"
    migrate(f"sqlite:///{path}")
    yield path


def add_device(db: Database, tenant_id: str, name: str) -> str:
    with db.write() as session:
        session.add(
            Device(
                id=f"dev_{tenant_id}_{name}",
                tenant_id=tenant_id,
                public_key=name,
                name=name,
                release="r",
                alias="stable",
                created_at=START,
            )
        )
    return f"dev_{tenant_id}_{name}"


@pytest.mark.attack(10, "one device, or the operators of one tenant, queue without end")
@settings(
    max_examples=8,
    deadline=None,
    phases=[Phase.generate],  # shrinking takes minutes
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    workers=st.integers(1, 3),
    crowd=st.sampled_from(["devices of one tenant", "devices apart", "operators"]),
    arrivals=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), min_size=8, max_size=20),
)
def test_no_modest_one_waits_behind_more_than_one_greedy_job_a_worker(
    template: Path, workers: int, crowd: str, arrivals: list[tuple[int, int]]
) -> None:
    path = template.with_name("copy.db")
    for suffix in ("", "-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    shutil.copy(template, path)
    at = [START]
    db = Database(f"sqlite:///{path}", clock=lambda: at[0])
    try:
        with db.write() as session:
            tenants = [access.create_tenant(session, name=str(number)).id for number in range(5)]
        shop = Shop(db=db)
        greedy = None if crowd == "operators" else add_device(db, tenants[0], "greedy")
        homes = tenants[:1] * 3 if crowd == "devices of one tenant" else tenants[1:4]
        modest = [add_device(db, home, str(number)) for number, home in enumerate(homes)]
        with db.write() as session:
            for _ in range(2 * len(arrivals)):
                shop.submit(session, tenants[0], greedy, "greedy")
        for who, ticks in arrivals:
            if shop.is_idle(str(who)):
                with db.write() as session:
                    home, device_id = (tenants[4], None) if who == 3 else (homes[who], modest[who])
                    shop.submit(session, home, device_id, str(who))
            for worker in range(workers):
                if worker not in shop.running:
                    shop.work(worker, ticks)
            at[0] += timedelta(seconds=1)
            shop.tick()
        assert shop.began["greedy"] > 0
        assert shop.worst <= 1
    finally:
        db.close()


@pytest.mark.attack(10, "many devices of one tenant, to hold its operators back")
def test_operators_do_not_wait_for_their_devices(template: Path, tmp_path: Path) -> None:
    shutil.copy(template, tmp_path / "permille.db")
    at = [START]
    db = Database(f"sqlite:///{tmp_path / 'permille.db'}", clock=lambda: at[0])
    with db.write() as session:
        tenant_id = access.create_tenant(session, name="t").id
    devices = [add_device(db, tenant_id, str(number)) for number in range(8)]
    shop = Shop(db=db)
    with db.write() as session:
        for device_id in devices * 2:
            shop.submit(session, tenant_id, device_id, "greedy")
    at[0] += timedelta(seconds=1)
    shop.work(0, 1)
    with db.write() as session:
        for _ in range(2):
            shop.submit(session, tenant_id, None, "operator")
    for worker in (1, 2):
        shop.work(worker, 1)
    assert shop.began == {"greedy": 1, "operator": 2}
    db.close()

"""A random sequence of faults, drawn from a seed. A fault occurs after every few accepted jobs."""

import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import psycopg

from tests.bucket_site import Fault, Gate
from tests.chaos.processes import API_STEPS, CHILD_STEPS, HARMED, STORE_FAULTS, WORKER_STEPS
from tests.chaos.site import LEASE_S, Site, flush, send
from tests.rounds.run import descendants

JOBS_A_FAULT: Final = 5
_SPARED_S: Final = 30.0
# Weights of the groups of faults.
_SHARES: Final = {
    "step child": 26,
    "step worker": 12,
    "step api": 10,
    "store": 20,
    "kill worker": 5,
    "kill child": 5,
    "kill api": 5,
    "drain worker": 2,
    "stall worker": 2,
    "broker flushed": 4,
    "broker paused": 2,
    "broker killed": 3,
    "database restarted": 2,
    "database paused": 2,
}
_OF_BUCKET: Final = {"bucket": 100}
BUCKET_FAULTS: Final = ("500", "503", "away", "cut", "flipped", "lost-answer", "refused-writes", "stall")
_STEPS = {"child": CHILD_STEPS, "worker": WORKER_STEPS, "api": API_STEPS}
_BLOB: Final = r"^GET /[^?]*/sha256/[0-9a-f]{2}/"
_WRITE: Final = r"^(PUT|DELETE) "


def plan(jobs: int, seed: int, *, bucket: bool) -> list[str]:
    """Return the faults of a run with `jobs` jobs, in order. Each group occurs at least once."""
    rng = random.Random(f"faults {seed}")
    shares = {**_SHARES, **(_OF_BUCKET if bucket else {})}
    count = max(len(shares), jobs // JOBS_A_FAULT)
    groups = rng.choices(list(shares), weights=list(shares.values()), k=count)
    groups[: len(shares)] = list(shares)
    rng.shuffle(groups)
    chosen = {**_STEPS, "store": STORE_FAULTS, "bucket": BUCKET_FAULTS}
    turns = {name: rng.sample(steps, len(steps)) for name, steps in chosen.items()}
    named = []
    for number, group in enumerate(groups):
        steps = turns.get(group.removeprefix("step "))
        named.append(f"{group}: {steps[number % len(steps)]}" if steps else group)
    return named


@dataclass(slots=True)
class Faults:
    """Runner of the planned faults. It prints each of them."""

    site: Site
    seed: int
    say: Callable[[str], None]
    done: Counter[str] = field(default_factory=Counter)
    spared: int = 0
    _rng: random.Random = field(default_factory=random.Random)
    _closing: threading.Event = field(default_factory=threading.Event)

    def run(self, planned: list[str], jobs: int, accepted: Callable[[], int]) -> None:
        """Cause each fault after its share of jobs was accepted. After `stop`, wait for no more jobs."""
        self._rng = random.Random(f"fault {self.seed}")
        before = accepted()
        for number, fault in enumerate(planned):
            if number * jobs < before * len(planned):
                continue  # an earlier run that this one continues has caused it
            while True:
                closing = self._closing.is_set()
                if accepted() * len(planned) >= number * jobs:
                    break
                if closing:
                    return
                self._closing.wait(0.1)
            self.say(f"fault {number + 1} of {len(planned)}: {fault}")
            if self._do(number, fault):
                self.done[fault] += 1
            else:
                self.spared += 1

    def stop(self) -> None:
        self._closing.set()

    def _do(self, number: int, fault: str) -> bool:
        site, rng = self.site, self._rng
        group, _, step = fault.partition(": ")
        if group.startswith("database") and not self._none_is_last():
            return False
        if group == "bucket" and site.bucket is not None:
            _break(site.bucket, step, rng)
        elif step:
            site.token_for(step, str(number))
        elif group.endswith(("worker", "child")):
            return self._harm_worker(group)
        elif group == "kill api":
            send({site.pick("api")[1].pid}, signal.SIGKILL)
        elif group == "broker flushed":
            flush(site.redis)
        elif group == "broker killed":
            site.redis.kill()
            time.sleep(rng.uniform(0.5, 4))
            site.redis.start()
        elif group == "broker paused" and site.redis.process is not None:
            _pause({site.redis.process.pid}, rng.uniform(1, 5))
        elif group == "database restarted":
            site.postgres.crash()
        elif group == "database paused":
            _pause(site.database_processes(), rng.uniform(1, 4))
        return True

    def _harm_worker(self, group: str) -> bool:
        """Kill, drain or stall a worker, or kill its child. Spare the last attempt of a job: return False."""
        _, process = self.site.pick("worker")
        if self._runs_a_last_attempt(f"%-{process.pid}"):
            return False
        children = descendants(process.pid) - {process.pid}
        if group == "kill child":
            send(children, signal.SIGKILL)
        elif group == "kill worker":
            send({process.pid}, signal.SIGKILL)
        elif group == "drain worker":
            send({process.pid}, signal.SIGTERM)
        else:
            _pause({process.pid, *children}, LEASE_S + 2)
        return True

    def _none_is_last(self) -> bool:
        """Wait until no worker runs the last attempt of a job. Return False if that takes too long."""
        until = time.monotonic() + _SPARED_S
        while self._runs_a_last_attempt("%"):
            if self._closing.wait(0.2) or time.monotonic() > until:
                return False
        return True

    def _runs_a_last_attempt(self, workers: str) -> bool:
        query = (
            "SELECT count(*) FROM jobs WHERE state = 'running' AND attempt >= max_attempts AND worker LIKE %s"
        )
        try:
            with self.site.connect() as connection:
                found = connection.execute(query, (workers,)).fetchone()
        except psycopg.OperationalError:
            return True
        return found is None or bool(found[0])


def _break(bucket: Gate, how: str, rng: random.Random) -> None:
    """Let the bucket fail some requests, or all for some seconds. Last attempts of jobs are spared."""
    del bucket.requests[:]  # no code reads them here
    some, some_bytes = rng.randint(1, 8), rng.randrange(64)
    fault = {
        "500": Fault(".", some, status=500, agent=HARMED),
        "503": Fault(".", some, status=503, code="SlowDown", agent=HARMED),
        "away": Fault(".", 1 << 30, status=503, code="ServiceUnavailable", agent=HARMED),
        "cut": Fault(_BLOB, some, cut_after=some_bytes, agent=HARMED),
        "flipped": Fault(_BLOB, flip_byte=some_bytes, agent=HARMED),
        "lost-answer": Fault(_WRITE, lose=True, agent=HARMED),
        "refused-writes": Fault(_WRITE, some, status=500, agent=HARMED),
        "stall": Fault(".", stall=True, agent=HARMED),
    }[how]
    bucket.faults[:] = [*(other for other in bucket.faults if other.times), fault]
    if how == "away":
        time.sleep(rng.uniform(2, 8))
        fault.times = 0


def _pause(pids: set[int], seconds: float) -> None:
    send(pids, signal.SIGSTOP)
    time.sleep(seconds)
    send(pids, signal.SIGCONT)

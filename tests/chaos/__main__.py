"""Run many jobs under faults, then audit the result: `make chaos`.

    python -m tests.chaos --jobs 1000 --seed 0 --store both

The site is a real PostgreSQL, a real Redis, two APIs and three workers. Clients send jobs of all kinds over
REST, with idempotency keys, until they get an answer. Meanwhile, processes are killed at named steps and at
random moments. The broker and the database are flushed, paused and killed. The blob store fails and returns
half of a blob.

Then the faults end, the run waits for all accepted jobs, and `tests.chaos.audit` counts the errors. --folder
keeps the accepted jobs: a run with the same folder continues an earlier one.

A quarter of the jobs go to a second site, whose blobs are in a bucket. The bucket fails, stalls, flips bytes
and loses answers. Sums by a keeper are left out, because a keeper needs at least 32 devices. Exports are left
out if ExecuTorch's exporter is not installed.
"""

import argparse
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psycopg

from permille.schemas.jobs import JobKind
from permille.store.database import Database
from permille.store.retention.collection import collect
from tests.chaos import clients, faults
from tests.chaos.audit import ENDED, Findings, audit
from tests.chaos.site import Site

MOST_WAITING = 24
_SWEPT_S = 180.0
"""Time limit of the sweep of parts. It looks for parts in a bucket once a minute."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a run.

    Attributes:
        accepted: Number of accepted jobs.
        kinds: Number of jobs by kind and final state, including parts.
        complete: True if everything was sent and has ended.
    """

    found: Findings
    accepted: int
    kinds: Counter[tuple[str, str]]
    complete: bool


class Run:
    """One run: its site, its clients, its faults."""

    def __init__(self, store: str, jobs: int, options: argparse.Namespace) -> None:
        self.store, self.jobs, self.options, self.begun = store, jobs, options, time.monotonic()
        self.until = self.begun + 60 * options.minutes
        self.folder = options.folder / store
        self.folder.mkdir(parents=True, exist_ok=True)
        self.accepted = clients.Accepted.open(self.folder / "accepted.jsonl")

    def say(self, line: str) -> None:
        print(f"{time.monotonic() - self.begun:7.1f} s  {line}", flush=True)

    def main(self) -> Outcome:
        """Run, end the faults, wait, stop, audit."""
        options = self.options
        planned = clients.plan(self.jobs, options.seed)
        self.say(f"{self.store}: {len(self.accepted)} of {self.jobs} jobs accepted before; {self.folder}")
        site = Site.open(self.folder, options.seed, store=self.store)
        try:
            world = clients.prepare(site, random.Random(options.seed))
            private = sum(kind == "private" for _, kind in planned)
            clients.enrol(world, f"chaos-{len(self.accepted)}", private)
            self.say("ready")
            sent, injected = self._send(site, world, planned)
            self.say(f"accepted {len(self.accepted)}; healing, waiting")
            unreached = Counter(site.tokens_left())
            site.heal()
            waited = self._wait(site)
            self._report(site, sent, injected, unreached)
            kinds = self._kinds(site)
            site.quiet()
            self._collect(site)
            found = audit(site.postgres.url, site.files(), self.accepted.ids)
        finally:
            site.close()
        for name in ("lost", "published_twice", "orphan_blobs"):
            for line in getattr(found, name)[:20]:
                print(f"{name}: {line}")
        complete = waited and not sent.failures and len(self.accepted) == self.jobs
        return Outcome(found, len(self.accepted), kinds, complete)

    def _send(
        self, site: Site, world: clients.World, planned: list[tuple[str, str]]
    ) -> tuple[clients.Clients, faults.Faults]:
        injected = faults.Faults(site, self.options.seed, self.say)
        wanted = faults.plan(self.jobs, self.options.seed, bucket=self.store == "bucket")
        thread = threading.Thread(
            target=injected.run, args=(wanted, self.jobs, lambda: len(self.accepted)), daemon=True
        )
        thread.start()
        sent = clients.Clients(world, self.accepted, lambda: self._may_send(site))
        sent.run(site, planned, seed=self.options.seed)
        injected.stop()
        thread.join()
        return sent, injected

    def _may_send(self, site: Site) -> bool:
        """Wait while many jobs are unfinished. Return False if the time is over."""
        while time.monotonic() < self.until:
            waiting = _unfinished(site)
            if waiting is not None and waiting < MOST_WAITING:
                return True
            time.sleep(0.3)
        return False

    def _wait(self, site: Site) -> bool:
        """Wait until all jobs have ended and parts are swept. Return False if jobs have not ended in time."""
        until = time.monotonic() + 60 * self.options.minutes
        while _unfinished(site) != 0:
            if time.monotonic() > until:
                self.say("expected every job to end: some have not")
                return False
            time.sleep(0.5)
        self.say("every job has ended")
        parts = site.blobs().below("parts")
        swept = time.monotonic() + _SWEPT_S
        while parts.names() and time.monotonic() < swept:
            time.sleep(0.5)
        return True

    def _collect(self, site: Site) -> None:
        """Collect the blobs that killed attempts left. Nothing runs any more."""
        database = Database(site.postgres.url)
        found = collect(database, site.blobs(), site.settings())
        database.close()
        self.say(f"collected: {len(found.removed)} of {len(found.stored)} blobs")

    def _kinds(self, site: Site) -> Counter[tuple[str, str]]:
        with site.connect() as connection:
            rows = connection.execute("SELECT kind, state, count(*) FROM jobs GROUP BY 1, 2").fetchall()
            often = connection.execute("SELECT fence, count(*) FROM jobs GROUP BY 1 ORDER BY 1").fetchall()
        self.say("jobs by how often they were claimed: " + ", ".join(f"{n}: {jobs}" for n, jobs in often))
        return Counter({(str(kind), str(state)): int(count) for kind, state, count in rows})

    def _report(
        self, site: Site, sent: clients.Clients, injected: faults.Faults, unreached: Counter[str]
    ) -> None:
        self.say(f"faults: {sum(injected.done.values())} injected, {injected.spared} spared a last attempt")
        for fault, count in sorted(injected.done.items()):
            left = unreached[fault.partition(": ")[2]]
            self.say(f"  {count:4} {fault}" + (f" ({left} not reached)" if left else ""))
        self.say(f"processes started again: {site.restarts}; jobs cancelled: {sent.cancelled}")
        if site.bucket is not None:
            self.say(f"requests to the bucket that failed: {site.bucket.harmed}")
        refused: Counter[str] = sum((api.client.refused for api in sent.apis), Counter())  # type: ignore[attr-defined]
        for told, count in refused.most_common(20):
            self.say(f"  {count:4} requests sent again after: {told}")
        for failure in sent.failures:
            self.say(f"  client failed: {failure[:500]}")


def _unfinished(site: Site) -> int | None:
    """Return the number of unfinished jobs, or None if the database cannot be reached."""
    try:
        with site.connect() as connection:
            query = "SELECT count(*) FROM jobs WHERE state != ALL(%s)"
            found = connection.execute(query, (list(ENDED),)).fetchone()
    except psycopg.OperationalError:
        return None
    return 0 if found is None else int(found[0])


def _print_kinds(kinds: Counter[tuple[str, str]]) -> None:
    """Print the number of jobs by kind and final state, including parts."""
    states = ("succeeded", "failed", "cancelled")
    print(f"{'kind':16}" + "".join(f"{state:>11}" for state in states))
    for kind in JobKind:
        print(f"{kind.value:16}" + "".join(f"{kinds[kind.value, state]:11}" for state in states))


def run(options: argparse.Namespace) -> int:
    """Run on the chosen stores and print the result. Return the exit code."""
    jobs = {"folder": options.jobs - options.jobs // 4, "bucket": options.jobs // 4}
    jobs = jobs if options.store == "both" else {options.store: options.jobs}
    outcomes = [Run(store, count, options).main() for store, count in jobs.items()]
    _print_kinds(sum((one.kinds for one in outcomes), Counter()))
    found = sum((one.found for one in outcomes), Findings())
    print(found.line(sum(one.accepted for one in outcomes)), flush=True)
    return 0 if found.clean and all(one.complete for one in outcomes) else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it. Return 0 if nothing was lost, published twice or left over."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--store", choices=("folder", "bucket", "both"), default="both")
    parser.add_argument("--minutes", type=float, default=120, help="at most, to send; as long again to end")
    parser.add_argument("--folder", type=Path, help="kept, and gone on with; without it a temporary one")
    options = parser.parse_args(arguments)
    if options.folder is None:
        with tempfile.TemporaryDirectory(prefix="permille-chaos-") as name:
            Path(name).chmod(0o755)  # the database may run as another user
            options.folder = Path(name)
            return run(options)
    return run(options)


if __name__ == "__main__":
    # raise SystemExit, so that the started processes are ended
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(1))
    sys.exit(main())

"""Thousands of jobs while everything goes wrong, and an audit at the end: `make chaos`.

    python -m tests.chaos --jobs 1000 --seed 0

Real PostgreSQL, Redis, two APIs, three workers. Clients send jobs of all kinds over REST, by idempotency
keys, again until an answer comes. Meanwhile processes are killed at named steps and at any, the broker and
the database are flushed, paused, killed; the blob store fails and reads half. Then all is well again, what
was promised is waited for, and `tests.chaos.audit` counts. What was accepted is kept in --folder: begun again
with the same one, a run goes on where it was.
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
from pathlib import Path

import psycopg

from permille.store.blobs.folder import open_blobs
from permille.store.database import Database
from permille.store.retention.collection import collect
from permille_workers.runtime.settings import WorkerSettings
from tests.chaos import clients, faults
from tests.chaos.audit import ENDED, audit
from tests.chaos.site import Site

MOST_WAITING = 24
_SWEPT_S = 60.0


class Run:
    """One run: its site, its clients, its faults."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder, self.options, self.begun = folder, options, time.monotonic()
        self.until = self.begun + 60 * options.minutes
        self.accepted = clients.Accepted.open(folder / "accepted.jsonl")

    def say(self, line: str) -> None:
        print(f"{time.monotonic() - self.begun:7.1f} s  {line}", flush=True)

    def main(self) -> int:
        """Run, heal, wait, stop, audit."""
        options = self.options
        planned = clients.plan(options.jobs, options.seed)
        self.say(f"{len(self.accepted)} of {options.jobs} jobs accepted before; {self.folder}")
        site = Site.open(self.folder, options.seed)
        try:
            world = clients.prepare(site, random.Random(options.seed))
            private = sum(kind == "private" for _, kind in planned)
            clients.enrol(world, f"chaos-{len(self.accepted)}", private)
            self.say("ready")
            sent, injected = self._send(site, world, planned)
            self.say(f"accepted {len(self.accepted)}; healing, waiting")
            unreached = Counter(site.tokens_left())
            site.drop_tokens()
            waited = self._wait(site)
            self._report(site, sent, injected, unreached)
            attempts = self._attempts(site)
            url = site.postgres.url
            site.quiet()
            self._collect(url)
            found = audit(url, self.folder / "data" / "blobs", self.accepted.ids)
        finally:
            site.close()
        for name in ("lost", "published_twice", "orphan_blobs"):
            for line in getattr(found, name)[:20]:
                print(f"{name}: {line}")
        self.say(f"jobs by how often they were claimed: {attempts}")
        print(found.line(len(self.accepted)), flush=True)
        good = found.clean and waited and not sent.failures and len(self.accepted) == options.jobs
        return 0 if good else 1

    def _send(
        self, site: Site, world: clients.World, planned: list[tuple[str, str]]
    ) -> tuple[clients.Clients, faults.Faults]:
        injected = faults.Faults(site, self.options.seed, self.say)
        wanted = faults.plan(self.options.jobs, self.options.seed)
        thread = threading.Thread(
            target=injected.run, args=(wanted, self.options.jobs, lambda: len(self.accepted)), daemon=True
        )
        thread.start()
        sent = clients.Clients(world, self.accepted, lambda: self._may_send(site))
        sent.run(site, planned, seed=self.options.seed)
        injected.stop()
        thread.join()
        return sent, injected

    def _may_send(self, site: Site) -> bool:
        """Wait while many jobs wait; False: the time is over."""
        while time.monotonic() < self.until:
            waiting = _unfinished(site)
            if waiting is not None and waiting < MOST_WAITING:
                return True
            time.sleep(0.3)
        return False

    def _wait(self, site: Site) -> bool:
        """Until all has ended and the sweeps have been round; whether it did in time."""
        until = time.monotonic() + 60 * self.options.minutes
        while _unfinished(site) != 0:
            if time.monotonic() > until:
                self.say("expected every job to end: some have not")
                return False
            time.sleep(0.5)
        self.say("every job has ended")
        blobs = self.folder / "data" / "blobs"
        swept = time.monotonic() + _SWEPT_S
        while any((blobs / "parts").glob("*")) and time.monotonic() < swept:
            time.sleep(0.5)
        return True

    def _collect(self, url: str) -> None:
        """Collect what killed attempts have left; nothing runs any more."""
        values = {"data_dir": self.folder / "data", "database_url": url, "collection_grace_s": 0}
        settings, database = WorkerSettings.model_validate(values), Database(url)
        found = collect(database, open_blobs(settings), settings)
        database.close()
        self.say(f"collected: {len(found.removed)} of {len(found.stored)} blobs")

    def _attempts(self, site: Site) -> dict[int, int]:
        with site.connect() as connection:
            rows = connection.execute(
                "SELECT fence, count(*) FROM jobs GROUP BY fence ORDER BY fence"
            ).fetchall()
        return {int(fence): int(count) for fence, count in rows}

    def _report(
        self, site: Site, sent: clients.Clients, injected: faults.Faults, unreached: Counter[str]
    ) -> None:
        self.say(f"faults: {sum(injected.done.values())} injected, {injected.spared} spared a last attempt")
        for fault, count in sorted(injected.done.items()):
            left = unreached[fault.partition(": ")[2]]
            self.say(f"  {count:4} {fault}" + (f" ({left} not reached)" if left else ""))
        self.say(f"processes started again: {site.restarts}; jobs cancelled: {sent.cancelled}")
        refused: Counter[str] = sum((api.client.refused for api in sent.apis), Counter())  # type: ignore[attr-defined]
        for told, count in refused.most_common(20):
            self.say(f"  {count:4} requests sent again after: {told}")
        for failure in sent.failures:
            self.say(f"  client failed: {failure[:500]}")
        with site.connect() as connection:
            rows = connection.execute(
                "SELECT kind, state, count(*) FROM jobs GROUP BY 1, 2 ORDER BY 1, 2"
            ).fetchall()
        self.say(
            "jobs, parts included: " + ", ".join(f"{kind} {state} {count}" for kind, state, count in rows)
        )
        self.say("left out: export (its wheel is not here), sums by a keeper (they take 32 devices)")


def _unfinished(site: Site) -> int | None:
    """How many jobs have not ended; None while the database is away."""
    try:
        with site.connect() as connection:
            query = "SELECT count(*) FROM jobs WHERE state != ALL(%s)"
            found = connection.execute(query, (list(ENDED),)).fetchone()
    except psycopg.OperationalError:
        return None
    return 0 if found is None else int(found[0])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; the exit code is 0 where nothing was lost, nothing made twice, nothing left over."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=120, help="at most, to send; as long again to end")
    parser.add_argument("--folder", type=Path, help="kept, and gone on with; without it a temporary one")
    options = parser.parse_args(arguments)
    if options.folder is None:
        with tempfile.TemporaryDirectory(prefix="permille-chaos-") as name:
            Path(name).chmod(0o755)  # the database may run as somebody else
            return Run(Path(name), options).main()
    options.folder.mkdir(parents=True, exist_ok=True)
    return Run(options.folder, options).main()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(1))  # what was started is ended
    sys.exit(main())

"""Periodic maintenance.

Every worker regularly takes back jobs whose lease has expired, advances builds, sends lost
messages again, and deletes expired tokens, uploads that were given up, and the folders of ended jobs.
Extensions add steps of their own.
Once an hour by default, one of the workers applies the retention rules and deletes unreferenced blobs.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

from sqlalchemy.exc import DBAPIError

from permille.machine_memory import available_memory
from permille.package.blobs import BlobFolder
from permille.store import devices, uploads
from permille.store.database import Database
from permille.store.jobs import claims
from permille.store.jobs.claims import pull_back
from permille.store.jobs.dispatch import CeleryDispatcher, note_worker
from permille.store.migrations.schema import check_newest
from permille.store.retention import rules
from permille.store.retention.collection import collect, references, take_turn
from permille.telemetry import Outage
from permille_workers.runtime.extension import worker_extensions
from permille_workers.runtime.metrics import count_sweep
from permille_workers.runtime.settings import RESEND_AFTER_S, WorkerSettings
from permille_workers.runtime.supervisor import Shutdown
from permille_workers.runtime.threads import start_thread, try_step
from permille_workers.runtime.work_folders import remove_ended

# If this many messages wait in the broker, the sweeper sends no more. More are not needed, because each
# message wakes a worker, which then runs any due job.
_ENOUGH_MESSAGES = 100
# An unfinished blob whose file is older than this is deleted. A writer that is alive writes to its file at
# least once a day, so an older file belongs to a killed writer.
_UNFINISHED_BLOB_S = 86_400.0
_LOOK_S = 60.0  # seconds between two checks for a due collection, and for a clock that was set back
_BUCKET_EVERY_S = 60.0  # a bucket is swept less often, because its provider charges for each listing

Step = Callable[[], object]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweeper:
    """The maintenance of one worker, until its shutdown.

    Attributes:
        name: the name of the worker.
        dispatcher: None if workers find jobs in the database without a broker.
    """

    name: str
    db: Database
    blobs: BlobFolder
    settings: WorkerSettings
    shutdown: Shutdown
    dispatcher: CeleryDispatcher | None = None

    def run(self) -> None:
        """Sweep every `sweep_s` seconds, and a bucket once a minute. Log failures, and try again."""
        every_s = 0.0 if self.settings.blob_bucket is None else _BUCKET_EVERY_S
        blobs_due = clock_due = time.monotonic()
        schema, clock = Outage(_log, "cannot sweep the database"), Outage(_log, "cannot correct times")
        rows, blobs = (
            [(step, Outage(_log, f"cannot {what}")) for what, step in steps.items()]
            for steps in (self._row_steps(), self._blob_steps())
        )
        start_thread(self.run_collections, "collector")
        for extension in worker_extensions():
            for what, repeated in extension.threads.items():
                start_thread(partial(self._repeat, what, partial(repeated, self.db, self.settings)), what)
        while not self.shutdown.asked.wait(self.settings.sweep_s):
            # A worker of an older version must not work on a migrated database.
            if not try_step(self._check_schema, schema):
                continue
            if time.monotonic() >= clock_due and try_step(self._pull_back, clock):
                clock_due = time.monotonic() + _LOOK_S
            for step, outage in rows:
                try_step(step, outage)
            if time.monotonic() >= blobs_due:
                done = [try_step(step, outage) for step, outage in blobs]
                blobs_due = time.monotonic() + every_s * all(done)

    def sweep(self) -> None:
        """Sweep the database and the blobs once. Raises the first error."""
        self._check_schema()
        for step in (*self._row_steps().values(), *self._blob_steps().values()):
            step()

    def _row_steps(self) -> dict[str, Step]:
        """Return the steps of a sweep of the database. If one fails, the others still run."""
        return {
            "end expired leases": self._end_leases,
            # These may add jobs, for which the next step sends messages.
            **{
                what: partial(step, self.db)
                for extension in worker_extensions()
                for what, step in extension.sweeps.items()
            },
            "send lost messages": self._resend,
            "delete expired tokens": self._delete_tokens,
            "record that this worker runs": self._note_worker,
        }

    def _blob_steps(self) -> dict[str, Step]:
        return {
            "remove the folders of ended jobs": partial(
                remove_ended, self.db, self.settings.work_root, self.blobs
            ),
            "erase uploads": partial(uploads.sweep, self.db, self.blobs),
            "sweep the blobs": self._sweep_blobs,
        }

    def _pull_back(self) -> None:
        if moved := pull_back(self.db):
            _log.warning(
                "the clock was set back, so the due times and leases of %d jobs were corrected", moved
            )

    def _check_schema(self) -> None:
        with self.db.read() as session:
            check_newest(session)

    def _end_leases(self) -> None:
        report = claims.sweep(self.db)
        count_sweep(report)
        if report.requeued or report.died or report.cancelled:
            _log.info("swept expired leases: %s", report)

    def _delete_tokens(self) -> None:
        with self.db.write() as session:
            devices.purge_expired(session)

    def _note_worker(self) -> None:
        with self.db.write() as session:
            note_worker(
                session,
                name=self.name,
                exports=find_spec("executorch") is not None,
                memory_bytes=self.settings.memory_bytes or available_memory(),
            )

    def _sweep_blobs(self) -> None:
        self.blobs.sweep(before_s=time.time() - _UNFINISHED_BLOB_S)

    def _repeat(self, what: str, step: Step) -> None:
        """Run a step every `sweep_s` seconds."""
        outage = Outage(_log, f"cannot {what}")
        while not self.shutdown.asked.wait(self.settings.sweep_s):
            try_step(step, outage)

    def run_collections(self) -> None:
        """Every `collect_every_s` seconds, apply the retention rules and delete unreferenced blobs.

        In each period, only one of all workers does this. A collection is slow, so it runs in a thread of its
        own. It can be killed at any time without harm.
        """
        every_s = self.settings.collect_every_s
        own = time.monotonic()
        while every_s and not self.shutdown.asked.wait(min(every_s, _LOOK_S)):
            try:
                turn = take_turn(self.db, every_s)
            except DBAPIError as exc:  # perhaps the disk is full, and a collection frees space
                _log.warning("cannot record which worker collects: %s", exc)
                turn = time.monotonic() - own >= every_s
            if turn:
                own = time.monotonic()
                # If the rules fail, perhaps the disk is full, and the collection frees space.
                try_step(partial(rules.apply_all, self.db), Outage(_log, "cannot apply retention rules"))
                try_step(self._collect, Outage(_log, "cannot collect"))

    def _collect(self) -> None:
        with self.db.read() as session:
            # If nothing refers to any blob, this may be a new database beside old blobs. Only an operator may
            # delete them.
            if not references(session):
                return
        found = collect(self.db, self.blobs, self.settings)
        if found.removed:
            _log.info("deleted %d bytes of blobs that no row names", sum(found.removed.values()))

    def _resend(self) -> None:
        if self.dispatcher is None or self.dispatcher.waiting() >= _ENOUGH_MESSAGES:
            return
        with self.db.write() as session:
            job_ids = claims.take_undispatched(session, resend_after_s=RESEND_AFTER_S)
        refused = [job_id for job_id in job_ids if not self.dispatcher.send(job_id)]
        if refused:
            with self.db.write() as session:
                claims.mark_undispatched(session, refused)

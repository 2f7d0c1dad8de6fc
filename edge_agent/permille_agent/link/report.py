"""Queue of reports to the service.

- By default only metrics leave the device: numbers and enums in the closed schema of `permille.schemas.runs`.
  Numbers are rounded before they are queued (`rounding.py`).
- A log or packed state is queued only with the user's consent. If the user withdraws consent, all logs and
  states that wait are removed.
- `reports/<run_id>.json` is the queue entry of a run, and later its receipt. `reports/<run_id>.log` is a log
  or state that waits.
- `collect_reports` queues each finished run once. It also finds runs that ended just before a kill.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path

from permille.errors import InputError, OperatorError
from permille.files import write_atomic
from permille.package.blobs import BlobFolder
from permille.schemas.problems import ProblemType
from permille.schemas.runs import MAX_LOG_BYTES, LogForm, RunMetrics
from permille_agent.link.api import DeviceApi
from permille_agent.link.client import RequestRefusedError
from permille_agent.link.rounding import rounded
from permille_agent.state.choices import read_consent
from permille_agent.state.home import Home, read_record, write_record
from permille_agent.training.decision import Decision
from permille_agent.training.outcome import RunOutcome
from permille_agent.training.personal import shareable
from permille_agent.training.run import AgreedTo, RunFolder, find_run, list_runs

RUN_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.ASCII)


class _WithdrawnError(Exception):
    """The user withdrew consent during an upload."""


class Delivery(StrEnum):
    """Progress of sending the metrics or the log of a report.

    `REFUSED` means that the service refused the data, or that a log is too large to be sent.
    `FULL` means that the device's quota at the service is used up. The data is kept, and sent again when the
    user runs `permille-agent report`.
    """

    NONE = "none"
    QUEUED = "queued"
    SENT = "sent"
    REFUSED = "refused"
    FULL = "full"
    DELETION_WANTED = "deletion_wanted"
    DELETED = "deleted"


_NO_DIGESTS = {"state_digest": None, "scaled_digest": None}
WAITING = frozenset({Delivery.QUEUED, Delivery.DELETION_WANTED})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """The report of a run.

    Attributes:
        withdrawals: how often the user had withdrawn consent before agreeing to share this log. The log is
            sent only if the count is still the same.
        reason: reason of the last refusal.
    """

    run_id: str
    metrics: RunMetrics | None = None
    metrics_delivery: Delivery = Delivery.NONE
    log_delivery: Delivery = Delivery.NONE
    withdrawals: int = 0
    reason: str = ""

    @property
    def waits(self) -> bool:
        """True if a part of the report still has to be sent."""
        return self.metrics_delivery in WAITING or self.log_delivery in WAITING


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    """Result of `deliver`: number of delivered reports, and of reports of which a part was refused."""

    sent: int
    refused: int


def enqueue(
    home: Home, run_id: str, metrics: RunMetrics, *, shared_log: bytes | None, withdrawals: int = 0
) -> RunReport:
    """Queue the report of a run. If the run already has a report, return this report unchanged.

    Args:
        home: the home folder.
        run_id: id of the run.
        metrics: metrics to send.
        shared_log: log or packed state that the user shares, else None.
        withdrawals: number of withdrawals of consent when the user agreed to share it.

    Raises:
        InputError: the run's id is not a UUID, or the log is too large.
        OperatorError: the disk is full.
    """
    if RUN_ID.fullmatch(run_id) is None:
        raise InputError(f"The id of a run must be a UUID, got {run_id!r:.60}.")
    if (known := read_report(home, run_id)) is not None:
        return known
    metrics = rounded(metrics)
    if shared_log is None:
        # A digest of the state would let the service recognise equal states without a shared log.
        metrics = metrics.model_copy(update=_NO_DIGESTS)
    else:
        # Write the log before the queue entry that refers to it.
        _write_log(home, run_id, shared_log)
    report = RunReport(
        run_id=run_id,
        metrics=metrics,
        metrics_delivery=Delivery.QUEUED,
        log_delivery=Delivery.NONE if shared_log is None else Delivery.QUEUED,
        withdrawals=withdrawals,
    )
    _save(home, report)
    return report


def queue_log(home: Home, report: RunReport, log: bytes, *, withdrawals: int) -> RunReport:
    """Queue the log of a run whose report was queued without it. The metrics do not change.

    Raises:
        InputError: the log is too large.
        OperatorError: the disk is full.
    """
    _write_log(home, report.run_id, log)
    return _save(home, replace(report, log_delivery=Delivery.QUEUED, withdrawals=withdrawals))


def collect_reports(home: Home) -> int:
    """Queue the reports of all finished runs, and return the number of new ones.

    The caller holds the writers' lock.

    Raises:
        OperatorError: the outcome of a run is damaged, or the disk is full. The reports of the other runs are
            queued before this error is raised.
    """
    new, failed = 0, None
    for run in list_runs(home):
        try:
            new += _collect(home, run)
        except OperatorError as exc:
            failed = failed or exc
    if failed is not None:
        raise failed
    return new


def share_run(home: Home, name: str, form: LogForm, *, withdrawals: int) -> Delivery:
    """Queue the log or state of a run that was reported without it. The user has agreed to share it.

    The caller holds the writers' lock.

    Args:
        home: the home folder.
        name: folder name of the run.
        form: log or packed state.
        withdrawals: number of withdrawals of consent when the user agreed.

    Returns:
        Progress of the upload. `NONE` if the run has no state, or its report is refused or not queued.

    Raises:
        OperatorError: there is no such run, or the disk is full.
        PackageError: the log is damaged.
        InputError: the run has no log, or the log is too large.
    """
    run = find_run(home, name)
    report = read_report(home, run.run_id)
    if report is None:
        return Delivery.NONE
    may_follow = report.log_delivery in (Delivery.NONE, Delivery.DELETED)
    decision = run.load("decision", Decision)
    has_state = decision is not None and decision.step > 0
    if may_follow and has_state and report.metrics_delivery not in (Delivery.REFUSED, Delivery.FULL):
        data = shareable(run, form, BlobFolder(home.blobs))
        report = queue_log(home, report, data, withdrawals=withdrawals)
    return report.log_delivery


def log_delivery(home: Home, run_id: str) -> Delivery:
    """Return the progress of the upload of a run's log."""
    report = read_report(home, run_id)
    return Delivery.NONE if report is None else report.log_delivery


def _collect(home: Home, run: RunFolder) -> int:
    outcome = run.load("outcome", RunOutcome)
    if outcome is None:
        return 0
    log = run.path / "shared.log"
    new = read_report(home, run.run_id) is None
    if new:
        agreed = run.load("consent", AgreedTo)
        shared = agreed is not None and log.is_file() and not _is_withdrawn(home, agreed.withdrawals)
        data = log.read_bytes() if shared else None
        withdrawals = agreed.withdrawals if agreed else 0
        try:
            enqueue(home, run.run_id, outcome.metrics, shared_log=data, withdrawals=withdrawals)
        except InputError as exc:
            # The log is too large. This must hold back neither the metrics nor the reports of other runs.
            report = enqueue(home, run.run_id, outcome.metrics, shared_log=None)
            _save(home, replace(report, log_delivery=Delivery.REFUSED, reason=str(exc)))
    # If the log may be sent, the queue now has a copy of it, so the file in the run's folder can go.
    log.unlink(missing_ok=True)
    return int(new)


def _is_withdrawn(home: Home, withdrawals: int) -> bool:
    """Return whether the user has withdrawn consent since the count of withdrawals was `withdrawals`."""
    return read_consent(home).withdrawals != withdrawals


def read_report(home: Home, run_id: str) -> RunReport | None:
    """Read the report or receipt of a run. Return None if there is none."""
    return read_record(home.reports / f"{run_id}.json", RunReport)


def read_reports(home: Home) -> Iterator[RunReport]:
    """Yield all reports and receipts, sorted by run id.

    Raises:
        OperatorError: reports are damaged. All others are yielded before this error is raised.
    """
    failed = None
    for path in sorted(home.reports.glob("*.json")):
        try:
            if RUN_ID.fullmatch(path.stem) and (report := read_report(home, path.stem)) is not None:
                yield report
        except OperatorError as exc:
            failed = failed or exc
    if failed is not None:
        raise failed


def deliver(home: Home, api: DeviceApi) -> Delivered:
    """Send all waiting reports, in the order in which the runs ended.

    Each result is durable before the next report is sent.

    Raises:
        RetryableError, OperatorError: the service cannot be reached or refuses this device. The other
            reports stay in the queue. Or reports are damaged, and all others were sent.
    """
    sent = refused = 0
    waiting: list[RunReport] = []
    failed = None
    try:
        waiting.extend(report for report in read_reports(home) if report.waits)
    except OperatorError as exc:
        failed = exc
    for report in sorted(waiting, key=_ended_at):
        done = _deliver_one(home, api, report)
        sent, refused = sent + (not done.reason), refused + bool(done.reason)
    if failed is not None:
        raise failed
    return Delivered(sent=sent, refused=refused)


def queue_again(home: Home) -> None:
    """Queue again the reports and logs that exceeded the quota. Only a command of the user does this."""
    for report in read_reports(home):
        metrics, log = (
            Delivery.QUEUED if part is Delivery.FULL else part
            for part in (report.metrics_delivery, report.log_delivery)
        )
        if (metrics, log) != (report.metrics_delivery, report.log_delivery):
            _save(home, replace(report, metrics_delivery=metrics, log_delivery=log, reason=""))


def withdraw_logs(home: Home) -> int:
    """Remove all waiting logs, queued or still in the folder of a run, and return their number.

    An interrupted upload may have reached the service. So if the service knows the run, it is
    asked to delete the log.
    """
    unqueued = list(home.runs.glob("*/shared.log"))
    for path in unqueued:
        path.unlink()
    # `FULL` counts as waiting, because the user may queue it again later.
    waiting = (Delivery.QUEUED, Delivery.FULL)
    queued = [report for report in read_reports(home) if report.log_delivery in waiting]
    for report in queued:
        _withdraw(home, report)
    return len(queued) + len(unqueued)


def want_deletion(home: Home, run_id: str | None) -> int:
    """Mark an uploaded log, or all of them, for deletion by the next `deliver`. Return their number.

    Raises:
        InputError: no log of this run was uploaded.
    """
    uploaded = [
        r for r in read_reports(home) if r.log_delivery is Delivery.SENT and run_id in (None, r.run_id)
    ]
    if run_id is not None and not uploaded:
        raise InputError(
            f"No log of the run {run_id!r:.60} was uploaded. `permille-agent share-log show` lists them."
        )
    for report in uploaded:
        _save(home, replace(report, log_delivery=Delivery.DELETION_WANTED))
    return len(uploaded)


def _ended_at(report: RunReport) -> datetime:
    """Return the end of the run, or the earliest time for a report without metrics."""
    # `forget` erases the metrics of a run whose log is to be deleted.
    return datetime.min.replace(tzinfo=UTC) if report.metrics is None else report.metrics.ended_at


def _withdraw(home: Home, report: RunReport) -> RunReport:
    _log_path(home, report.run_id).unlink(missing_ok=True)
    metrics = report.metrics and report.metrics.model_copy(update=_NO_DIGESTS)
    known = report.metrics_delivery is Delivery.SENT
    log = Delivery.DELETION_WANTED if known else Delivery.NONE
    reason = "" if known else report.reason  # once the metrics are sent, it is about the log
    return _save(home, replace(report, log_delivery=log, metrics=metrics, reason=reason))


def _deliver_one(home: Home, api: DeviceApi, report: RunReport) -> RunReport:
    log = _log_path(home, report.run_id)
    queued = report.log_delivery is Delivery.QUEUED
    if queued and (not log.is_file() or _is_withdrawn(home, report.withdrawals)):
        report = _withdraw(home, report)
    if report.metrics_delivery is Delivery.QUEUED and report.metrics is not None:
        report = _send_metrics(home, api, report, report.metrics)
    if report.log_delivery is Delivery.QUEUED and _is_withdrawn(home, report.withdrawals):
        report = _withdraw(home, report)  # the user withdrew consent during the request above
    if report.log_delivery is Delivery.QUEUED:
        report = _send_log(home, api, report)
    if report.log_delivery is Delivery.DELETION_WANTED:
        report = _send_deletion(home, api, report)
    return report


def _send_metrics(home: Home, api: DeviceApi, report: RunReport, metrics: RunMetrics) -> RunReport:
    try:
        api.report_run(report.run_id, metrics)
        report = replace(report, metrics_delivery=Delivery.SENT)
    except RequestRefusedError as exc:
        if exc.problem == ProblemType.QUOTA_SPENT:
            log = Delivery.FULL if report.log_delivery is Delivery.QUEUED else report.log_delivery
            full = replace(report, metrics_delivery=Delivery.FULL, log_delivery=log, reason=str(exc)[:500])
            return _save(home, full)
        _log_path(home, report.run_id).unlink(missing_ok=True)
        log = Delivery.NONE if report.log_delivery is Delivery.QUEUED else report.log_delivery
        report = replace(report, metrics_delivery=Delivery.REFUSED, log_delivery=log, reason=str(exc)[:500])
    return _save(home, report)


def _send_log(home: Home, api: DeviceApi, report: RunReport) -> RunReport:
    def check() -> None:
        if _is_withdrawn(home, report.withdrawals):
            raise _WithdrawnError

    path = _log_path(home, report.run_id)
    try:
        # Check consent before each attempt and after the last one. The user may withdraw it at any moment.
        api.upload_log(report.run_id, path.read_bytes(), check=check)
        check()
    except _WithdrawnError:
        return _withdraw(home, report)
    except RequestRefusedError as exc:
        if exc.problem == ProblemType.QUOTA_SPENT:
            return _save(home, replace(report, log_delivery=Delivery.FULL, reason=str(exc)[:500]))
        sent = _save(home, replace(report, log_delivery=Delivery.REFUSED, reason=str(exc)[:500]))
    else:
        sent = _save(home, replace(report, log_delivery=Delivery.SENT))
    path.unlink(missing_ok=True)
    return sent


def _send_deletion(home: Home, api: DeviceApi, report: RunReport) -> RunReport:
    try:
        api.delete_log(report.run_id)
    except RequestRefusedError as exc:
        # A log that the service does not have needs no deletion.
        if exc.status not in (404, 410):
            return _save(home, replace(report, reason=str(exc)[:500]))
    return _save(home, replace(report, log_delivery=Delivery.DELETED, reason=""))


def _log_path(home: Home, run_id: str) -> Path:
    return home.reports / f"{run_id}.log"


def _write_log(home: Home, run_id: str, log: bytes) -> None:
    if len(log) > MAX_LOG_BYTES:
        raise InputError(f"The log has {len(log)} bytes, but at most {MAX_LOG_BYTES} can be sent.")
    try:
        write_atomic(_log_path(home, run_id), log, mode=0o600)
    except OSError as exc:
        raise OperatorError(f"Cannot write {_log_path(home, run_id)}: {exc}") from exc


def _save(home: Home, report: RunReport) -> RunReport:
    write_record(home.reports / f"{report.run_id}.json", report)
    return report

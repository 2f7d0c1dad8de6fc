"""Reports to the service: kept on disk until they are delivered, each run once.

By default only metrics leave the device: the closed schema of `permille.schemas.runs`, numbers and enums. A
log is queued only where the user agreed to share it, on this device; withdrawing the consent removes every
log that waits. One file a run, `reports/<run_id>.json`, is queue entry and receipt in one; the log that waits
lies beside it.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from permille.errors import InputError, OperatorError
from permille.files import write_atomic
from permille.schemas.runs import MAX_LOG_BYTES, RunMetrics
from permille_agent.link.api import DeviceApi
from permille_agent.link.client import RequestRefusedError
from permille_agent.state.consent import is_withdrawn
from permille_agent.state.home import Home, read_state, write_state

RUN_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.ASCII)


class Delivery(StrEnum):
    """How far one part of a report has come."""

    NONE = "none"
    QUEUED = "queued"
    SENT = "sent"
    REFUSED = "refused"
    DELETION_WANTED = "deletion_wanted"
    DELETED = "deleted"


WAITING = frozenset({Delivery.QUEUED, Delivery.DELETION_WANTED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One run's report. `reason` says why the service refused it."""

    run_id: str
    metrics: dict[str, Any] | None
    metrics_delivery: Delivery
    log_delivery: Delivery
    reason: str = ""

    @property
    def waits(self) -> bool:
        """Whether something is to be told to the service."""
        return self.metrics_delivery in WAITING or self.log_delivery in WAITING


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    """What one `deliver` did: reports that are through, and those that the service refused."""

    sent: int
    refused: int


def enqueue(home: Home, run_id: str, metrics: RunMetrics, *, shared_log: bytes | None) -> Report:
    """Keep a report until it is delivered. The same run again changes nothing.

    Args:
        shared_log: the canonical log where, and only where, the user shares it.

    Raises:
        InputError: the run's id is no uuid or the log is larger than the service takes.
        OperatorError: the disk is full.
    """
    if RUN_ID.fullmatch(run_id) is None:
        raise InputError(f"expected a uuid as the run's id, got {run_id!r:.60}")
    if (known := read_report(home, run_id)) is not None:
        return known
    if shared_log is None:
        metrics = metrics.model_copy(update={"state_digest": None})
    else:
        _write_log(home, run_id, shared_log)
    report = Report(
        run_id=run_id,
        metrics=metrics.model_dump(mode="json"),
        metrics_delivery=Delivery.QUEUED,
        log_delivery=Delivery.NONE if shared_log is None else Delivery.QUEUED,
    )
    _save(home, report)
    return report


def queue_log(home: Home, report: Report, log: bytes) -> Report:
    """Have a log follow a report that went without it. The metrics stay as they were reported.

    Raises:
        InputError: the log is larger than the service takes.
        OperatorError: the disk is full.
    """
    _write_log(home, report.run_id, log)
    return _save(home, replace(report, log_delivery=Delivery.QUEUED))


def read_report(home: Home, run_id: str) -> Report | None:
    """One report, or None."""
    state = read_state(home.reports / f"{run_id}.json")
    if state is None:
        return None
    try:
        state["metrics_delivery"] = Delivery(state["metrics_delivery"])
        state["log_delivery"] = Delivery(state["log_delivery"])
        return Report(**state)
    except (TypeError, KeyError, ValueError) as exc:
        raise OperatorError(f"expected a report in {home.reports / run_id}.json: {exc}") from exc


def read_reports(home: Home) -> Iterator[Report]:
    """All reports and receipts, by run id."""
    for path in sorted(home.reports.glob("*.json")):
        if RUN_ID.fullmatch(path.stem) and (report := read_report(home, path.stem)) is not None:
            yield report


def deliver(home: Home, api: DeviceApi) -> Delivered:
    """Send everything that waits; what is sent is noted before the next begins.

    Raises:
        RetryableError, OperatorError: the service cannot be reached or refuses this device; the rest keeps
        waiting.
    """
    sent = refused = 0
    for report in read_reports(home):
        if not report.waits:
            continue
        done = _deliver_one(home, api, report)
        sent, refused = sent + (not done.reason), refused + bool(done.reason)
    return Delivered(sent=sent, refused=refused)


def withdraw_logs(home: Home) -> int:
    """Remove every log that waits to be sent, queued or still beside its run; returns how many there were.

    An upload that was cut off may have arrived although nothing here says so: where the service knows the
    run, it is asked to delete the log.
    """
    unqueued = list(home.runs.glob("*/shared.log"))
    for path in unqueued:
        path.unlink()
    queued = [report for report in read_reports(home) if report.log_delivery is Delivery.QUEUED]
    for report in queued:
        _withdraw(home, report)
    return len(queued) + len(unqueued)


def want_deletion(home: Home, run_id: str | None) -> int:
    """Ask, with the next `deliver`, for the deletion of one uploaded log, or of all; returns how many.

    Raises:
        InputError: no log of this run was uploaded.
    """
    uploaded = [
        r for r in read_reports(home) if r.log_delivery is Delivery.SENT and run_id in (None, r.run_id)
    ]
    if run_id is not None and not uploaded:
        raise InputError(f"expected a run whose log was uploaded, got {run_id!r:.60}")
    for report in uploaded:
        _save(home, replace(report, log_delivery=Delivery.DELETION_WANTED))
    return len(uploaded)


def _withdraw(home: Home, report: Report) -> Report:
    _log_path(home, report.run_id).unlink(missing_ok=True)
    metrics = None if report.metrics is None else {**report.metrics, "state_digest": None}
    known = report.metrics_delivery is Delivery.SENT
    log = Delivery.DELETION_WANTED if known else Delivery.NONE
    return _save(home, replace(report, log_delivery=log, metrics=metrics))


def _deliver_one(home: Home, api: DeviceApi, report: Report) -> Report:
    log = _log_path(home, report.run_id)
    if report.log_delivery is Delivery.QUEUED and (not log.is_file() or is_withdrawn(home, log)):
        report = _withdraw(home, report)
    if report.metrics_delivery is Delivery.QUEUED and report.metrics is not None:
        report = _send_metrics(home, api, report)
    if report.log_delivery is Delivery.QUEUED:
        report = _send_log(home, api, report)
    if report.log_delivery is Delivery.DELETION_WANTED:
        report = _send_deletion(home, api, report)
    return report


def _send_metrics(home: Home, api: DeviceApi, report: Report) -> Report:
    try:
        api.report_run(report.run_id, RunMetrics.model_validate_json(_json(report.metrics)))
        report = replace(report, metrics_delivery=Delivery.SENT)
    except (RequestRefusedError, ValueError) as exc:
        _log_path(home, report.run_id).unlink(missing_ok=True)
        log = Delivery.NONE if report.log_delivery is Delivery.QUEUED else report.log_delivery
        report = replace(report, metrics_delivery=Delivery.REFUSED, log_delivery=log, reason=str(exc)[:500])
    return _save(home, report)


def _send_log(home: Home, api: DeviceApi, report: Report) -> Report:
    path = _log_path(home, report.run_id)
    try:
        api.upload_log(report.run_id, path.read_bytes())
        report = replace(report, log_delivery=Delivery.SENT)
    except RequestRefusedError as exc:
        report = replace(report, log_delivery=Delivery.REFUSED, reason=str(exc)[:500])
    _save(home, report)
    path.unlink(missing_ok=True)
    return report


def _send_deletion(home: Home, api: DeviceApi, report: Report) -> Report:
    try:
        api.delete_log(report.run_id)
    except RequestRefusedError as exc:
        if exc.status not in (404, 410):
            return _save(home, replace(report, reason=str(exc)[:500]))
    return _save(home, replace(report, log_delivery=Delivery.DELETED))


def _json(metrics: dict[str, Any] | None) -> str:
    return json.dumps(metrics, allow_nan=False)


def _log_path(home: Home, run_id: str) -> Path:
    return home.reports / f"{run_id}.log"


def _write_log(home: Home, run_id: str, log: bytes) -> None:
    if len(log) > MAX_LOG_BYTES:
        raise InputError(f"expected a log of at most {MAX_LOG_BYTES} bytes, got {len(log)}")
    try:
        write_atomic(_log_path(home, run_id), log, mode=0o600)
    except OSError as exc:
        raise OperatorError(f"expected to write {_log_path(home, run_id)}: {exc}") from exc


def _save(home: Home, report: Report) -> Report:
    write_state(home.reports / f"{report.run_id}.json", asdict(report))
    return report

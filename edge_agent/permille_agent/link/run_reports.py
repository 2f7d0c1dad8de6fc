"""From finished runs to reports: what `outcome.json` of a run says goes into the queue, once, and never
twice.

A run that ended while nothing could queue it (a kill between the two) is found here the next time.
"""

from pydantic import ValidationError

from permille.errors import OperatorError
from permille.schemas.runs import RunMetrics
from permille_agent.link.report import Delivery, enqueue, queue_log, read_report
from permille_agent.state.consent import is_withdrawn
from permille_agent.state.home import Home
from permille_agent.training.personal import canonical_log
from permille_agent.training.run import RunFolder, find_run, list_runs


def collect_reports(home: Home) -> int:
    """Queue the reports of all runs that ended and are not reported yet; the caller holds the writers' lock.

    Raises:
        OperatorError: a run's outcome breaks the closed schema of metrics, or the disk is full.
    """
    return sum(_collect(home, run) for run in list_runs(home))


def share_log(home: Home, name: str) -> Delivery:
    """Queue the log of a run that was reported without it, by the user's word of now; the caller holds the
    writers' lock.

    Args:
        home: the home folder.
        name: folder name of the run.

    Returns:
        How far the log has come. `NONE`: the run has no log, or its report was refused or is not queued.

    Raises:
        OperatorError: there is no such run, or the disk is full.
        PackageError: the log is damaged.
        InputError: the log is larger than the service takes.
    """
    run = find_run(home, name)
    report = read_report(home, run.run_id)
    if report is None:
        return Delivery.NONE
    shareable = report.log_delivery in (Delivery.NONE, Delivery.DELETED)
    has_log = (run.load("decision") or {}).get("step", 0) > 0
    if shareable and has_log and report.metrics_delivery is not Delivery.REFUSED:
        report = queue_log(home, report, canonical_log(run))
    return report.log_delivery


def log_delivery(home: Home, run_id: str | None) -> Delivery:
    """How far the log of a run has come on its way to the service."""
    report = None if run_id is None else read_report(home, run_id)
    return Delivery.NONE if report is None else report.log_delivery


def _collect(home: Home, run: RunFolder) -> int:
    outcome = run.load("outcome")
    if outcome is None or outcome.get("metrics") is None:
        return 0
    run_id = run.run_id
    log = run.path / "shared.log"
    if read_report(home, run_id) is not None:
        log.unlink(missing_ok=True)
        return 0
    try:
        metrics = RunMetrics.model_validate(outcome["metrics"])
    except ValidationError as exc:
        fields = sorted({".".join(map(str, error["loc"])) for error in exc.errors(include_input=False)})
        raise OperatorError(
            f"expected metrics of the closed schema in {run.path}: {', '.join(fields)}"
        ) from exc
    shared = log.is_file() and not is_withdrawn(home, run.path / "run.json")
    enqueue(home, run_id, metrics, shared_log=log.read_bytes() if shared else None)
    log.unlink(missing_ok=True)
    return 1

"""From finished runs to reports: what `outcome.json` of a run says goes into the queue, once, and never
twice.

A run that ended while nothing could queue it (a kill between the two) is found here the next time.
"""

from pydantic import ValidationError

from edge_agent.consent import is_withdrawn
from edge_agent.home import Home
from edge_agent.report import enqueue, read_report
from edge_agent.run_folder import RunFolder, list_runs
from permille.errors import OperatorError
from permille.schemas.runs import RunMetrics


def collect_reports(home: Home) -> int:
    """Queue the reports of all runs that ended and are not reported yet; the caller holds the writers' lock.

    Raises:
        OperatorError: a run's outcome breaks the closed schema of metrics, or the disk is full.
    """
    return sum(_collect(home, run) for run in list_runs(home))


def _collect(home: Home, run: RunFolder) -> int:
    outcome = run.load("outcome")
    if outcome is None or outcome.get("metrics") is None:
        return 0
    run_id = str(run.require("run")["run_id"])
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

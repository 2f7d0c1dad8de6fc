"""What `permille-agent status` shows: all that the agent knows, read from its home without a network."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from permille_agent.daemon.state import read_daemon_state
from permille_agent.link.enrolment import load_enrolment
from permille_agent.link.report import read_reports
from permille_agent.state.activation import active_model
from permille_agent.state.consent import shares_log
from permille_agent.state.home import Home
from permille_agent.state.references import read_references
from permille_agent.state.releases import installed_release
from permille_agent.training.run import list_runs


def read_status(home: Home) -> dict[str, Any]:
    """The status as one JSON document; null where there is nothing yet."""
    return {
        "home": str(home.root),
        "enrolment": _enrolment(home),
        "release": _release(home),
        "active": _active(home),
        "data": [str(path) for path in read_references(home)],
        "share_log": shares_log(home),
        "last_run": _last_run(home),
        "reports": _reports(home),
        "daemon": _daemon(home),
    }


def render_status(console: Console, status: Mapping[str, Any]) -> None:
    """The status as a table of a terminal."""
    table = Table(title="permille-agent", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for row in _rows(status):
        table.add_row(row[0], Text(row[1]))
    console.print(table)


def _enrolment(home: Home) -> dict[str, Any] | None:
    enrolment = load_enrolment(home)
    return None if enrolment is None else enrolment.document()


def _release(home: Home) -> dict[str, Any] | None:
    release = installed_release(home)
    if release is None:
        return None
    return {"name": release.name, "version": release.version, "package": release.manifest_digest}


def _active(home: Home) -> dict[str, Any] | None:
    active = active_model(home)
    if active is None:
        return None
    return {"package": active.package, "run": active.run, "personal": active.run is not None}


def _last_run(home: Home) -> dict[str, Any] | None:
    runs = list_runs(home)
    if not runs:
        return None
    outcome = runs[-1].load("outcome")
    run_id = runs[-1].run_id
    if outcome is None:
        return {"run": runs[-1].name, "run_id": run_id, "outcome": "unfinished", "metrics": None}
    metrics = outcome.get("metrics") or {}
    return {"run": runs[-1].name, "run_id": run_id, "outcome": metrics.get("outcome"), "metrics": metrics}


def _reports(home: Home) -> dict[str, Any]:
    reports = list(read_reports(home))
    return {
        "pending": sum(report.waits for report in reports),
        "refused": [{"run_id": r.run_id, "reason": r.reason} for r in reports if r.reason],
        "uploaded_logs": [r.run_id for r in reports if r.log_delivery == "sent"],
    }


def _daemon(home: Home) -> dict[str, Any]:
    state = read_daemon_state(home)
    return {
        "last_poll": state.last_poll or None,
        "minutes_used_today": round(state.seconds_used / 60.0, 1),
        "waiting_for": list(state.waiting_for),
        "last_outcome": state.last_outcome or None,
        "poll_error": state.poll_error or None,
        "training_error": state.training_error or None,
    }


def _rows(status: Mapping[str, Any]) -> list[tuple[str, str]]:
    enrolment, release, active = status["enrolment"], status["release"], status["active"]
    run, daemon = status["last_run"], status["daemon"]
    rows = [
        ("home", status["home"]),
        ("enrolled", f"{enrolment['server']} as {enrolment['name']}" if enrolment else "no"),
        ("follows", f"{enrolment['release']} ({enrolment['alias']})" if enrolment else "-"),
        ("installed", f"version {release['version']}, {release['package']}" if release else "nothing yet"),
        ("active", _active_words(active)),
        ("data", "\n".join(status["data"]) or "no files added"),
        ("last run", _run_words(run)),
        ("reports", f"{status['reports']['pending']} waiting, {len(status['reports']['refused'])} refused"),
        ("shares logs", "yes" if status["share_log"] else "no"),
        ("daemon", f"last poll {daemon['last_poll'] or 'never'}"),
    ]
    rows += [("waits because", "; ".join(daemon["waiting_for"]))] if daemon["waiting_for"] else []
    errors = [("poll failed", daemon["poll_error"]), ("training failed", daemon["training_error"])]
    return rows + [(name, error) for name, error in errors if error]


def _active_words(active: Mapping[str, Any] | None) -> str:
    if active is None:
        return "nothing yet"
    return f"personal, run {active['run']}" if active["personal"] else "the base model"


def _run_words(run: Mapping[str, Any] | None) -> str:
    if run is None:
        return "none yet"
    metrics = run["metrics"] or {}
    base, personal = metrics.get("loss_base"), metrics.get("loss_personal")
    losses = f", loss {base:.3f} -> {personal:.3f}" if base is not None and personal is not None else ""
    return f"{run['outcome']}{losses}"

"""Output of `permille-agent status`, read from the home folder without network access."""

from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.table import Table
from rich.text import Text

from permille.errors import PermilleError
from permille.training.strength import EIGHTHS
from permille_agent.daemon.state import DaemonState, read_daemon_state
from permille_agent.link.enrolment import load_enrolment
from permille_agent.link.extension import agent_extensions
from permille_agent.link.report import RUN_ID, Delivery, read_report
from permille_agent.state.choices import Consent, read_consent, read_references
from permille_agent.state.home import Home, as_json, path_of
from permille_agent.state.models import (
    active_model,
    installed_release,
    read_manifest,
)
from permille_agent.training.decision import Decision
from permille_agent.training.evaluation import strength_words
from permille_agent.training.outcome import RunOutcome, TextSource, outcome_words
from permille_agent.training.progress import read_progress
from permille_agent.training.run import BegunRun, RunFolder, list_runs

Found = TypeVar("Found")


class Status:
    """State of a home folder. For example, `Status(home).document()["active"]` is the model in use.

    An attribute is None or empty if its file does not exist or is damaged. `damaged` lists the damaged files,
    so that one damaged file does not hide the state in the others.
    """

    def __init__(self, home: Home) -> None:
        # The keys are error messages. A message is kept once, even if several attributes need the file.
        self.home, self._damaged = home, dict[str, None]()
        runs = list_runs(home)
        self.run = run = runs[-1] if runs else None
        self.enrolment = self._read(lambda: load_enrolment(home), None)
        self.release = release = self._read(lambda: installed_release(home), None)
        self.active = active = self._read(lambda: active_model(home), None)
        self.active_trains = self._trains(active.package if active else None)
        in_use = RunFolder(home.runs / active.run) if active and active.run else None
        self.active_decision = self._read(lambda: in_use.load("decision", Decision) if in_use else None, None)
        # A memory is erased together with its text.
        self.has_memory = in_use is not None and in_use.memory.exists()
        chosen = self.active_decision
        self.lost_memory = chosen is not None and chosen.part.has_memory and not self.has_memory
        self.active_outcome = self._read(lambda: in_use.load("outcome", RunOutcome) if in_use else None, None)
        self.trains = self._trains(release.manifest_digest if release else None)
        self.data: tuple[Path, ...] = self._read(lambda: read_references(home), ())
        self.consent = self._read(lambda: read_consent(home), Consent())
        self.progress = read_progress(home)
        self.run_id = self._read(lambda: run.run_id if run else None, None)
        begun = self._read(lambda: run.require("run", BegunRun) if run else None, None)
        self.learn = begun.definition.options.learn if begun else None
        text = self._read(lambda: run.load("data", TextSource) if run else None, None)
        self.text = tuple(map(path_of, text.paths)) if text else ()
        self.outcome = self._read(lambda: run.load("outcome", RunOutcome) if run else None, None)
        self.decision = self._read(lambda: run.load("decision", Decision) if run else None, None)
        # Read the reports one by one. `read_reports` would stop at the first damaged report.
        names = sorted(path.stem for path in home.reports.glob("*.json") if RUN_ID.fullmatch(path.stem))
        reports = [self._read(partial(read_report, home, name), None) for name in names]
        self.reports = [report for report in reports if report is not None]
        self.lines = [(one, self._read(partial(one.status, home), None)) for one in agent_extensions()]
        self._damaged |= {what: None for _, line in self.lines if line for what in line.damaged}
        self.daemon = self._read(lambda: read_daemon_state(home), DaemonState())

    @property
    def damaged(self) -> list[str]:
        """Errors of the damaged files, without duplicates."""
        return list(self._damaged)

    def _read(self, part: Callable[[], Found], otherwise: Found) -> Found:
        """Call `part`. If its file is damaged, note the error and return `otherwise`."""
        try:
            return part()
        except PermilleError as exc:
            self._damaged[str(exc)] = None
            return otherwise

    def _trains(self, package: str | None) -> str:
        return self._read(lambda: read_manifest(self.home, package).trains if package else "", "")

    def document(self) -> dict[str, object]:
        """Return the status as one JSON document."""
        release, active, daemon = self.release, self.active, self.daemon
        chosen, decision = self.active_decision, self.decision
        # All keys are always present. A value that does not exist yet is null.
        return {
            "home": str(self.home.root),
            "enrolment": self.enrolment.document() if self.enrolment else None,
            "release": release
            and {
                "name": release.name,
                "version": release.version,
                "package": release.manifest_digest,
                "trains": self.trains,
            },
            "active": active
            and {
                "package": active.package,
                "run": active.run,
                "personal": active.run is not None,
                "trains": self.active_trains,
                "part": chosen and chosen.part.value,
                "has_memory": self.has_memory,
                "tested": chosen and chosen.number > 0,
                "metrics": self.active_outcome and as_json(self.active_outcome.metrics),
            },
            "data": [str(path) for path in self.data],
            "share_log": self.consent.share_log,
            "share_state": self.consent.share_state,
            "training": self.progress and as_json(self.progress),
            "last_run": self.run
            and {
                "run": self.run.name,
                "run_id": self.run_id,
                "outcome": self.outcome.metrics.outcome.value if self.outcome else "unfinished",
                "learn": self.learn and self.learn.value,
                "text": self.outcome and self.outcome.data.summary(),
                "paths": [str(path) for path in self.text],
                # Those of the chosen model. The metrics of a report have the loss of the state alone.
                "loss_base": decision and decision.loss_base,
                "loss_personal": decision and decision.loss_personal,
                "metrics": self.outcome and as_json(self.outcome.metrics),
            },
            "reports": {
                "pending": self._pending(),
                "refused": [{"run_id": r.run_id, "reason": r.reason} for r in self.reports if r.reason],
                "uploaded_logs": [r.run_id for r in self.reports if r.log_delivery is Delivery.SENT],
            },
            **{one.name: line and line.document for one, line in self.lines},
            "daemon": {
                "last_poll": daemon.last_poll or None,
                "minutes_used_today": round(daemon.minutes_used(datetime.now().astimezone().date()), 1),
                "waiting_for": list(daemon.waiting_for),
                "last_outcome": daemon.last_outcome or None,
                "poll_error": daemon.poll_error or None,
                "training_error": daemon.training_error or None,
            },
            "damaged": self.damaged,
        }

    def render(self, console: Console) -> None:
        """Print the status as a table."""
        table = Table(title="permille-agent", show_header=False, title_justify="left")
        table.add_column(style="bold")
        table.add_column(overflow="fold")
        for name, words in self._rows():
            table.add_row(name, Text(words))
        console.print(table)

    def _rows(self) -> list[tuple[str, str]]:
        enrolment, release, daemon = self.enrolment, self.release, self.daemon
        # Remove the path at the beginning of a reason. It contains the run's id, so all reasons would differ.
        refused = [one.reason.partition(": ")[2] or one.reason for one in self.reports if one.reason]
        rows = [
            ("home", str(self.home.root)),
            ("enrolled", f"{enrolment.server} as {enrolment.name}" if enrolment else "no"),
            ("follows", f"{enrolment.release} ({enrolment.alias})" if enrolment else "-"),
            (
                "installed",
                f"version {release.version}, {release.manifest_digest}" if release else "nothing yet",
            ),
            ("active", self._active_words()),
            ("trains", self.trains),
            ("data", "\n".join(map(str, self.data)) or "no files added"),
            ("training", self.progress.line() if self.progress else ""),
            ("last run", self._run_words()),
            ("its strength", self._strength_words()),
            ("its text", "\n".join(map(str, self.text))),
            ("learns", f"of conversations: {self.learn.value}" if self.learn else ""),
            ("reports", f"{self._pending()} waiting, {len(refused)} refused" if enrolment else ""),
            ("refused because", "\n".join(dict.fromkeys(refused))),  # each reason once, in order
            *((one.title, line.words if line else "") for one, line in self.lines),
            ("shares logs", "yes" if self.consent.share_log else "no"),
            ("shares states", "yes" if self.consent.share_state else "no"),
            (
                "daemon",
                f"last contacted the service at {daemon.last_poll}" if daemon.last_poll else "has not run",
            ),
            ("waits because", "; ".join(daemon.waiting_for)),
            ("poll failed", daemon.poll_error),
            ("training failed", daemon.training_error),
            ("damaged", "\n".join(self.damaged)),
        ]
        return [(name, words) for name, words in rows if words]

    def _pending(self) -> int:
        return sum(report.waits for report in self.reports)

    def _active_words(self) -> str:
        if self.active is None:
            return "nothing yet"
        if self.active.run:
            words, chosen = f"personal, run {self.active.run}", self.active_decision
            if chosen is None:
                return words
            words += f": {chosen.part.words}{'' if chosen.number else ', untested'}"
            return words + ", but the memory was erased" * self.lost_memory
        return "the base model"

    def _run_words(self) -> str:
        if self.run is None:
            return "none yet"
        metrics = self.outcome.metrics if self.outcome else None
        if metrics is None:
            # `progress` exists only while a process trains: a run, or a round.
            return "unfinished" if self.progress else "unfinished: the same `train` command resumes it"
        words, decision = outcome_words(metrics.outcome, self.decision), self.decision
        if decision is not None and decision.adopted and not decision.number:
            return f"{words}, untested"
        if decision is None or decision.loss_base is None or decision.loss_personal is None:
            return words
        words = f"{words}, loss {decision.loss_base:.4f} -> {decision.loss_personal:.4f}"
        # Only a text that is long enough for three splits has a select split.
        return words if metrics.select_tokens else f"{words} (little text, judged part by part)"

    def _strength_words(self) -> str:
        """Say how much of the trained state is kept with the memory off, unless all of it is."""
        decision = self.decision
        if decision is None or not decision.part.has_state or decision.strength == EIGHTHS:
            return ""
        off = "with the memory off, " if decision.part.has_memory else ""
        return f"{off}{strength_words(decision.strength, decision.fault)}"

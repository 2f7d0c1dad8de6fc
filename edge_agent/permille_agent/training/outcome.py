"""End of a run: its durable outcome, the metrics of its report, and the caller's result.

The metrics are the only thing that leaves the device by default: numbers and closed sets.
"""

import platform
import sys
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from permille.files import write_atomic
from permille.schemas.runs import (
    Accelerator,
    EngineName,
    LogForm,
    Machine,
    OperatingSystem,
    Outcome,
    RunMetrics,
)
from permille.version import __version__
from permille_agent.state.models import InstalledRelease
from permille_agent.text.preparation import Prepared, Split
from permille_agent.text.reading import DataReport
from permille_agent.training.decision import Decision
from permille_agent.training.engines import EngineUsed
from permille_agent.training.options import RunContext, TrainOptions
from permille_agent.training.personal import shareable
from permille_agent.training.plan import Plan
from permille_agent.training.run import Run, RunFolder
from permille_agent.training.steps import SelectedState

_SYSTEMS = {
    "Linux": OperatingSystem.LINUX,
    "Darwin": OperatingSystem.DARWIN,
    "Windows": OperatingSystem.WINDOWS,
}
_MACHINES = {
    "x86_64": Machine.X86_64,
    "AMD64": Machine.X86_64,
    "aarch64": Machine.AARCH64,
    "arm64": Machine.AARCH64,
    "armv7l": Machine.ARMV7,
    "riscv64": Machine.RISCV64,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSource:
    """Contents of a run's `data.json`: the sources of its text, and examples of skipped rows."""

    paths: tuple[Path, ...] = ()
    bad_rows: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """Contents of `outcome.json`: a message for the user, the report's metrics, counts of the data."""

    message: str
    metrics: RunMetrics
    data: DataReport
    engine: EngineUsed | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """Result of a run, for the caller. Phases that did not happen are None.

    Attributes:
        run: folder name of the run.
        run_id: by which the service knows the run, once it is reported.
        known: the run had ended before; nothing was computed.
        bad_row_examples: rows that were left out, by file and line.
    """

    run: str
    run_id: str
    outcome: Outcome
    message: str
    known: bool = False
    plan: Plan | None = None
    decision: Decision | None = None
    metrics: RunMetrics | None = None
    data: DataReport | None = None
    engine: EngineUsed | None = None
    bad_row_examples: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFacts:
    """Metrics of the steps up to the selected state.

    Attributes:
        personal_bytes: of its log, of a gradient run of its packed state.
        state_digest: of what it leads to, only where that is shared.
        scaled_digest: the same at the strength that was judged, where that is not full.
    """

    rejected_steps: int = 0
    tokens_trained: int = 0
    learning_rate: float = 0.0
    step_unit_exponent: int = 0
    personal_bytes: int = 0
    state_digest: str | None = None
    scaled_digest: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Inputs of the metrics. Phases that did not happen are None."""

    release: InstalledRelease
    options: TrainOptions
    k: int
    outcome: Outcome
    began_at: datetime
    ended_at: datetime
    seconds: float = 0.0
    prepared: Prepared | None = None
    plan: Plan | None = None
    decision: Decision | None = None
    log: LogFacts = LogFacts()
    engine: EngineUsed | None = None


def run_outcome(facts: RunFacts, message: str, report: DataReport) -> RunOutcome:
    """Put the end of a run together. Examples of rows name the user's files, so they stay out of it."""
    return RunOutcome(
        message=message,
        metrics=run_metrics(facts),
        data=replace(report, examples=[]),
        engine=facts.engine,
    )


def result_of(folder: RunFolder, end: RunOutcome, *, known: bool) -> RunResult:
    """Tell the end of a run with all that is durable of it."""
    return RunResult(
        run=folder.name,
        run_id=folder.run_id,
        outcome=end.metrics.outcome,
        message=end.message,
        known=known,
        plan=folder.load("plan", Plan),
        decision=folder.load("decision", Decision),
        metrics=end.metrics,
        data=end.data,
        engine=end.engine,
        bad_row_examples=(folder.load("data", TextSource) or TextSource()).bad_rows,
    )


def outcome_words(outcome: Outcome, decision: Decision | None) -> str:
    """Say what became of the model that was in use."""
    current = "the base model"
    if decision and (decision.incumbent.run or decision.pooled):
        current = "the pooled model" if decision.pooled else "your current model"
    match outcome:
        case Outcome.ADOPTED:
            return "adopted your new model"
        case Outcome.KEPT_BASE:
            return f"kept {current}"
        case Outcome.REFUSED_DATA:
            return "refused the text"
        case Outcome.FAILED:
            return f"training failed, kept {current}"
    return str(outcome)


def lay_out_log(run: Run, selected: SelectedState, decision: Decision, context: RunContext) -> LogFacts:
    """Measure the log or state of a run. What the user shares of it is put beside the outcome."""
    data, shared = b"", False
    if selected.step:
        form = LogForm.LOG if run.options.has_log else LogForm.STATE
        data = shareable(run.folder, form)
        if context.share_state and not (context.share_log and run.options.has_log):
            form = LogForm.STATE
        shared = context.share_log if form is LogForm.LOG else context.share_state
        if shared:
            write_atomic(run.folder.path / "shared.log", shareable(run.folder, form), mode=0o600)
    return LogFacts(
        rejected_steps=selected.rejected,
        tokens_trained=run.batches.tokens(selected.steps),
        learning_rate=selected.header.learning_rate,
        step_unit_exponent=selected.header.step_unit_exponent,
        personal_bytes=len(data),
        state_digest=decision.state_digest if shared else None,
        scaled_digest=decision.scaled_digest if shared else None,
    )


def run_metrics(facts: RunFacts) -> RunMetrics:
    """Make the report of one run."""
    counts = dict.fromkeys(Split, 0)
    if facts.prepared is not None:
        counts = {split: number.tokens for split, number in facts.prepared.counts.items()}
    decision, log = facts.decision, facts.log
    against_base = decision.against_base if decision else None
    general = decision.general if decision else None
    device = facts.engine.device.partition(":")[0] if facts.engine else "cpu"
    return RunMetrics(
        package_digest=facts.release.manifest_digest,
        release=facts.release.name,
        version=facts.release.version,
        outcome=facts.outcome,
        began_at=facts.began_at,
        ended_at=facts.ended_at,
        steps=decision.steps if decision else 0,
        rejected_steps=log.rejected_steps,
        queries=facts.options.queries,
        method=facts.options.method,
        estimator=facts.options.estimator,
        seconds=facts.seconds,
        tokens_trained=log.tokens_trained,
        train_tokens=counts[Split.TRAIN],
        select_tokens=counts[Split.SELECT],
        test_tokens=counts[Split.TEST],
        loss_base=decision.loss_base if decision else None,
        loss_personal=decision.loss_personal if decision else None,
        improvement_low=against_base.low if against_base else None,
        improvement_high=against_base.high if against_base else None,
        learning_rate=log.learning_rate,
        epsilon=facts.plan.epsilon if facts.plan and facts.options.has_log else 0.0,
        step_unit_exponent=log.step_unit_exponent,
        k=facts.k,
        peak_rss_bytes=peak_rss_bytes(),
        personal_bytes=log.personal_bytes,
        state_digest=log.state_digest,
        general_loss_base=general.loss_base if general else None,
        general_loss_personal=general.loss if general else None,
        strength=general.strength if general else None,
        scaled_digest=log.scaled_digest,
        agent_version=__version__,
        engine=EngineName(facts.engine.name) if facts.engine else EngineName.LIGHT,
        operating_system=_SYSTEMS.get(platform.system(), OperatingSystem.OTHER),
        machine=_MACHINES.get(platform.machine(), Machine.OTHER),
        accelerator=Accelerator(device) if device in set(Accelerator) else Accelerator.OTHER,
    )


def peak_rss_bytes() -> int:
    """Read the most memory that this process has had resident."""
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024

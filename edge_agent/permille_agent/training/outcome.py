"""End of a run: its durable outcome, the metrics of its report, and the result for the caller.

By default only the metrics leave the device. They are numbers, times, members of enums, digests, versions and
the name of the release.
"""

import platform
from dataclasses import dataclass, replace
from datetime import datetime

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
from permille.system import peak_rss_bytes
from permille.version import __version__
from permille_agent.state.models import InstalledRelease
from permille_agent.text.preparation import Prepared, Split
from permille_agent.text.report import DataReport
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
}
_MACHINES = {
    "x86_64": Machine.X86_64,
    "aarch64": Machine.AARCH64,
    "arm64": Machine.AARCH64,
    "armv7l": Machine.ARMV7,
    "riscv64": Machine.RISCV64,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSource:
    """Contents of a run's `data.json`: the sources of its text, and examples of skipped rows.

    `stored_path` writes the paths.
    """

    paths: tuple[str, ...] = ()
    bad_rows: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """Contents of `outcome.json`: a message for the user, the report's metrics, and counts of the data."""

    message: str
    metrics: RunMetrics
    data: DataReport
    engine: EngineUsed | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """Result of a run for the caller. Fields of skipped phases are None.

    For example, `result.outcome` is "adopted" if the personal model is in use now.

    Attributes:
        run: folder name of the run.
        run_id: id of the run in its report.
        known: whether the run had already ended, so that nothing was computed.
        bad_row_examples: skipped rows, by file and line.
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
    """Metrics of the selected state and of its descent.

    Attributes:
        personal_bytes: size of the log, or of a gradient run's packed state.
        state_digest: digest of the state at full strength, if the log or state is shared.
        scaled_digest: digest of the scaled state, if the log or state is shared and the strength is not full.
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
    """Inputs of the metrics. Fields of skipped phases are None."""

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
    """Return the outcome of a run. Examples of skipped rows are left out, as they name the user's files."""
    return RunOutcome(
        message=message,
        metrics=run_metrics(facts),
        data=replace(report, examples=[]),
        engine=facts.engine,
    )


def result_of(folder: RunFolder, end: RunOutcome, *, known: bool) -> RunResult:
    """Return the result of a finished run, with all its durable records."""
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
    """Describe the outcome for the user.

    Example:
        >>> outcome_words(Outcome.KEPT_BASE, None)
        'kept the base model'
    """
    current = "your current model" if decision and decision.incumbent.run else "the base model"
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
    """Return the metrics of a run's log or state. If the user shares the log or state, write `shared.log`."""
    data, shared, blobs = b"", False, run.package.blobs
    if selected.step:
        form = LogForm.LOG if run.options.has_log else LogForm.STATE
        data = shareable(run.folder, form, blobs)
        if context.share_state and not (context.share_log and run.options.has_log):
            form = LogForm.STATE
        shared = context.share_log if form is LogForm.LOG else context.share_state
        if shared:
            write_atomic(run.folder.path / "shared.log", shareable(run.folder, form, blobs), mode=0o600)
    return LogFacts(
        rejected_steps=selected.rejected,
        tokens_trained=run.batches.tokens(selected.steps),
        learning_rate=selected.header.learning_rate,
        step_unit_exponent=selected.header.step_unit_exponent,
        personal_bytes=len(data),
        # Without a shared log, a digest would still let the service recognise equal states.
        state_digest=decision.state_digest if shared else None,
        scaled_digest=decision.scaled_digest if shared else None,
    )


def run_metrics(facts: RunFacts) -> RunMetrics:
    """Return the metrics of a run for its report."""
    counts = dict.fromkeys(Split, 0)
    if facts.prepared is not None:
        counts = {split: number.tokens for split, number in facts.prepared.counts.items()}
    decision, log = facts.decision, facts.log
    # A server cannot use a memory, so a report has the losses of the state alone.
    against_base = decision.state_against_base if decision else None
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
        loss_personal=decision.loss_state if decision else None,
        improvement_low=against_base.low if against_base else None,
        improvement_high=against_base.high if against_base else None,
        learning_rate=log.learning_rate,
        # The plan of a gradient run has only a placeholder for epsilon.
        epsilon=facts.plan.epsilon if facts.plan and facts.options.has_log else 0.0,
        step_unit_exponent=log.step_unit_exponent,
        k=facts.k,
        peak_rss_bytes=peak_rss_bytes(),
        personal_bytes=log.personal_bytes,
        state_digest=log.state_digest,
        general_loss_base=general.loss_base if general else None,
        general_loss_personal=general.loss if general else None,
        strength=decision.strength if decision and (general or decision.answers) else None,
        scaled_digest=log.scaled_digest,
        agent_version=__version__,
        engine=EngineName(facts.engine.name) if facts.engine else EngineName.LIGHT,
        operating_system=_SYSTEMS.get(platform.system(), OperatingSystem.OTHER),
        machine=_MACHINES.get(platform.machine(), Machine.OTHER),
        accelerator=Accelerator(device) if device in set(Accelerator) else Accelerator.OTHER,
    )

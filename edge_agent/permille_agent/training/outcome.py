"""How a run ended: what the caller is told, and what of its log is measured or laid out for upload."""

from dataclasses import dataclass

from permille.files import write_atomic
from permille.schemas.runs import Outcome
from permille.zo.journal import read_journal
from permille.zo.records import StepFlag
from permille_agent.training.personal import canonical_log
from permille_agent.training.run import Json, RunFolder
from permille_agent.training.setup import Setup
from permille_agent.training.steps import Chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """How a run ended.

    Attributes:
        run: folder name of the run; None where it never began.
        run_id: by which the service knows the run, once it is reported.
        outcome: as it is reported.
        message: for the user.
        known: the run had ended before; nothing was computed.
        details: decision, plan and metrics as JSON.
    """

    run: str | None
    run_id: str | None
    outcome: Outcome
    message: str
    known: bool = False
    details: Json


def result_of(run: RunFolder, end: Json, *, known: bool) -> RunResult:
    """The result of a run from its durable outcome `end`."""
    details = {
        "decision": run.load("decision"),
        "plan": run.load("plan"),
        "bad_row_examples": (run.load("data") or {}).get("bad_rows", []),
        **end,
    }
    outcome = Outcome(end["metrics"]["outcome"])
    return RunResult(
        run=run.name,
        run_id=run.run_id,
        outcome=outcome,
        message=end["message"],
        known=known,
        details=details,
    )


def log_facts(run: RunFolder, setup: Setup, decision: Json, chosen: Chosen, share_log: bool) -> Json:
    """What the metrics say of the log. Where the user shares it, it is laid out beside the outcome."""
    records = read_journal(run.journal(chosen.attempt)).records
    log = canonical_log(run)
    shared = share_log and chosen.step > 0
    if shared:
        write_atomic(run.path / "shared.log", log, mode=0o600)
    return {
        "rejected_steps": sum(StepFlag.REJECTED in record.flags for record in records),
        "tokens_trained": setup.batches.tokens(chosen.steps),
        "learning_rate": chosen.header.learning_rate,
        "step_unit_exponent": chosen.header.step_unit_exponent,
        "log_bytes": len(log),
        "shared_state_digest": decision["state_digest"] if shared else None,
    }

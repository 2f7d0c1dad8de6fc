"""Logs that an earlier version refused without a verdict, or left pending for ever, become undecided."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision: str | None = "0004"
branch_labels: str | None = None
depends_on: str | None = None

_runs = sa.table(
    "runs",
    sa.column("log_state", sa.String),
    sa.column("log_reason", sa.Text),
    sa.column("log_job_id", sa.String),
)
_jobs = sa.table("jobs", sa.column("id", sa.String), sa.column("state", sa.String))
_UNREPLAYED = "replay-failed:"
_CANCELLED = "replay-cancelled"


def upgrade() -> None:
    """Change rows only: without a verdict a log is undecided, pending where its job is to run again."""
    unreplayed = (_runs.c.log_state == "refused") & _runs.c.log_reason.startswith(_UNREPLAYED)
    _set(unreplayed & _job_is("queued", "running"), "pending", None)
    _set(unreplayed, "undecided", _runs.c.log_reason)
    pending = _runs.c.log_state == "pending"
    _set(pending & _job_is("cancelled"), "undecided", _CANCELLED)
    for state in ("failed", "dead"):
        _set(pending & _job_is(state), "undecided", f"{_UNREPLAYED} {state}")


def downgrade() -> None:
    """Undecided is refused or pending again, by its reason, as the earlier version has it."""
    undecided = _runs.c.log_state == "undecided"
    _set(undecided & (_runs.c.log_reason == _CANCELLED), "pending", None)
    _set(undecided, "refused", _runs.c.log_reason)


def _job_is(*states: str) -> sa.ColumnElement[bool]:
    return _runs.c.log_job_id.in_(sa.select(_jobs.c.id).where(_jobs.c.state.in_(states)))


def _set(rows: sa.ColumnElement[bool], state: str, reason: object) -> None:
    op.execute(_runs.update().where(rows).values(log_state=state, log_reason=reason))

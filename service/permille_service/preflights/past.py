"""Estimate of a job's time, from past jobs of its kind on this machine."""

from collections.abc import Callable
from datetime import datetime
from statistics import median
from typing import Final

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from permille.errors import InputError
from permille.schemas.fields import Closed
from permille.schemas.jobs import JobKind, JobState
from permille.schemas.kinds import parse_request
from permille.store.tables import Job
from permille_service.problems import ApiError

COUNTED: Final = 5
_LOOKED_AT: Final = 20
# Of the start of a process and the reading of files, which no estimate knows. It keeps a small job, which is
# little else, from telling that a large one takes ten times its estimate.
_FIXED_S: Final = 30.0

Estimate = Callable[[Closed], float]


def forecast_s(
    session: Session, *, tenant_id: str, kind: JobKind, estimated_s: float, estimate: Estimate
) -> tuple[float, int]:
    """Return the seconds of a job of a kind, and how many past jobs they are from.

    Each of the newest that succeeded took some multiple of its own estimate. The median multiple of them is
    that of the new job; without any, its estimate stays.

    Args:
        estimate: the seconds that the same estimate gives of a past request. It may refuse one whose parts
            are gone, which then does not count.
    """
    newest = (
        select(Job)
        .where(Job.tenant_id == tenant_id, Job.kind == kind.value, Job.state == JobState.SUCCEEDED.value)
        .order_by(Job.id.desc())
        .limit(_LOOKED_AT)
    )
    found: list[float] = []
    for job in session.scalars(newest):
        if len(found) == COUNTED:
            break
        try:
            past_s = estimate(parse_request(job.kind, job.payload))
        except (ApiError, InputError):
            continue
        if (took_s := _took_s(session, job)) is not None:
            found.append(took_s / (past_s + _FIXED_S))
    if not found:
        return estimated_s, 0
    return median(found) * (estimated_s + _FIXED_S), len(found)


def _took_s(session: Session, job: Job) -> float | None:
    """Seconds from the start of a job, or of its first part, to its end.

    The row of a job that was split knows the start of its last attempt alone.
    """
    first: datetime | None = session.scalar(select(func.min(Job.started_at)).where(Job.parent_id == job.id))
    started = min(filter(None, (first, job.started_at)), default=None)
    if started is None or job.ended_at is None:
        return None
    return (job.ended_at - started).total_seconds()

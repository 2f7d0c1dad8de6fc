"""Counts over all tenants, for monitoring. They name no tenant and no device."""

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import func, select, text, union_all
from sqlalchemy.orm import Session

from permille.schemas.jobs import JobKind
from permille.store.database import now
from permille.store.jobs import transitions
from permille.store.tables import UNSUCCESSFUL, ArtifactBlob, BlobCollection, Device, Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Figures for one scrape of the metrics.

    Attributes:
        jobs: the number of jobs by kind and state. Jobs that have succeeded are not counted, since
            they are many.
        waiting_s: for each kind with a queued job, the seconds since the job that waits longest could
            have begun.
        blob_bytes: the bytes of all distinct blobs of artifacts.
        unreferenced_bytes: the bytes of blobs to which no row refers and which the last collection did
            not delete yet, or None before the first collection.
        collected_at: the end of the last collection, or None.
        devices: the number of enrolled devices by release and alias.
    """

    jobs: dict[tuple[str, str], int]
    waiting_s: dict[str, float]
    blob_bytes: int
    unreferenced_bytes: int | None
    collected_at: datetime | None
    devices: dict[tuple[str, str], int]


def read_figures(session: Session) -> Figures:
    """Read all figures."""
    at = now(session)
    by_state = [
        select(Job.kind, Job.state, func.count()).where(condition).group_by(Job.kind, Job.state)
        for condition in (transitions.IS_QUEUED, transitions.IS_RUNNING, text(UNSUCCESSFUL))
    ]
    oldest = session.execute(
        select(Job.kind, func.min(Job.available_at))
        # A build never waits for a worker.
        .where(transitions.IS_QUEUED, Job.kind != JobKind.BUILD.value, Job.available_at <= at)
        .group_by(Job.kind)
    )
    # Several artifacts may share a blob, which is stored once.
    distinct = select(ArtifactBlob.digest, func.max(ArtifactBlob.size_bytes).label("size_bytes"))
    sizes = distinct.group_by(ArtifactBlob.digest).subquery()
    devices = session.execute(
        select(Device.release, Device.alias, func.count())
        .where(Device.revoked_at.is_(None), Device.unenrolled_at.is_(None))
        .group_by(Device.release, Device.alias)
    )
    collected = session.scalar(select(BlobCollection).limit(1))
    return Figures(
        jobs={(kind, state): count for kind, state, count in session.execute(union_all(*by_state))},
        waiting_s={kind: (at - first).total_seconds() for kind, first in oldest},
        blob_bytes=int(session.scalar(select(func.coalesce(func.sum(sizes.c.size_bytes), 0))) or 0),
        unreferenced_bytes=collected.unreferenced_bytes if collected and collected.ended_at else None,
        collected_at=collected.ended_at if collected else None,
        devices={(release, alias): count for release, alias, count in devices},
    )

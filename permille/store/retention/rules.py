"""A tenant's rule for what goes by itself: old results, shared logs, reports, job records.

A package, quantization or mask goes once it is old and not among the newest of its model. One that anything
names stays, whatever the rule says: what was made of it, a federation, a job or build that has not ended, and
a release, a yanked one too. Devices may still have a yanked version: a federation of it goes on, its logs are
replayed with the package, and a rollback publishes it again.

What goes, goes as if an operator had removed it: the audit log says what in the same transaction, under the
token that asked, or that set the rule. Bytes go with the collection that follows, logs with the next sweep.
"""

from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy import select
from sqlalchemy.orm import Session, aliased

from permille.schemas.access import RetentionRule
from permille.schemas.jobs import JobKind
from permille.store import artifacts, audit, inputs, runs, tables
from permille.store.audit import Change
from permille.store.database import Database, now
from permille.store.errors import ConflictError
from permille.store.jobs import queue
from permille.store.tables import Artifact, ArtifactSource, Job, Release, Round, Run

# So many of each go in one transaction, since others wait for it where the database is SQLite.
MOST: Final = 50
_PART = aliased(Job)
_NEWER = aliased(Artifact)


@dataclass(slots=True, kw_only=True)
class Gone:
    """Objects that a rule deleted or would delete.

    They are digests of packages, ids of quantizations and masks, and counts of others.
    """

    packages: list[str] = field(default_factory=list)
    quantizations: list[str] = field(default_factory=list)
    masks: list[str] = field(default_factory=list)
    logs: int = 0
    reports: int = 0
    jobs: int = 0

    def __bool__(self) -> bool:
        return any(asdict(self).values())


class _TriedOnlyError(Exception):
    """Takes a dry run back."""


def read_rule(session: Session, *, tenant_id: str) -> RetentionRule:
    """A tenant's rule; without one nothing goes."""
    row = session.get(tables.RetentionRule, tenant_id)
    return RetentionRule() if row is None else RetentionRule.model_validate(row.rule)


def set_rule(session: Session, *, tenant_id: str, token_id: str, rule: RetentionRule) -> None:
    """Set a tenant's rule: what goes by it from now on, goes in the name of this operator's token."""
    session.merge(
        tables.RetentionRule(
            tenant_id=tenant_id,
            token_id=token_id,
            rule=rule.model_dump(mode="json"),
            updated_at=now(session),
        )
    )
    session.flush()


def apply_all(db: Database) -> None:
    """Let go what the rules of all tenants say; workers do this before each collection."""
    with db.read() as session:
        rows = session.scalars(select(tables.RetentionRule).order_by(tables.RetentionRule.tenant_id)).all()
    for row in rows:
        while apply(db, tenant_id=row.tenant_id, token_id=row.token_id):
            pass


def apply(db: Database, *, tenant_id: str, token_id: str, dry_run: bool = False) -> Gone:
    """Let go what a tenant's rule says, at most `MOST` of each; with `dry_run` only say what that is.

    Args:
        token_id: of the operator in whose name it goes.
    """

    def work(session: Session) -> Gone:
        gone = _let_go(session, tenant_id, read_rule(session, tenant_id=tenant_id))
        if gone:
            change = Change(
                token_id=token_id,
                action="apply_retention",
                subject="/v1/retention/apply",
                request=asdict(gone),
            )
            audit.append(session, tenant_id=tenant_id, change=change)
        if dry_run:
            tried.append(gone)
            raise _TriedOnlyError
        return gone

    tried: list[Gone] = []
    try:
        return db.transact(work)
    except _TriedOnlyError:
        return tried[-1]


def _let_go(session: Session, tenant_id: str, rule: RetentionRule) -> Gone:
    gone = Gone()
    if (days := rule.result_days) is not None:
        for kind, names in (  # what is made before what it is made of
            (JobKind.PACKAGE, gone.packages),
            (JobKind.QUANTIZATION, gone.quantizations),
            (JobKind.MASK, gone.masks),
        ):
            names += _remove_results(session, tenant_id, kind, (rule.keep_newest, days))
    if rule.log_days is not None:
        gone.logs = _remove_logs(session, tenant_id, rule.log_days)
    if rule.report_days is not None:
        gone.reports = _remove_reports(session, tenant_id, rule.report_days)
    if rule.job_days is not None:
        gone.jobs = _remove_jobs(session, tenant_id, rule.job_days)
    return gone


def _remove_results(session: Session, tenant_id: str, kind: JobKind, kept: tuple[int, int]) -> list[str]:
    """Remove what is old and not among the newest of its model; return how it was called."""
    newest, days = kept
    named = inputs.named_by_jobs(session, tenant_id=tenant_id)
    old = (
        select(Artifact)
        .where(
            Artifact.tenant_id == tenant_id,
            Artifact.kind == kind.value,
            Artifact.created_at < _before(session, days),
            # `artifacts.remove` asks for more; these are many, and must not stand before others.
            ~select(Release.id).where(Release.package_id == Artifact.id).exists(),
            ~select(ArtifactSource.source_id).where(ArtifactSource.source_id == Artifact.id).exists(),
        )
        .order_by(Artifact.id)
        .limit(MOST)
    )
    if newest:
        newer = select(_NEWER.id).where(
            _NEWER.model_id == Artifact.model_id, _NEWER.kind == kind.value, _NEWER.id > Artifact.id
        )
        old = old.where(newer.order_by(_NEWER.id).limit(1).offset(newest - 1).exists())
    removed = []
    for row in session.scalars(old).all():
        key = artifacts.key_of(row)
        with suppress(ConflictError):
            artifacts.remove(session, tenant_id=tenant_id, kind=kind, key=key, named=named)
            removed.append(key)
    return removed


def _remove_logs(session: Session, tenant_id: str, days: int) -> int:
    """Forget shared logs and states."""
    sent = select(Run.run_id).where(Run.tenant_id == tenant_id, Run.log_sent_at < _before(session, days))
    found = session.scalars(sent.where(Run.log_upload_id.is_not(None)).limit(MOST)).all()
    for run_id in found:
        runs.delete_log(session, tenant_id=tenant_id, run_id=run_id)
    return len(found)


def _remove_reports(session: Session, tenant_id: str, days: int) -> int:
    """Forget reports with their logs, and the rows of those that were deleted before."""
    old = select(Run).where(Run.tenant_id == tenant_id, Run.created_at < _before(session, days))
    found = session.scalars(old.order_by(Run.created_at).limit(MOST)).all()
    for run in found:
        if run.deleted_at is None:
            runs.delete_run(session, tenant_id=tenant_id, run_id=run.run_id)
        session.delete(run)
        session.flush()
    return len(found)


def _remove_jobs(session: Session, tenant_id: str, days: int) -> int:
    """Forget jobs that have ended, with their parts, where nothing is left of what they made."""
    part_made = select(Artifact.id).join(_PART, Artifact.job_id == _PART.id).where(_PART.parent_id == Job.id)
    old = (
        select(Job)
        .where(
            Job.tenant_id == tenant_id,
            Job.parent_id.is_(None),
            Job.ended_at < _before(session, days),
            ~select(Artifact.id).where(Artifact.job_id == Job.id).exists(),
            ~part_made.exists(),
            ~select(Run.run_id).where(Run.log_job_id == Job.id).exists(),
            ~select(Round.number).where(Round.job_id == Job.id).exists(),
        )
        .order_by(Job.ended_at)
        .limit(MOST)
    )
    removed = 0
    for job in session.scalars(old).all():
        with suppress(ConflictError):
            queue.remove(session, tenant_id=tenant_id, kind=JobKind(job.kind), job_id=job.id)
            removed += 1
    return removed


def _before(session: Session, days: int) -> datetime:
    return now(session) - timedelta(days=days)

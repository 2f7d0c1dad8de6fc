"""Retention rules, by which a tenant's old results, shared logs, reports and job records are deleted.

A package, quantization or mask is deleted once it is old and not among the newest of its model. It
stays while anything refers to it: a result that was made from it, a federation, an unfinished job
or build, or a release. Even a yanked release keeps its package, which is still needed. Devices may have
that version, the service replays their logs with the package, and a rollback may publish it again.

A deletion works as if an operator had made it. The same transaction writes it into the audit log, under the
token that asked for the deletion or that set the rule. The next collection deletes the blobs, and the next
sweep deletes the bytes of logs.
"""

from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from functools import partial
from typing import Final

from sqlalchemy import select
from sqlalchemy.orm import Session, aliased

from permille.schemas.access import RetentionRule
from permille.schemas.jobs import JobKind
from permille.store import artifacts, audit, inputs, runs, tables
from permille.store.audit import Change
from permille.store.database import Database, now, run_each
from permille.store.errors import ConflictError
from permille.store.jobs import queue
from permille.store.tables import Artifact, ArtifactSource, Job, Release, Round, Run

# A transaction deletes at most this many objects of each kind, since on SQLite all other writers wait for it.
MOST: Final = 50
_PART = aliased(Job)
_NEWER = aliased(Artifact)


@dataclass(slots=True, kw_only=True)
class Gone:
    """Objects that a rule deleted, or would delete in a dry run.

    Attributes:
        packages: the digests of the packages.
        quantizations, masks: the ids of the quantizations and masks.
        logs, reports, jobs: how many logs, reports and records of jobs there are.
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
    """Raised at the end of a dry run, so that its transaction is rolled back."""


def read_rule(session: Session, *, tenant_id: str) -> RetentionRule:
    """Return the tenant's rule. A tenant without a rule gets an empty one, which deletes nothing."""
    row = session.get(tables.RetentionRule, tenant_id)
    return RetentionRule() if row is None else RetentionRule.model_validate(row.rule)


def set_rule(session: Session, *, tenant_id: str, token_id: str, rule: RetentionRule) -> None:
    """Set the tenant's rule. The audit log names this token when workers delete by the rule."""
    session.merge(
        tables.RetentionRule(
            tenant_id=tenant_id,
            token_id=token_id,
            rule=rule.model_dump(mode="json"),
            updated_at=now(session),
        )
    )


def apply_all(db: Database) -> None:
    """Apply the rules of all tenants. Workers do this before a collection.

    If the rules of one tenant fail, those of the others still apply.
    """
    with db.read() as session:
        rows = session.scalars(select(tables.RetentionRule).order_by(tables.RetentionRule.tenant_id)).all()
    run_each(partial(_apply_whole, db, row.tenant_id, row.token_id) for row in rows)


def _apply_whole(db: Database, tenant_id: str, token_id: str) -> None:
    # Each call is one short transaction. Repeat it until nothing is left to delete.
    while apply(db, tenant_id=tenant_id, token_id=token_id):
        pass


def apply(db: Database, *, tenant_id: str, token_id: str, dry_run: bool = False) -> Gone:
    """Delete what a tenant's rule allows, at most `MOST` objects of each kind.

    Args:
        token_id: the token that the audit log names.
        dry_run: return what would be deleted, and delete nothing.
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
        for kind, names in (  # packages first: they refer to quantizations and masks
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
    """Remove old results that are not among the newest of their model. Return their keys."""
    newest, days = kept
    named = inputs.named_by_jobs(session, tenant_id=tenant_id)
    old = (
        select(Artifact)
        .where(
            Artifact.tenant_id == tenant_id,
            Artifact.kind == kind.value,
            Artifact.created_at < _before(session, days),
            # `artifacts.remove` checks these two conditions and more. They are also here because many results
            # are released or used. Such results cannot be removed, and would use up the limit at every call.
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
    """Delete shared logs and states."""
    sent = select(Run.run_id).where(Run.tenant_id == tenant_id, Run.log_sent_at < _before(session, days))
    found = session.scalars(sent.where(Run.log_upload_id.is_not(None)).limit(MOST)).all()
    for run_id in found:
        runs.delete_log(session, tenant_id=tenant_id, run_id=run_id)
    return len(found)


def _remove_reports(session: Session, tenant_id: str, days: int) -> int:
    """Delete old reports, their logs and their rows. Some reports were deleted earlier, by `runs.delete_run`:
    delete their empty rows, too.
    """
    old = select(Run).where(Run.tenant_id == tenant_id, Run.created_at < _before(session, days))
    found = session.scalars(old.order_by(Run.created_at).limit(MOST)).all()
    for run in found:
        if run.deleted_at is None:
            runs.delete_run(session, tenant_id=tenant_id, run_id=run.run_id)
        session.delete(run)
    return len(found)


def _remove_jobs(session: Session, tenant_id: str, days: int) -> int:
    """Delete records of ended jobs, with their parts, once none of their results is left."""
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
            queue.remove(session, tenant_id=tenant_id, kind=job.kind, job_id=job.id)
            removed += 1
    return removed


def _before(session: Session, days: int) -> datetime:
    return now(session) - timedelta(days=days)

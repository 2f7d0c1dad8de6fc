"""The audit log: every change by an operator, in the transaction that made it, chained by digests.

An entry's digest covers the one before it. So nobody takes out or changes an entry without changing all later
digests, and who has written down one of them sees it.
"""

from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from permille.schemas.access import FIRST_DIGEST
from permille.schemas.access import AuditEntry as Record
from permille.store.database import now
from permille.store.rows import Page, Window
from permille.store.tables import AuditEntry, Tenant


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Change by an operator.

    Attributes:
        token_id: of the operator's token.
        action: the operation's id in the OpenAPI document.
        subject: the path of the request, with the id of what it made.
        request: its body as it was understood; None where it had none.
    """

    token_id: str
    action: str
    subject: str
    request: dict[str, object] | None = None


def append(session: Session, *, tenant_id: str, change: Change) -> None:
    """Add an entry to a tenant's log; those who write at the same time wait at the tenant's row."""
    session.execute(select(Tenant.id).where(Tenant.id == tenant_id).with_for_update(key_share=True))
    newest = select(AuditEntry).where(AuditEntry.tenant_id == tenant_id).order_by(AuditEntry.seq.desc())
    last = session.scalar(newest.limit(1))
    row = AuditEntry(
        tenant_id=tenant_id,
        seq=1 if last is None else last.seq + 1,
        created_at=now(session),
        token_id=change.token_id,
        action=change.action,
        subject=change.subject,
        request=change.request,
        digest=FIRST_DIGEST,
    )
    row.digest = present(row).digest_after(FIRST_DIGEST if last is None else last.digest)
    session.add(row)
    session.flush()


def entries_after(session: Session, *, tenant_id: str, seq: int, limit: int) -> list[Record]:
    """A tenant's entries from `seq + 1` on, oldest first."""
    query = select(AuditEntry).where(AuditEntry.tenant_id == tenant_id, AuditEntry.seq > seq)
    return [present(row) for row in session.scalars(query.order_by(AuditEntry.seq).limit(limit))]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFilter:
    """Conditions of a list of entries; None asks for nothing. `subject` is a part of it."""

    action: str | None = None
    token_id: str | None = None
    subject: str | None = None


def list_entries(session: Session, *, tenant_id: str, wanted: AuditFilter, window: Window) -> Page[Record]:
    """A tenant's entries, newest first; the cursor is the `seq` of a page's last one."""
    query = select(AuditEntry).where(AuditEntry.tenant_id == tenant_id)
    for column, value in ((AuditEntry.action, wanted.action), (AuditEntry.token_id, wanted.token_id)):
        if value is not None:
            query = query.where(column == value)
    if wanted.subject is not None:
        query = query.where(AuditEntry.subject.contains(wanted.subject, autoescape=True))
    if window.cursor is not None:
        query = query.where(AuditEntry.seq < int(window.cursor))
    found = session.scalars(query.order_by(AuditEntry.seq.desc()).limit(window.limit + 1)).all()
    items = tuple(present(row) for row in found[: window.limit])
    return Page(items=items, next_cursor=str(items[-1].seq) if len(found) > window.limit else None)


def actions_of(session: Session, *, tenant_id: str) -> list[str]:
    """Return the names of all actions in a tenant's log."""
    query = select(AuditEntry.action).where(AuditEntry.tenant_id == tenant_id).distinct()
    return sorted(session.scalars(query))


def present(row: AuditEntry) -> Record:
    """The record of a row."""
    return Record(
        seq=row.seq,
        at=row.created_at,
        token_id=row.token_id,
        action=row.action,
        subject=row.subject,
        request=row.request,
        digest=row.digest,
    )

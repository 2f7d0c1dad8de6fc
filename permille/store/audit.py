"""The audit log: every change by an operator, written in the transaction of the change.

The digest of an entry covers the digest of the entry before it. So nobody can remove or change an entry
without changing all later digests. Anyone who has written down a later digest can notice such a change.
"""

from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from permille.schemas.access import FIRST_DIGEST
from permille.schemas.access import AuditEntry as Record
from permille.store.database import now
from permille.store.rows import Page, Window, fetch_page
from permille.store.tables import AuditEntry, Tenant


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change by an operator.

    Attributes:
        token_id: the id of the operator's token.
        action: the id of the operation in the OpenAPI document.
        subject: the path of the request, with the id of the object that it made.
        request: the parsed body, or None.
    """

    token_id: str
    action: str
    subject: str
    request: dict[str, object] | None = None


def append(session: Session, *, tenant_id: str, change: Change) -> None:
    """Add an entry to a tenant's log. Concurrent writers wait for the lock on the tenant's row."""
    session.execute(select(Tenant.id).where(Tenant.id == tenant_id).with_for_update(key_share=True))
    # The lock above ensures that nobody adds an entry between this read and our insert.
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


def entries_after(session: Session, *, tenant_id: str, seq: int, limit: int) -> list[Record]:
    """Return the entries of a tenant from `seq + 1` on, oldest first."""
    query = select(AuditEntry).where(AuditEntry.tenant_id == tenant_id, AuditEntry.seq > seq)
    return [present(row) for row in session.scalars(query.order_by(AuditEntry.seq).limit(limit))]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFilter:
    """Conditions of a list of entries. A condition that is None does not filter. `subject` matches a
    substring.
    """

    action: str | None = None
    token_id: str | None = None
    subject: str | None = None


def list_entries(session: Session, *, tenant_id: str, wanted: AuditFilter, window: Window) -> Page[Record]:
    """List the entries of a tenant, newest first. The cursor is the `seq` of the last entry on the page."""
    query = select(AuditEntry).where(AuditEntry.tenant_id == tenant_id)
    for column, value in ((AuditEntry.action, wanted.action), (AuditEntry.token_id, wanted.token_id)):
        if value is not None:
            query = query.where(column == value)
    if wanted.subject is not None:
        query = query.where(AuditEntry.subject.contains(wanted.subject, autoescape=True))
    page = fetch_page(session, query, window, AuditEntry.seq)
    return Page(items=tuple(map(present, page.items)), next_cursor=page.next_cursor)


def actions_of(session: Session, *, tenant_id: str) -> list[str]:
    """Return the names of all actions in a tenant's log, sorted."""
    query = select(AuditEntry.action).where(AuditEntry.tenant_id == tenant_id).distinct()
    return sorted(session.scalars(query))


def present(row: AuditEntry) -> Record:
    """Return the API record of a row."""
    return Record(
        seq=row.seq,
        at=row.created_at,
        token_id=row.token_id,
        action=row.action,
        subject=row.subject,
        request=row.request,
        digest=row.digest,
    )

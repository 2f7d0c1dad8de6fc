"""The audit log: every change by an operator, written in the transaction of the change.

The digest of an entry covers the digest of the entry before it. So nobody can remove or change an entry
without changing all later digests. Anyone who has written down a later digest can notice such a change.

Entries are never deleted, so their size and their number in a day are limited. A large body is replaced by
its digest.
"""

import hashlib
import json
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy import select
from sqlalchemy.orm import Session

from permille.schemas.access import FIRST_DIGEST
from permille.schemas.access import AuditEntry as Record
from permille.store.database import now
from permille.store.errors import QuotaError
from permille.store.rows import Page, Window, fetch_page, records_of
from permille.store.tables import AuditEntry, Tenant

MAX_BODY_BYTES: Final = 16 << 10
MAX_CHANGES_A_DAY: Final = 20_000
"""Changes of one tenant within 24 hours. Those that only end or remove something may reach twice as many."""
_ENDING: Final = frozenset(("apply", "cancel", "delete", "halt", "pause", "revert", "revoke", "stop", "yank"))
_DAY: Final = timedelta(hours=24)


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
    """Add an entry to a tenant's log. Concurrent writers wait for the lock on the tenant's row.

    Raises:
        QuotaError: the tenant has made too many changes within 24 hours.
    """
    session.execute(select(Tenant.id).where(Tenant.id == tenant_id).with_for_update(key_share=True))
    # The lock above ensures that nobody adds an entry between this read and our insert.
    newest = select(AuditEntry).where(AuditEntry.tenant_id == tenant_id).order_by(AuditEntry.seq.desc())
    last = session.scalar(newest.limit(1))
    seq, at = 1 if last is None else last.seq + 1, now(session)
    _check_quota(session, tenant_id, seq, change.action, at)
    row = AuditEntry(
        tenant_id=tenant_id,
        seq=seq,
        created_at=at,
        token_id=change.token_id,
        action=change.action,
        subject=change.subject,
        request=_bounded(change.request),
        digest=FIRST_DIGEST,
    )
    row.digest = present(row).digest_after(FIRST_DIGEST if last is None else last.digest)
    session.add(row)


def _check_quota(session: Session, tenant_id: str, seq: int, action: str, at: datetime) -> None:
    # An operator whose token was stolen must still be able to revoke it.
    most = MAX_CHANGES_A_DAY * (2 if action.partition("_")[0] in _ENDING else 1)
    entry = session.get(AuditEntry, (tenant_id, seq - most))
    if entry is not None and entry.created_at > at - _DAY:
        wait_s = int((entry.created_at + _DAY - at).total_seconds()) + 1
        raise QuotaError(
            f"This tenant has made {most} changes within 24 hours. Try again later.", retry_after_s=wait_s
        )


def _bounded(request: dict[str, object] | None) -> dict[str, object] | None:
    """Return a body, or its digest and size if it is large."""
    if request is None:
        return None
    data = json.dumps(request, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    if len(data) <= MAX_BODY_BYTES:
        return request
    return {"digest": f"sha256:{hashlib.sha256(data).hexdigest()}", "size_bytes": len(data)}


def entries_after(session: Session, *, tenant_id: str, seq: int, limit: int) -> list[Record]:
    """Return the entries of a tenant from `seq + 1` on, oldest first."""
    query = select(AuditEntry).where(AuditEntry.tenant_id == tenant_id, AuditEntry.seq > seq)
    return records_of(session.scalars(query.order_by(AuditEntry.seq).limit(limit)), present)


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
    return Page(items=tuple(records_of(page.items, present)), next_cursor=page.next_cursor)


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

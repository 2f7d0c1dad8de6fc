"""Answers kept by idempotency key, for requests that make something other than a job (jobs keep their own
key).

The caller looks, works and keeps in one write transaction, so that an answer exists exactly when its effect
does.
"""

from datetime import timedelta

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from permille.store.database import now
from permille.store.errors import ConflictError
from permille.store.tables import IdempotentAnswer

KEPT_FOR = timedelta(hours=24)


def find(session: Session, *, tenant_id: str, key: str, request_digest: str) -> IdempotentAnswer | None:
    """The answer kept under this key, if it is still kept.

    Raises:
        ConflictError: the key was used for another request.
    """
    answer = session.scalar(
        select(IdempotentAnswer).where(
            IdempotentAnswer.tenant_id == tenant_id,
            IdempotentAnswer.key == key,
            IdempotentAnswer.created_at > now(session) - KEPT_FOR,
        )
    )
    if answer is not None and answer.request_digest != request_digest:
        raise ConflictError(f"expected the request that first used idempotency key {key!r}, got another")
    return answer


def keep(session: Session, *, tenant_id: str, key: str, request_digest: str, sealed: bytes) -> None:
    """Keep an answer for a day; answers older than that are dropped on the way."""
    at = now(session)
    session.execute(delete(IdempotentAnswer).where(IdempotentAnswer.created_at <= at - KEPT_FOR))
    session.add(
        IdempotentAnswer(
            tenant_id=tenant_id,
            key=key,
            request_digest=request_digest,
            sealed=sealed,
            created_at=at,
        )
    )
    session.flush()

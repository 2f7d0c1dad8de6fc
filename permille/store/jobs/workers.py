"""Which workers run, and what not all of them can do: asked before a job exists that none of them could end.

A worker notes itself once a minute. One that was silent for five is taken for gone, after a day its row goes.
"""

from datetime import timedelta
from typing import Final

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from permille.store.database import now
from permille.store.tables import Worker

_NOTED_EVERY: Final = timedelta(minutes=1)
_SILENT_FOR: Final = timedelta(minutes=5)
_KEPT_FOR: Final = timedelta(days=1)


def note(session: Session, *, name: str, exports: bool) -> None:
    """Note that a worker runs, and whether it can export programs; not more often than is needed."""
    at, row = now(session), session.get(Worker, name)
    if row is not None and row.exports == exports and at - row.seen_at < _NOTED_EVERY:
        return
    session.merge(Worker(name=name, exports=exports, seen_at=at))
    session.execute(delete(Worker).where(Worker.seen_at < at - _KEPT_FOR))


def none_can_export(session: Session) -> bool:
    """Whether workers run and none of them can export programs; where none runs, one may come."""
    running = select(Worker.exports).where(Worker.seen_at > now(session) - _SILENT_FOR)
    found = session.scalars(running).all()
    return bool(found) and not any(found)

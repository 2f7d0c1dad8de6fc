"""References of rows to blobs in the shared store. Only these decide whether a blob is needed.

Uploads and what a split job shares lie in stores of their own, named by the rows that own them
(`permille.store.uploads`, `permille_workers.runtime.work_folders`); rounds and checkpoints are in the
database. Releases, aliases and federations name packages, whose rows cannot go while they do.
"""

from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import select
from sqlalchemy.orm import InstrumentedAttribute, Session

from permille.store.tables import ArtifactBlob

NAMING: Final[tuple[InstrumentedAttribute[Any], ...]] = (ArtifactBlob.digest,)
"""The columns whose digests are blobs of the shared store. A manifest is a blob of its package, too."""


def references(session: Session, among: Sequence[str] | None = None) -> set[str]:
    """Digests of all blobs that rows refer to; of those in `among` alone where it is given."""
    found: set[str] = set()
    for column in NAMING:
        query = select(column).distinct()
        found.update(session.scalars(query if among is None else query.where(column.in_(among))))
    return found

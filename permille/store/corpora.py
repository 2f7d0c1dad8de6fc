"""Registered corpora."""

from sqlalchemy import or_, select
from sqlalchemy.orm import Session

from permille.store.database import now
from permille.store.errors import ConflictError, NotFoundError
from permille.store.ids import Prefix, new_id
from permille.store.paging import Page, fetch_page
from permille.store.tables import Corpus, Mask, QuantizationRow


def register(
    session: Session,
    *,
    tenant_id: str,
    name: str,
    kind: str,
    location: str,
    split: str | None = None,
    field: str | None = None,
    size_bytes: int | None = None,
    digest: str | None = None,
) -> Corpus:
    """Add a corpus: a `file` (location: path below the corpus root) or `streamed` (a data set's name)."""
    corpus = Corpus(
        id=new_id(Prefix.CORPUS),
        tenant_id=tenant_id,
        name=name,
        kind=kind,
        location=location,
        split=split,
        field=field,
        size_bytes=size_bytes,
        digest=digest,
        created_at=now(session),
    )
    session.add(corpus)
    session.flush()
    return corpus


def get(session: Session, *, tenant_id: str, corpus_id: str) -> Corpus:
    """Read one corpus. Raises NotFoundError."""
    corpus = session.scalar(select(Corpus).where(Corpus.tenant_id == tenant_id, Corpus.id == corpus_id))
    if corpus is None:
        raise NotFoundError(f"no corpus {corpus_id!r}")
    return corpus


def list_corpora(
    session: Session, *, tenant_id: str, limit: int = 50, cursor: str | None = None
) -> Page[Corpus]:
    """List corpora, newest first."""
    query = select(Corpus).where(Corpus.tenant_id == tenant_id)
    return fetch_page(session, query, Corpus.id, limit=limit, cursor=cursor)


def delete(session: Session, *, tenant_id: str, corpus_id: str) -> None:
    """Remove a corpus that no result refers to.

    Raises:
        NotFoundError: no such corpus.
        ConflictError: a mask or quantization refers to it.
    """
    corpus = get(session, tenant_id=tenant_id, corpus_id=corpus_id)
    used = or_(
        select(Mask.id).where(Mask.corpus_id == corpus_id).exists(),
        select(QuantizationRow.id).where(QuantizationRow.evaluation_corpus_id == corpus_id).exists(),
    )
    if session.scalar(select(used)):
        raise ConflictError(f"expected a corpus without results, got {corpus_id}, which a result refers to")
    session.delete(corpus)

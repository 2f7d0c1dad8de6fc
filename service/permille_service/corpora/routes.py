"""Routes of corpora."""

from fastapi import APIRouter, Response
from sqlalchemy.orm import Session

from permille.errors import InputError
from permille.models.sources import resolve_inside
from permille.schemas.corpora import Corpus, CorpusCreate, FileCorpus, StreamedCorpus, StreamedDataset
from permille.schemas.fields import Page
from permille.schemas.problems import ProblemType
from permille.store import corpora, tables
from permille_service.access.principals import Maker, Viewer
from permille_service.context import Served, Service
from permille_service.idempotency import IdempotencyKey, once
from permille_service.paging import DEFAULT_LIMIT, Cursor, Limit, page_of, store_cursor
from permille_service.parameters import CorpusId
from permille_service.problems import PRIVATE, ApiError, documented

SUFFIXES = (".jsonl", ".jsonl.gz", ".txt")

router = APIRouter(
    prefix="/v1/corpora", tags=["corpora"], responses=documented(*PRIVATE, ProblemType.NOT_FOUND)
)


@router.post(
    "", status_code=201, responses=documented(ProblemType.CONFLICT, ProblemType.IDEMPOTENCY_CONFLICT)
)
def create_corpus(
    body: CorpusCreate, response: Response, service: Served, operator: Maker, key: IdempotencyKey = None
) -> Corpus:
    """Register a corpus: a file below the corpus root, or a streamed data set of the allow-list."""
    source = body.source
    size_bytes = _size_of(service, source.path) if isinstance(source, FileCorpus) else None

    def make(session: Session) -> Corpus:
        row = corpora.register(
            session,
            tenant_id=operator.tenant_id,
            name=body.name,
            kind=source.kind,
            location=source.path if isinstance(source, FileCorpus) else source.dataset.value,
            split=source.split if isinstance(source, StreamedCorpus) else None,
            size_bytes=size_bytes,
        )
        return present(row)

    corpus = once(
        service,
        tenant_id=operator.tenant_id,
        key=key,
        operation="create_corpus",
        body=body,
        answer_type=Corpus,
        make=make,
    )
    response.headers["Location"] = f"/v1/corpora/{corpus.id}"
    return corpus


@router.get("")
def list_corpora(
    service: Served, operator: Viewer, limit: Limit = DEFAULT_LIMIT, cursor: Cursor = None
) -> Page[Corpus]:
    """List registered corpora, newest first."""
    with service.database.read() as session:
        page = corpora.list_corpora(
            session, tenant_id=operator.tenant_id, limit=limit, cursor=store_cursor(cursor)
        )
    return page_of(page, present)


@router.get("/{corpus_id}")
def get_corpus(corpus_id: CorpusId, service: Served, operator: Viewer) -> Corpus:
    """Read one corpus."""
    with service.database.read() as session:
        return present(corpora.get(session, tenant_id=operator.tenant_id, corpus_id=corpus_id))


@router.delete("/{corpus_id}", status_code=204, responses=documented(ProblemType.CONFLICT))
def delete_corpus(corpus_id: CorpusId, service: Served, operator: Maker) -> None:
    """Forget a corpus that no result refers to. Its file stays."""
    with service.database.write() as session:
        corpora.delete(session, tenant_id=operator.tenant_id, corpus_id=corpus_id)


def present(row: tables.Corpus) -> Corpus:
    """The record of a row."""
    if row.kind == "file":
        source: FileCorpus | StreamedCorpus = FileCorpus(kind="file", path=row.location)
    else:
        source = StreamedCorpus(
            kind="streamed",
            dataset=StreamedDataset(row.location),
            split="validation" if row.split == "validation" else "train",
        )
    return Corpus(
        id=row.id, name=row.name, source=source, size_bytes=row.size_bytes, created_at=row.created_at
    )


def _size_of(service: Service, relative: str) -> int:
    root = service.settings.corpus_root
    if not (root / relative).exists():
        raise ApiError(ProblemType.NOT_FOUND, f"expected a file below the corpus root, got {relative!r}")
    try:
        path = resolve_inside(root, relative, what="file")
    except InputError as exc:
        raise ApiError(ProblemType.CONFLICT, str(exc)) from exc
    if not path.name.endswith(SUFFIXES):
        raise ApiError(ProblemType.CONFLICT, f"expected a file named {', '.join(SUFFIXES)}, got {relative!r}")
    return path.stat().st_size

"""Routes of corpora."""

from fastapi import APIRouter
from sqlalchemy.orm import Session

from permille.sandbox.heads import HeadKind
from permille.schemas.fields import Page
from permille.schemas.inputs import Corpus, CorpusCreate, FileCorpus
from permille.schemas.problems import ProblemType
from permille.store import inputs, rows, tables
from permille_service.access.principals import Maker, Viewer, changing
from permille_service.context import Served
from permille_service.creation import MADE_RESPONSES, Creating, Creation
from permille_service.inputs.models import facts_of, locate
from permille_service.parameters import CorpusId, Paging, page_of
from permille_service.problems import PRIVATE, documented

router = APIRouter(
    prefix="/v1/corpora", tags=["corpora"], responses=documented(*PRIVATE, ProblemType.NOT_FOUND)
)


@router.post("", status_code=201, responses=MADE_RESPONSES)
def create_corpus(body: CorpusCreate, creating: Creating) -> Corpus:
    """Register a corpus: a file below the tenant's corpus root, or a data set that jobs stream from a hub.
    Only data sets of a fixed list are allowed."""
    source = body.source
    size_bytes = _size_of(creating, source.path) if isinstance(source, FileCorpus) else None

    def make(session: Session) -> Corpus:
        row = inputs.add_corpus(
            session,
            tenant_id=creating.operator.tenant_id,
            name=body.name,
            source=source,
            size_bytes=size_bytes,
        )
        return present(row)

    return creating.add(Corpus, body, make, removable=tables.Corpus)


@router.get("")
def list_corpora(service: Served, operator: Viewer, window: Paging) -> Page[Corpus]:
    """List registered corpora, newest first."""
    with service.database.read() as session:
        page = rows.list_all(session, tables.Corpus, tenant_id=operator.tenant_id, window=window)
    return page_of(page, present)


@router.get("/{corpus_id}")
def get_corpus(corpus_id: CorpusId, service: Served, operator: Viewer) -> Corpus:
    """Read one corpus."""
    with service.database.read() as session:
        return present(rows.get(session, tables.Corpus, tenant_id=operator.tenant_id, row_id=corpus_id))


@router.delete("/{corpus_id}", status_code=204, responses=documented(ProblemType.CONFLICT))
def delete_corpus(corpus_id: CorpusId, service: Served, operator: Maker) -> None:
    """Remove the registration of a corpus that no result refers to. Its file stays."""
    with changing(service, operator) as session:
        inputs.remove(session, tables.Corpus, tenant_id=operator.tenant_id, row_id=corpus_id)


def present(row: tables.Corpus) -> Corpus:
    """Return the record of a corpus."""
    return Corpus.model_validate(
        {
            "id": row.id,
            "name": row.name,
            "source": row.source,
            "size_bytes": row.size_bytes,
            "created_at": row.created_at,
        }
    )


def _size_of(creating: Creation, relative: str) -> int:
    path = locate(creating, relative, what="file", of="corpus")
    facts_of(creating, HeadKind.CORPUS, path)
    return path.stat().st_size

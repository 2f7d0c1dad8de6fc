"""Routes of base models.

When a folder is registered, the family of the model and the headers of its tensors are checked, in a child
process (`permille.sandbox.heads`).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

from fastapi import APIRouter
from sqlalchemy.orm import Session

from permille.errors import InputError
from permille.models.sources import resolve_inside
from permille.sandbox.heads import HeadKind, read_facts
from permille.schemas.fields import Page
from permille.schemas.inputs import FolderModel, GgufModel, HubModel, Model, ModelCreate
from permille.schemas.problems import ProblemType
from permille.store import inputs, rows, tables
from permille.store.inputs import ModelFacts
from permille_service.access.principals import Maker, Viewer, changing
from permille_service.context import Served
from permille_service.creation import MADE_RESPONSES, Creating, Creation
from permille_service.parameters import ModelId, Paging, page_of
from permille_service.problems import PRIVATE, ApiError, as_conflicts, documented

MAX_HEADS: Final = 4
"""Number of files whose heads may be read at the same time, for all tenants together."""

router = APIRouter(
    prefix="/v1/models", tags=["models"], responses=documented(*PRIVATE, ProblemType.NOT_FOUND)
)


@router.post("", status_code=201, responses=MADE_RESPONSES)
def create_model(body: ModelCreate, creating: Creating) -> Model:
    """Register a base model: a folder or a GGUF file below the tenant's model root, or a hub repository at a
    commit."""
    source = body.source
    facts = None if isinstance(source, HubModel) else _facts(creating, source)

    def make(session: Session) -> Model:
        row = inputs.add_model(
            session, tenant_id=creating.operator.tenant_id, name=body.name, source=source, facts=facts
        )
        return present(row)

    return creating.add(Model, body, make, removable=tables.Model)


@router.get("")
def list_models(service: Served, operator: Viewer, window: Paging) -> Page[Model]:
    """List registered models, newest first."""
    with service.database.read() as session:
        page = rows.list_all(session, tables.Model, tenant_id=operator.tenant_id, window=window)
    return page_of(page, present)


@router.get("/{model_id}")
def get_model(model_id: ModelId, service: Served, operator: Viewer) -> Model:
    """Read one model."""
    with service.database.read() as session:
        return present(rows.get(session, tables.Model, tenant_id=operator.tenant_id, row_id=model_id))


@router.delete("/{model_id}", status_code=204, responses=documented(ProblemType.CONFLICT))
def delete_model(model_id: ModelId, service: Served, operator: Maker) -> None:
    """Remove the registration of a model from which nothing was made. Its files stay."""
    with changing(service, operator) as session:
        inputs.remove(session, tables.Model, tenant_id=operator.tenant_id, row_id=model_id)


def present(row: tables.Model) -> Model:
    """Return the record of a model."""
    return Model.model_validate(
        {
            "id": row.id,
            "name": row.name,
            "source": row.source,
            "family": row.family,
            "parameters": row.parameter_count,
            "scoped_parameters": row.scoped_parameter_count,
            "size_bytes": row.size_bytes,
            "created_at": row.created_at,
        }
    )


def _facts(creating: Creation, source: FolderModel | GgufModel) -> ModelFacts:
    """Return the facts about a model's folder or file that the database stores.

    The first job adds the digest of the model's weights.

    Raises:
        ApiError: `not-found`: the path does not exist, or it leads out of the root. The message is the same
            for both.
            `conflict`: the family is unknown, files are missing, or a file cannot be read.
    """
    kind = HeadKind.FOLDER if isinstance(source, FolderModel) else HeadKind.GGUF
    path = locate(creating, source.path, what="folder" if kind is HeadKind.FOLDER else "file", of="model")
    return ModelFacts(**facts_of(creating, kind, path))


def facts_of(creating: Creation, kind: HeadKind, path: Path) -> Mapping[str, Any]:
    """Read the head of a file in a child process, one file of a tenant at a time.

    Raises:
        ApiError: `conflict`: the file is refused.
            `too-many-requests`, `unavailable`: the tenant registers another file, or others register many.
    """
    with creating.service.heads.hold(creating.operator.tenant_id), as_conflicts():
        return read_facts(kind, path)


def locate(
    creating: Creation, relative: str, *, what: Literal["folder", "file"], of: Literal["model", "corpus"]
) -> Path:
    """Find a file or folder below a root of the operator's tenant. Raises ApiError (`not-found`)."""
    with creating.service.database.read() as session:
        roots = inputs.roots_of(session, creating.service.settings, tenant_id=creating.operator.tenant_id)
    try:
        root = roots.models if of == "model" else roots.corpora
        return resolve_inside(root, relative, what=what, of=of)
    except InputError as exc:
        raise ApiError(ProblemType.NOT_FOUND, str(exc)) from exc

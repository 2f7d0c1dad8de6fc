"""Routes of base models."""

from fastapi import APIRouter, Response
from sqlalchemy.orm import Session

from permille.errors import InputError
from permille.schemas.fields import Page
from permille.schemas.models import FolderModel, HubModel, Model, ModelCreate
from permille.schemas.problems import ProblemType
from permille.store import models, tables
from permille.store.models import ModelFacts
from permille_service.access.principals import Maker, Viewer
from permille_service.context import Served, Service
from permille_service.idempotency import IdempotencyKey, once
from permille_service.models.inspection import inspect_folder
from permille_service.paging import DEFAULT_LIMIT, Cursor, Limit, page_of, store_cursor
from permille_service.parameters import ModelId
from permille_service.problems import PRIVATE, ApiError, documented

router = APIRouter(
    prefix="/v1/models", tags=["models"], responses=documented(*PRIVATE, ProblemType.NOT_FOUND)
)


@router.post(
    "", status_code=201, responses=documented(ProblemType.CONFLICT, ProblemType.IDEMPOTENCY_CONFLICT)
)
def create_model(
    body: ModelCreate, response: Response, service: Served, operator: Maker, key: IdempotencyKey = None
) -> Model:
    """Register a base model: a folder below the model root, or a hub repository at a commit."""
    source = body.source
    facts = _facts(service, source.path) if isinstance(source, FolderModel) else None

    def make(session: Session) -> Model:
        row = models.register(
            session,
            tenant_id=operator.tenant_id,
            name=body.name,
            kind=source.kind,
            location=source.path if isinstance(source, FolderModel) else source.repository,
            commit=source.commit if isinstance(source, HubModel) else None,
            facts=facts,
        )
        return present(row)

    model = once(
        service,
        tenant_id=operator.tenant_id,
        key=key,
        operation="create_model",
        body=body,
        answer_type=Model,
        make=make,
    )
    response.headers["Location"] = f"/v1/models/{model.id}"
    return model


@router.get("")
def list_models(
    service: Served, operator: Viewer, limit: Limit = DEFAULT_LIMIT, cursor: Cursor = None
) -> Page[Model]:
    """List registered models, newest first."""
    with service.database.read() as session:
        page = models.list_models(
            session, tenant_id=operator.tenant_id, limit=limit, cursor=store_cursor(cursor)
        )
    return page_of(page, present)


@router.get("/{model_id}")
def get_model(model_id: ModelId, service: Served, operator: Viewer) -> Model:
    """Read one model."""
    with service.database.read() as session:
        return present(models.get(session, tenant_id=operator.tenant_id, model_id=model_id))


@router.delete("/{model_id}", status_code=204, responses=documented(ProblemType.CONFLICT))
def delete_model(model_id: ModelId, service: Served, operator: Maker) -> None:
    """Forget a model that nothing was made of. Its files stay."""
    with service.database.write() as session:
        models.delete(session, tenant_id=operator.tenant_id, model_id=model_id)


def present(row: tables.Model) -> Model:
    """The record of a row."""
    if row.kind == "folder":
        source: FolderModel | HubModel = FolderModel(kind="folder", path=row.location)
    else:
        source = HubModel(kind="hub", repository=row.location, commit=row.commit or "")
    return Model(
        id=row.id,
        name=row.name,
        source=source,
        family=row.family,
        parameters=row.parameter_count,
        scoped_parameters=row.scoped_parameter_count,
        size_bytes=row.size_bytes,
        created_at=row.created_at,
    )


def _facts(service: Service, path: str) -> ModelFacts:
    if not (service.settings.model_root / path).exists():
        raise ApiError(ProblemType.NOT_FOUND, f"expected a folder below the model root, got {path!r}")
    try:
        return inspect_folder(service.settings.model_root, path)
    except InputError as exc:
        raise ApiError(ProblemType.CONFLICT, str(exc)) from exc

"""Registered base models."""

from dataclasses import dataclass
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from permille.store.database import now
from permille.store.errors import ConflictError, NotFoundError
from permille.store.ids import Prefix, new_id
from permille.store.paging import Page, fetch_page
from permille.store.tables import Mask, Model, PackageRow, QuantizationRow


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What is known once the model's files were read."""

    family: str
    config: dict[str, Any]
    size_bytes: int
    parameter_count: int
    scoped_parameter_count: int
    digest: str | None = None


def register(
    session: Session,
    *,
    tenant_id: str,
    name: str,
    kind: str,
    location: str,
    commit: str | None = None,
    facts: ModelFacts | None = None,
) -> Model:
    """Add a model: `kind` is `folder` (location: path below the model root) or `hub` (id and commit)."""
    model = Model(
        id=new_id(Prefix.MODEL),
        tenant_id=tenant_id,
        name=name,
        kind=kind,
        location=location,
        commit=commit,
        created_at=now(session),
    )
    if facts is not None:
        _apply(model, facts)
    session.add(model)
    session.flush()
    return model


def get(session: Session, *, tenant_id: str, model_id: str) -> Model:
    """Read one model. Raises NotFoundError."""
    model = session.scalar(select(Model).where(Model.tenant_id == tenant_id, Model.id == model_id))
    if model is None:
        raise NotFoundError(f"no model {model_id!r}")
    return model


def list_models(
    session: Session, *, tenant_id: str, limit: int = 50, cursor: str | None = None
) -> Page[Model]:
    """List models, newest first."""
    query = select(Model).where(Model.tenant_id == tenant_id)
    return fetch_page(session, query, Model.id, limit=limit, cursor=cursor)


def record_facts(session: Session, *, tenant_id: str, model_id: str, facts: ModelFacts) -> Model:
    """Store what a worker found in a hub model's files. Raises NotFoundError."""
    model = get(session, tenant_id=tenant_id, model_id=model_id)
    _apply(model, facts)
    return model


def delete(session: Session, *, tenant_id: str, model_id: str) -> None:
    """Remove a model that nothing was made of.

    Raises:
        NotFoundError: no such model.
        ConflictError: a mask, quantization or package refers to it.
    """
    model = get(session, tenant_id=tenant_id, model_id=model_id)
    for table in (Mask, QuantizationRow, PackageRow):
        if session.scalar(select(table.model_id).where(table.model_id == model_id).limit(1)) is not None:
            raise ConflictError(
                f"expected a model without results, got one that {table.__tablename__} refer to"
            )
    session.delete(model)


def _apply(model: Model, facts: ModelFacts) -> None:
    model.family = facts.family
    model.config = facts.config
    model.size_bytes = facts.size_bytes
    model.parameter_count = facts.parameter_count
    model.scoped_parameter_count = facts.scoped_parameter_count
    model.digest = facts.digest

"""Pages of models, corpora, masks and packages."""

from typing import Annotated, Final, TypeVar

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel
from sqlalchemy import select
from sqlalchemy.orm import Session

from permille.errors import PackageError
from permille.package.blobs import BlobFolder
from permille.schemas.fields import DIGEST_PATTERN
from permille.schemas.jobs import JobKind
from permille.schemas.kinds import WORK
from permille.store import artifacts, rows, tables
from permille.store.artifacts import REPORT
from permille_console.masks import MaskEvidence, MaskOrder, curve_at_density, curve_of, parts_of
from permille_console.rendering import PageRoute, ViewerPage
from permille_service.inputs import corpora, models
from permille_service.parameters import PackageDigest, Paging, key_of, page_of
from permille_service.work.routes import present_artifact

router = APIRouter(prefix="/ui", include_in_schema=False, route_class=PageRoute)
MaskId = Annotated[str, key_of("mask")]
_LARGEST_REPORT: Final = 32 << 20
AnyReport = TypeVar("AnyReport", bound=BaseModel)


class Perplexity(BaseModel):
    """Perplexity on the evaluation text.

    Attributes:
        before: the perplexity of the original model.
        pruned: the perplexity after pruning and before fine-tuning.
        after: the perplexity of the finished model.
        held_out: whether the evaluation text is separate from the text that was used to make the model.
    """

    before: float | None
    pruned: float | None = None
    after: float | None
    held_out: bool | None = None


@router.get("/models")
def show_models(page: ViewerPage, window: Paging) -> Response:
    """Show models and corpora."""
    with page.service.database.read() as session:
        found = rows.list_all(session, tables.Model, tenant_id=page.tenant_id, window=window)
        texts = rows.list_all(session, tables.Corpus, tenant_id=page.tenant_id)
        origins = _origins(session, page.tenant_id, [row.id for row in found.items])
    return page.render(
        "models",
        models=page_of(found, models.present),
        corpora=page_of(texts, corpora.present),
        origins=origins,
    )


@router.get("/masks")
def show_masks(page: ViewerPage, window: Paging) -> Response:
    """Show masks, newest first."""
    with page.service.database.read() as session:
        found = artifacts.list_artifacts(session, tenant_id=page.tenant_id, kind=JobKind.MASK, window=window)
        names = model_names(session, page.tenant_id)
    masks = page_of(found, lambda row: present_artifact(WORK[JobKind.MASK], row))
    return page.render("masks", masks=masks, names=names)


@router.get("/masks/{mask_id}")
def show_mask(mask_id: MaskId, page: ViewerPage, sort: MaskOrder = MaskOrder.LAYER) -> Response:
    """Show one mask: its share of the score in total, by kind of linear layer, decoder layer and tensor."""
    with page.service.database.read() as session:
        row = artifacts.get(session, tenant_id=page.tenant_id, kind=JobKind.MASK, key=mask_id)
        names = model_names(session, page.tenant_id)
    report = report_of(page.service.blobs, row, MaskEvidence)
    return page.render(
        "mask",
        mask=present_artifact(WORK[JobKind.MASK], row),
        name=names.get(row.model_id),
        report=report,
        curve=None if report is None else curve_of(report),
        reach=None if report is None else curve_at_density(report),
        groups=[] if report is None else parts_of(report, sort),
        sort=sort,
    )


@router.get("/packages")
def show_packages(
    page: ViewerPage, window: Paging, against: Annotated[str | None, Query(pattern=DIGEST_PATTERN)] = None
) -> Response:
    """Show packages, newest first.

    With `against`, each package has a link that compares it with the package `against`.
    """
    with page.service.database.read() as session:
        found = artifacts.list_artifacts(
            session, tenant_id=page.tenant_id, kind=JobKind.PACKAGE, window=window
        )
        names = model_names(session, page.tenant_id)
        released = {row.digest: _releases_of(session, row) for row in found.items}
    packages = page_of(found, lambda row: present_artifact(WORK[JobKind.PACKAGE], row))
    return page.render("packages", packages=packages, names=names, released=released, against=against)


@router.get("/packages/{digest}")
def show_package(digest: PackageDigest, page: ViewerPage) -> Response:
    """Show one package: its layers (files), its origin, and the releases that contain it."""
    with page.service.database.read() as session:
        row = artifacts.get(session, tenant_id=page.tenant_id, kind=JobKind.PACKAGE, key=digest)
        names, released = model_names(session, page.tenant_id), _releases_of(session, row)
    return page.render(
        "package",
        package=present_artifact(WORK[JobKind.PACKAGE], row),
        name=names.get(row.model_id),
        released=released,
    )


def report_of(blobs: BlobFolder, made: tables.Artifact, kind: type[AnyReport]) -> AnyReport | None:
    """Return the report of an artifact, or None if there is no report or its blob is missing."""
    blob = artifacts.blob_of(made, REPORT)
    if blob is None:
        return None
    try:
        return kind.model_validate_json(blobs.read(blob.digest, limit=_LARGEST_REPORT))
    except PackageError:
        return None


def model_names(session: Session, tenant_id: str) -> dict[str, str]:
    """Return the names of a tenant's models by their ids."""
    found = session.scalars(select(tables.Model).where(tables.Model.tenant_id == tenant_id).limit(1000))
    return {row.id: row.name for row in found}


def _origins(session: Session, tenant_id: str, model_ids: list[str]) -> dict[str, str]:
    """Return the sparsifications that made these models.

    The result maps the id of each sparsification to the name of the original model.
    """
    names, made = model_names(session, tenant_id), tables.Artifact
    found = session.scalars(select(made).where(made.made_model_id.in_(model_ids)))
    return {row.id: names.get(row.model_id, row.model_id) for row in found}


def _releases_of(session: Session, package: tables.Artifact) -> list[tables.Release]:
    """Return the releases that contain a package, newest first."""
    query = select(tables.Release).where(tables.Release.package_id == package.id)
    return list(session.scalars(query.order_by(tables.Release.id.desc()).limit(20)))

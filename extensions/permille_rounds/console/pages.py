"""Pages of federations and their rounds."""

from fastapi import APIRouter, Response
from sqlalchemy import select

from permille.store import rows, tables
from permille_console.rendering import PageRoute, ViewerPage
from permille_rounds.service.records import present, present_round
from permille_rounds.service.routes import FederationId
from permille_service.parameters import Paging, page_of

router = APIRouter(prefix="/ui", include_in_schema=False, route_class=PageRoute)


@router.get("/federations")
def show_federations(page: ViewerPage, window: Paging) -> Response:
    """Show federations, newest first."""
    with page.service.database.read() as session:
        found = rows.list_all(session, tables.Federation, tenant_id=page.tenant_id, window=window)
        federations = page_of(found, lambda row: present(session, row))
    return page.render("federations", federations=federations)


@router.get("/federations/{federation_id}")
def show_federation(federation_id: FederationId, page: ViewerPage) -> Response:
    """Show one federation and its newest rounds."""
    with page.service.database.read() as session:
        row = rows.get(session, tables.Federation, tenant_id=page.tenant_id, row_id=federation_id)
        query = select(tables.Round).where(tables.Round.federation_id == federation_id)
        newest = session.scalars(query.order_by(tables.Round.number.desc()).limit(100))
        told = rows.records_of(newest, lambda one: present_round(session, one))
        federation = present(session, row)
    gains = [one for one in reversed(told) if one.mean_gain is not None]
    chart = {
        "x": [one.number for one in gains],
        "series": [{"label": "mean gain", "values": [one.mean_gain for one in gains]}],
    }
    return page.render("federation", federation=federation, rounds=told, chart=chart)

"""Tests of routes: the app starts only if every route declares its callers."""

from pathlib import Path
from typing import Annotated

import pytest
from fastapi import APIRouter, Depends, FastAPI
from starlette.responses import PlainTextResponse

from permille_service import app as service_app
from permille_service.access.principals import PUBLIC, Viewer, check_routes
from permille_service.context import Served
from permille_service.settings import load


def test_a_route_without_a_principal_keeps_the_service_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = APIRouter(prefix="/v1/forgotten")

    @router.get("")
    def list_forgotten(service: Served) -> str:
        return "rows of every tenant"

    monkeypatch.setattr(service_app, "ROUTERS", (*service_app.ROUTERS, router))
    # Without the cached routes of other apps.
    monkeypatch.setattr(service_app, "_routes", service_app._routes.__wrapped__)
    with pytest.raises(RuntimeError, match=r"list_forgotten \(/v1/forgotten\) must declare a principal"):
        service_app.create_app(load(data_dir=tmp_path))


def test_a_principal_behind_another_dependency_counts() -> None:
    def tenant_of(operator: Viewer) -> str:
        return operator.tenant_id

    app = FastAPI(docs_url=None, redoc_url=None)

    @app.get("/own")
    def get_own(tenant_id: Annotated[str, Depends(tenant_of)]) -> str:
        return tenant_id

    @app.get("/all", dependencies=[PUBLIC])
    def get_all() -> str:
        return "public"

    check_routes(app)


def test_a_public_route_has_no_principal() -> None:
    app = FastAPI(docs_url=None, redoc_url=None)

    @app.get("/both", dependencies=[PUBLIC])
    def get_both(operator: Viewer) -> str:
        return operator.tenant_id

    with pytest.raises(RuntimeError, match="not both"):
        check_routes(app)


def test_routes_without_dependencies_are_refused() -> None:
    app = FastAPI(docs_url=None, redoc_url=None)
    app.add_route("/plain", lambda _: PlainTextResponse("rows"))
    with pytest.raises(RuntimeError, match="/plain"):
        check_routes(app)

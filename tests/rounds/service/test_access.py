"""An administrator of another tenant sees and changes no federation."""

from permille.schemas.access import Role
from tests.api_service import Api
from tests.rounds.site import SMALL, make_site, request_of


def test_a_federation_of_another_tenant_is_not_found(api: Api) -> None:
    federation = make_site(api).path
    stranger = api.operator(Role.ADMIN, tenant="stranger")
    for path in ("", "/definition", "/history", "/rounds", "/rounds/0"):
        assert api.get(federation + path, stranger).status_code == 404, path
        assert api.get(federation + path).status_code == 200, path
    assert api.get("/v1/federations", stranger).json()["items"] == []
    assert api.get("/v1/federations").json()["items"]
    for action in ("start", "pause", "finish", "adoptions"):
        assert api.post(f"{federation}/{action}", {}, stranger).status_code == 404, action
    assert api.post("/v1/federations", request_of(SMALL | {"name": "mine"}), stranger).status_code == 404

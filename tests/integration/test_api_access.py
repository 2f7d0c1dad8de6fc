"""Every route for callers without access.

Callers are nobody, devices, other tenants, expired or revoked tokens, and tokens with too small a role.
"""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from permille.schemas.access import Role
from permille.store.access import find_caller
from tests.api_service import Api, new_run_id, run_metrics, running_api

pytestmark = pytest.mark.attack(13, "routes called by whom they are not for")

DIGEST = "sha256:" + "0" * 64
ULID = "01jd3kq8z7m4n5p6r7s8t9v0wx"
PARAMETERS = {
    "model_id": f"model_{ULID}",
    "corpus_id": f"corpus_{ULID}",
    "job_id": f"job_{ULID}",
    "build_id": f"job_{ULID}",
    "export_id": f"job_{ULID}",
    "mask_id": f"mask_{ULID}",
    "quantization_id": f"quant_{ULID}",
    "sparsification_id": f"sparse_{ULID}",
    "device_id": f"dev_{ULID}",
    "invitation_id": f"inv_{ULID}",
    "token_id": f"operator_{ULID}",
    "run_id": "5a0d2d3c-1c51-4b71-9a53-0d4f1f2f7c11",
    "digest": DIGEST,
    "blob_digest": DIGEST,
    "name": "tiny",
    "alias": "stable",
    "version": "1",
    "federation_id": f"fed_{ULID}",
    "number": "0",
    "group_id": f"group_{ULID}",
    "rollout_id": f"rollout_{ULID}",
    "webhook_id": f"hook_{ULID}",
    "file": "timestamp.json",
    "path": f"releases/tiny/{'0' * 64}.1.json",
}
BODIES: dict[str, Any] = {
    "put_retention": {"job_days": 30},
    "create_model": {"name": "m", "source": {"kind": "hub", "repository": "a/b", "commit": "0" * 40}},
    "create_corpus": {"name": "c", "source": {"kind": "streamed", "dataset": "c4"}},
    "create_sparsification": {"model_id": f"model_{ULID}", "corpus_id": f"corpus_{ULID}", "name": "sparse"},
    "create_mask": {"model_id": f"model_{ULID}", "method": "random"},
    "create_quantization": {"model_id": f"model_{ULID}"},
    "create_build": {"model_id": f"model_{ULID}", "mask": {"method": "random"}},
    "create_package": {"mask_id": f"mask_{ULID}", "quantization_id": f"quant_{ULID}"},
    "create_export": {"package_digest": DIGEST},
    "create_release": {"name": "tiny", "package_digest": DIGEST},
    "yank_release": {},
    "put_alias": {"version": 1},
    "check_preflight": {"kind": "mask", "request": {"model_id": f"model_{ULID}", "method": "random"}},
    "rotate_trust_keys": {"roles": [{"role": "releases"}]},
    "renew_trust_metadata": {},
    "put_trust_metadata": {},
    "create_invitation": {"release": "tiny"},
    "create_run": {"run_id": "5a0d2d3c-1c51-4b71-9a53-0d4f1f2f7c11", "metrics": run_metrics()},
    "create_federation": {"name": "readers", "release": "tiny"},
    "create_adoption": {"reason": "a pilot"},
    "create_group": {"name": "all"},
    "put_device_tags": {"tags": ["canary"]},
    "create_rollout": {"release": "tiny"},
    "put_device_facts": {"agent_version": "0.1.0", "engine": None, "memory_bytes": None},
    "put_rollout_report": {"installed": True},
    "create_tenant": {"name": "acme"},
    "create_token": {"name": "t", "role": "viewer"},
}
DEVICE_ONLY = {
    *("get_own_device", "delete_own_device", "create_run", "put_run_log"),
    *("list_own_federations", "put_membership", "delete_membership"),
    *("create_round_invitation", "put_contribution", "delete_contribution"),
    *("put_device_facts", "put_rollout_report"),
}
SHARED = {
    "resolve_alias",
    "get_trust_metadata",
    "get_trust_target",
    "get_package_manifest",
    "get_package_blob",
    "head_package_blob",
    "get_run",
    "delete_run",
    "delete_run_log",
    "get_federation_definition",
    "get_federation_history",
    "get_round_record",
}
_BYTES = {
    "put_run_log": "application/vnd.permille.log",
    "put_contribution": "application/vnd.permille.contribution",
}
ADMIN_ONLY = {
    *("create_tenant", "list_tenants", "create_token", "list_tokens", "delete_token"),
    *("put_trust_metadata", "rotate_trust_keys", "renew_trust_metadata"),
    *("list_audit_entries", "put_retention", "apply_retention", "collect_blobs"),
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """One service for all tests that change nothing."""
    with running_api(tmp_path_factory.mktemp("api"), sign_ins_per_minute=10_000) as api:
        yield api


def private_operations(api: Api) -> list[tuple[str, str, str]]:
    """Return operation id, method and path of all operations that need a principal."""
    document = api.client.get("/openapi.json").json()
    return [
        (operation["operationId"], method, path.format(**PARAMETERS))
        for path, item in document["paths"].items()
        for method, operation in item.items()
        if operation.get("security")
    ]


def call(api: Api, name: str, method: str, path: str, token: str | None) -> Any:
    headers = api.auth(token) if token is not None else {}
    if name in _BYTES:
        headers["Content-Type"] = _BYTES[name]
        return api.client.request(method, path, headers=headers, content=b"log")
    return api.client.request(method, path, headers=headers, json=BODIES.get(name))


@pytest.mark.parametrize("token", [None, "", "pmo_", "pmo_" + "A" * 43, "pmd_" + "A" * 43, "x" * 5000])
def test_every_private_route_refuses_nobody(shared: Api, token: str | None) -> None:
    for name, method, path in private_operations(shared):
        answer = call(shared, name, method, path, token)
        assert answer.status_code == 401, name
        assert answer.headers["www-authenticate"].startswith("Bearer"), name


def test_other_schemes_and_places_of_a_token_are_refused(shared: Api) -> None:
    client, token = shared.client, shared.token
    assert client.get("/v1/models", headers={"Authorization": f"Basic {token}"}).status_code == 401
    assert client.get("/v1/models", headers={"Authorization": token}).status_code == 401
    assert client.get("/v1/models", params={"access_token": token}).status_code == 401


def test_every_operator_route_refuses_a_device(shared: Api) -> None:
    token = shared.device().token()
    for name, method, path in private_operations(shared):
        if name in DEVICE_ONLY | SHARED:
            continue
        assert call(shared, name, method, path, token).status_code == 403, name


def test_every_device_route_refuses_an_operator(shared: Api) -> None:
    for name, method, path in private_operations(shared):
        if name in DEVICE_ONLY:
            assert call(shared, name, method, path, shared.token).status_code == 403, name


def test_viewer_reads_and_changes_nothing(shared: Api) -> None:
    token = shared.operator(Role.VIEWER)
    for name, method, path in private_operations(shared):
        if name in DEVICE_ONLY:
            continue
        answer = call(shared, name, method, path, token)
        changes = method not in ("get", "head") and name != "check_preflight"
        assert (answer.status_code == 403) == (changes or name in ADMIN_ONLY), name


def test_operator_reaches_all_but_access(shared: Api) -> None:
    token = shared.operator(Role.OPERATOR)
    for name, method, path in private_operations(shared):
        if name in DEVICE_ONLY:
            continue
        answer = call(shared, name, method, path, token)
        assert (answer.status_code == 403) == (name in ADMIN_ONLY), name


def test_other_tenant_sees_nothing(api: Api) -> None:
    package = api.package()
    api.publish(package)
    corpus = api.post("/v1/corpora", BODIES["create_corpus"]).json()
    model = api.post("/v1/models", BODIES["create_model"]).json()
    job = api.post("/v1/masks", {"model_id": model["id"], "method": "random"}).json()
    device = api.device()
    run_id = new_run_id()
    api.post("/v1/runs", {"run_id": run_id, "metrics": run_metrics()}, device.token())
    stranger = api.operator(Role.ADMIN, tenant="stranger")
    blob = package.manifest.layers[0].digest
    paths = (
        f"/v1/corpora/{corpus['id']}",
        f"/v1/models/{model['id']}",
        f"/v1/jobs/{job['id']}",
        f"/v1/jobs/{job['id']}/events",
        f"/v1/jobs/{job['id']}/events/stream",
        f"/v1/packages/{package.digest}",
        f"/v1/packages/{package.digest}/manifest",
        f"/v1/packages/{package.digest}/blobs/{blob}",
        "/v1/releases/tiny/versions/1",
        "/v1/releases/tiny/aliases/stable",
        f"/v1/devices/{device.id}",
        f"/v1/runs/{run_id}",
    )
    for path in paths:
        assert api.get(path, stranger).status_code == 404, path
        if not path.endswith("stream"):
            assert api.get(path).status_code == 200, path
    for collection in (
        "corpora",
        "models",
        "jobs",
        "packages",
        "releases",
        "devices",
        "runs",
        "invitations",
    ):
        assert api.get(f"/v1/{collection}", stranger).json()["items"] == [], collection
        assert api.get(f"/v1/{collection}").json()["items"], collection
    assert api.post(f"/v1/devices/{device.id}/revoke", None, stranger).status_code == 404
    assert api.post(f"/v1/jobs/{job['id']}/cancel", None, stranger).status_code == 404
    assert api.delete(f"/v1/runs/{run_id}", stranger).status_code == 404
    assert api.post("/v1/masks", {"model_id": model["id"], "method": "random"}, stranger).status_code == 404
    body = {"name": "mine", "package_digest": package.digest}
    assert api.post("/v1/releases", body, stranger).status_code == 404
    assert api.get("/v1/tenants", stranger).status_code == 403
    assert api.post("/v1/tenants", {"name": "third"}, stranger).status_code == 403
    asked = {"name": "spy", "role": "admin", "tenant_id": api.tenant_id}
    assert api.post("/v1/tokens", asked, stranger).status_code == 403


def test_revoked_token_is_refused_at_its_next_request(api: Api) -> None:
    made = api.post("/v1/tokens", {"name": "ci", "role": "operator"}).json()
    assert api.get("/v1/models", made["secret"]).status_code == 200
    assert api.delete(f"/v1/tokens/{made['id']}").status_code == 204
    assert api.get("/v1/models", made["secret"]).status_code == 401


def test_nobody_revokes_the_token_in_use(api: Api) -> None:
    own = next(item for item in api.get("/v1/tokens").json()["items"] if item["name"] == "first")
    assert api.delete(f"/v1/tokens/{own['id']}").status_code == 409
    assert api.get("/v1/tokens").status_code == 200


def test_token_expires(tmp_path: Path) -> None:
    moment = [datetime(2026, 1, 1, tzinfo=UTC)]
    with running_api(tmp_path, clock=lambda: moment[0]) as api:
        body = {"name": "short", "role": "viewer", "expires_in_days": 1}
        secret = api.post("/v1/tokens", body).json()["secret"]
        moment[0] += timedelta(hours=23)
        assert api.get("/v1/models", secret).status_code == 200
        moment[0] += timedelta(hours=1)
        assert api.get("/v1/models", secret).status_code == 401


def test_token_is_stored_hashed_and_its_file_is_private(api: Api) -> None:
    path = api.service.settings.token_path
    assert path.stat().st_mode & 0o777 == 0o600
    secret = path.read_text().strip().encode()
    for file in api.service.settings.data_dir.glob("permille.db*"):
        assert secret not in file.read_bytes()
    assert find_caller(api.service.database, secret.decode()) is not None


def test_private_keys_are_readable_by_their_owner_alone(api: Api) -> None:
    keys = api.service.settings.keys_dir
    assert keys.stat().st_mode & 0o777 == 0o700
    files = sorted(keys.iterdir())
    assert [file.name for file in files] == ["answers.key"]
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/tokens", {"name": "ci", "role": "operator"}), ("/v1/invitations", {"release": "tiny"})],
)
def test_a_secret_is_told_again_to_its_first_receiver_alone(
    api: Api, path: str, body: dict[str, str]
) -> None:
    first, other = api.operator(Role.ADMIN), api.operator(Role.ADMIN)
    made = api.post(path, body, first, key="same-key")
    assert api.post(path, body, first, key="same-key").json() == made.json()
    assert api.post(path, body, other, key="same-key").status_code == 409

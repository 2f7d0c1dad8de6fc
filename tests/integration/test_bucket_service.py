"""The service on a bucket: a package goes from a worker to a device, and the bucket's errors are reported."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import pytest

from permille.digests import digest_of
from permille.exits import ExitCode
from permille.package.blobs import BlobFolder
from permille.package.limits import Role
from permille.package.reader import verify_package
from permille.schemas.runs import STATE_MEDIA_TYPE
from permille.store import uploads
from permille_agent.cli.main import main
from permille_agent.state.home import open_home
from permille_service import health
from tests.api_service import Api, new_run_id, run_metrics, running_api
from tests.artifacts import add_package as store_package
from tests.bucket_site import Fault, Gate, bucket_server, gate
from tests.packages import tiny_package
from tests.running_service import running_service
from tests.unit.edge_agent.runs import user_text
from tests.unit.workers.conftest import save_model


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with bucket_server() as found:
        yield found


@pytest.fixture
def site(server: str) -> Iterator[Gate]:
    with gate(server) as found:
        yield found


def agent(capsys: pytest.CaptureFixture[str], home: Path, *arguments: str) -> Any:
    """Return the JSON of a device's command."""
    capsys.readouterr()
    code = main(["--home", str(home), *arguments, "--json"])
    printed = capsys.readouterr()
    assert code in (0, ExitCode.KEPT_BASE), printed.err
    return json.loads(printed.out)


@pytest.mark.slow
def test_a_package_goes_from_a_worker_through_the_bucket_to_a_device_that_trains_and_reports(
    site: Gate, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(tmp_path / "models" / "tiny")
    options = ("--model-root", str(tmp_path / "models"))
    settings = {"PERMILLE_BLOB_BUCKET": site.address, "PERMILLE_DOWNLOADS": "redirect"}
    with running_service(tmp_path, *options, **settings) as up:
        up.answer("models", "add", "tiny", "--folder", "tiny")
        build = up.answer("builds", "create", "--model", "tiny", "--adapter", "lora-fa", "--rank", "2")
        digest = up.answer("builds", "show", build["id"])["package_digest"]
        up.answer("releases", "publish", "tiny", "--package", digest, "--alias", "stable")
        invitation = up.answer("invitations", "create", "--release", "tiny")["invitation"]
        agent(capsys, tmp_path / "home", "enroll", up.url, invitation)
        site.requests.clear()
        site.faults = [Fault("^GET .*dense.*X-Amz-Signature", cut_after=100)]
        assert agent(capsys, tmp_path / "home", "pull")["package"] == digest
        blobs = BlobFolder(open_home(tmp_path / "home").blobs)
        dense = verify_package(blobs, digest).manifest.layer(Role.DENSE)
        path = blobs.path(dense.digest)
        whole = path.read_bytes()
        path.chmod(0o644)
        path.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
        assert agent(capsys, tmp_path / "home", "verify", "--repair")["left"] == []
        assert path.read_bytes() == whole
        trained = agent(capsys, tmp_path / "home", "train", str(user_text(tmp_path)), "--steps", "3")
        assert agent(capsys, tmp_path / "home", "report") == {"delivered": 1, "refused": 0}
        (run,) = up.answer("runs", "list")
        assert (run["run_id"], run["metrics"]["package_digest"]) == (trained["run_id"], digest)
    sent = site.sent("^GET .*X-Amz-Signature")
    assert "bytes=100-" in {request.headers.get("range") for request in sent}, "continued, not begun again"
    assert not [request for request in sent if {"authorization", "cookie"} & request.headers.keys()]
    assert "secret-of-tests" not in (tmp_path / "up.log").read_text()


@pytest.fixture
def api(site: Gate, tmp_path: Path) -> Iterator[Api]:
    with running_api(tmp_path, blob_bucket=site.address) as found:
        bucket = found.service.blobs._bucket  # type: ignore[attr-defined]
        bucket._reach_s = 60.0  # enough for a busy machine
        yield found


def blob_of(api: Api, folder: Path) -> tuple[str, bytes]:
    """Put a package into the bucket. Return the path and the bytes of its largest layer."""
    package = tiny_package(folder)
    for entry in package.blobs.entries():
        api.service.blobs.put_file(package.blobs.path(entry.digest), expected=entry.digest)
    with api.service.database.write() as session:
        store_package(session, tenant_id=api.tenant_id, manifest=package.manifest)
    layer = max(package.manifest.layers, key=lambda layer: layer.size_bytes)
    path = f"/v1/packages/{package.digest}/blobs/{layer.digest}"
    return path, package.blobs.read(layer.digest, limit=layer.size_bytes)


def test_bytes_of_a_bucket_are_passed_on_with_ranges_and_conditions(
    api: Api, site: Gate, tmp_path: Path
) -> None:
    path, data = blob_of(api, tmp_path / "made")
    etag = f'"{path.rpartition("/")[2]}"'
    for headers, status, body in (
        ({}, 200, data),
        ({"Range": "bytes=10-19"}, 206, data[10:20]),
        ({"Range": "bytes=-5"}, 206, data[-5:]),
        ({"Range": "bytes=10-", "If-Range": etag}, 206, data[10:]),
        ({"Range": "bytes=10-", "If-Range": '"other"'}, 200, data),
        ({"If-None-Match": etag}, 304, b""),
    ):
        found = api.get(path, headers=headers)
        assert (found.status_code, found.content, found.headers["etag"]) == (status, body, etag), headers
    assert api.get(path, headers={"Range": "bytes=3-4"}).headers["content-range"] == f"bytes 3-4/{len(data)}"
    assert api.get(path, headers={"Range": f"bytes={len(data)}-"}).status_code == 416
    assert api.get(path, headers={"If-Match": '"other"'}).status_code == 412
    head = api.client.head(path, headers=api.auth())
    assert (head.headers["content-length"], head.headers["etag"]) == (str(len(data)), etag)
    site.faults = [Fault("^GET", cut_after=100)]
    assert api.get(path).content == data, "the bucket's answer was continued"


def test_what_a_bucket_refuses_is_said_and_health_knows(
    api: Api, site: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "ANSWER_S", 60.0)  # enough for the real result on a busy machine
    path, data = blob_of(api, tmp_path / "made")
    assert api.get("/readyz").status_code == 200
    site.faults = [Fault(f"^(GET|HEAD) /{site.bucket}", times=99, status=403, code="AccessDenied")]
    answer = api.get(path)
    assert (answer.status_code, answer.headers["content-type"]) == (503, "application/problem+json")
    assert site.bucket in answer.json()["detail"] and "403" in answer.json()["detail"]
    # Forget the last check. Otherwise health checks again only after two seconds.
    api.client.app.state.writes._check = None  # type: ignore[attr-defined]
    answer = api.get("/readyz")
    assert answer.status_code == 503 and site.bucket in answer.json()["detail"]
    site.faults = [Fault("^GET", times=9, cut_after=0)]
    answer = api.get(path)
    assert answer.status_code == 503 and f"byte 0 of {len(data)}" in answer.json()["detail"]


def test_a_bucket_that_does_not_answer_leaves_threads_for_others(
    api: Api, site: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = blob_of(api, tmp_path / "made")
    site.faults = [Fault("^HEAD", times=999, stall=True)]
    with ThreadPoolExecutor(50) as pool:
        asked = [pool.submit(api.get, path) for _ in range(50)]  # more than the service has threads
        answer = next(as_completed(asked)).result()
        assert answer.status_code == 503 and "wait for bucket" in answer.json()["detail"]
        assert api.get("/v1/fleet").status_code == 200
        monkeypatch.setattr(health, "ANSWER_S", 0.1)
        assert api.get("/readyz").json()["detail"] == "the store of blobs did not answer in time"
        site.closed.set()


def test_a_shared_log_lies_in_the_bucket_alone_and_is_erased(api: Api, site: Gate, tmp_path: Path) -> None:
    package = tiny_package(tmp_path / "made")
    for entry in package.blobs.entries():
        api.service.blobs.put_file(package.blobs.path(entry.digest), expected=entry.digest)
    with api.service.database.write() as session:
        store_package(session, tenant_id=api.tenant_id, manifest=package.manifest)
    api.publish(package)
    token, run_id = api.device().token(), new_run_id()
    metrics = run_metrics(package_digest=package.digest)
    assert api.post("/v1/runs", {"run_id": run_id, "metrics": metrics}, token).status_code == 201
    body = b"a state of somebody"
    headers = {**api.auth(token), "Content-Type": STATE_MEDIA_TYPE}
    assert api.client.put(f"/v1/runs/{run_id}/log", content=body, headers=headers).status_code == 202
    sent = api.service.blobs.below("uploads", api.tenant_id)
    (upload_id,) = sent.names()
    stored = sent.below(upload_id, private=True)
    assert stored.read(digest_of(body), limit=100) == body
    assert body not in [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    site.faults = [Fault("^GET .*list-type", times=2, status=500)]
    assert api.delete(f"/v1/runs/{run_id}/log", token).status_code == 204, "a bucket that is away"
    assert sent.names() == [upload_id]
    assert uploads.sweep(api.service.database, api.service.blobs) == 1
    assert sent.names() == []

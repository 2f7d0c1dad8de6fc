"""Packages over HTTP: ranges, conditions, caching, access. Releases: new and withdrawn versions."""

import hashlib
import os
from importlib.util import find_spec
from typing import Any

import pytest

from permille.package.blobs import BlobFolder
from permille.store.jobs.dispatch import note_worker
from permille_workers.runtime.settings import WorkerSettings
from permille_workers.runtime.supervisor import Shutdown
from permille_workers.runtime.sweeper import Sweeper
from tests.api_service import Api


def test_an_export_is_refused_while_no_worker_that_runs_can_make_it(api: Api) -> None:
    package = api.package()

    def ask() -> Any:
        return api.post("/v1/exports?again=true", {"package_digest": package.digest})

    assert ask().status_code == 202, "no worker is known yet"
    settings = WorkerSettings.model_validate({"data_dir": api.service.settings.data_dir})
    blobs, shutdown = BlobFolder(settings.blob_root), Shutdown()
    Sweeper(name="w", db=api.service.database, blobs=blobs, settings=settings, shutdown=shutdown).sweep()
    can = find_spec("executorch") is not None
    refused = ask()
    assert (refused.status_code == 202) == can, refused.text
    assert can or "permille[executorch]" in refused.json()["detail"]
    with api.service.database.write() as session:
        note_worker(session, name="another", exports=True, memory_bytes=None)
    assert ask().status_code == 202


def test_device_fetches_its_release_from_alias_to_last_byte(api: Api) -> None:
    package = api.package()
    api.publish(package)
    device = api.device()
    token = device.token()
    release = api.get("/v1/releases/tiny/aliases/stable", token).json()
    manifest = api.get(f"/v1/packages/{release['manifest_digest']}/manifest", token)
    assert manifest.headers["content-type"] == "application/vnd.permille.manifest+json"
    assert "sha256:" + hashlib.sha256(manifest.content).hexdigest() == release["manifest_digest"]
    total = len(manifest.content)
    for layer in package.manifest.layers:
        blob = api.get(f"/v1/packages/{package.digest}/blobs/{layer.digest}", token)
        assert "sha256:" + hashlib.sha256(blob.content).hexdigest() == layer.digest
        assert len(blob.content) == layer.size_bytes
        total += len(blob.content)
    assert total == release["size_bytes"]


def test_range_and_conditions_of_a_blob(api: Api) -> None:
    package = api.package()
    layer = max(package.manifest.layers, key=lambda layer: layer.size_bytes)
    path = f"/v1/packages/{package.digest}/blobs/{layer.digest}"
    whole = api.get(path)
    etag, size = whole.headers["etag"], layer.size_bytes
    assert etag == f'"{layer.digest}"'
    assert "immutable" in whole.headers["cache-control"]
    assert whole.headers["accept-ranges"] == "bytes"
    part = api.get(path, headers={"Range": "bytes=10-19"})
    assert (part.status_code, part.content) == (206, whole.content[10:20])
    assert part.headers["content-range"] == f"bytes 10-19/{size}"
    tail = api.get(path, headers={"Range": "bytes=-7"})
    assert tail.content == whole.content[-7:]
    rest = api.get(path, headers={"Range": f"bytes={size - 5}-", "If-Range": etag})
    assert (rest.status_code, rest.content) == (206, whole.content[-5:])
    stale = api.get(path, headers={"Range": "bytes=10-19", "If-Range": '"sha256:other"'})
    assert (stale.status_code, stale.content) == (200, whole.content)
    outside = api.get(path, headers={"Range": f"bytes={size}-"})
    assert outside.status_code == 416
    assert outside.headers["content-range"] == f"bytes */{size}"
    assert api.get(path, headers={"Range": "bytes=1-2,4-5"}).status_code == 200
    known = api.get(path, headers={"If-None-Match": etag})
    assert (known.status_code, known.content) == (304, b"")
    assert api.get(path, headers={"If-Match": '"sha256:other"'}).status_code == 412
    head = api.client.head(path, headers=api.auth())
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(size)
    assert head.headers["etag"] == etag


def test_device_sees_packages_of_its_release_only(api: Api) -> None:
    mine, other = api.package(seed=1), api.package(seed=2)
    api.publish(mine, "tiny")
    api.publish(other, "other")
    token = api.device(release="tiny").token()
    foreign = next(layer.digest for layer in other.manifest.layers if layer not in mine.manifest.layers)
    assert api.get(f"/v1/packages/{mine.digest}/manifest", token).status_code == 200
    assert api.get(f"/v1/packages/{other.digest}/manifest", token).status_code == 404
    assert api.get(f"/v1/packages/{other.digest}/blobs/{foreign}", token).status_code == 404
    assert api.get(f"/v1/packages/{mine.digest}/blobs/{foreign}", token).status_code == 404
    assert api.get("/v1/releases/other/aliases/stable", token).status_code == 404
    assert api.get("/v1/releases/tiny/aliases/canary", token).status_code == 404


def test_blob_that_no_package_names_is_not_served(api: Api) -> None:
    package = api.package()
    secret = api.service.blobs.put_bytes(b"a log of somebody")
    assert api.get(f"/v1/packages/{package.digest}/blobs/{secret}").status_code == 404


def test_versions_grow_and_aliases_move(api: Api) -> None:
    first, second = api.package(seed=1), api.package(seed=2)
    assert api.publish(first)["version"] == 1
    body = {"name": "tiny", "package_digest": second.digest}
    assert api.post("/v1/releases", body).json()["version"] == 2
    assert api.post("/v1/releases", body | {"version": 7}).status_code == 422
    assert api.get("/v1/releases/tiny/aliases/stable").json()["version"] == 1
    assert api.put("/v1/releases/tiny/aliases/stable", {"version": 2}).status_code == 200
    assert api.get("/v1/releases/tiny/aliases/stable").json()["manifest_digest"] == second.digest
    assert api.put("/v1/releases/tiny/aliases/canary", {"version": 9}).status_code == 404
    assert api.get("/v1/releases/tiny/versions/2").json()["aliases"] == ["stable"]
    assert api.delete("/v1/releases/tiny/aliases/stable").status_code == 204
    assert api.get("/v1/releases/tiny/aliases/stable").status_code == 404


def test_yanked_version_says_so_and_is_no_longer_handed_out(api: Api) -> None:
    package = api.package()
    api.publish(package)
    token = api.device().token()
    answer = api.post("/v1/releases/tiny/versions/1/yank", {"reason": "wrong corpus"})
    assert answer.json()["yanked_reason"] == "wrong corpus"
    assert api.get("/v1/releases/tiny/aliases/stable", token).json()["yanked"] is True
    assert api.get(f"/v1/packages/{package.digest}/manifest", token).status_code == 404
    assert api.put("/v1/releases/tiny/aliases/stable", {"version": 1}).status_code == 409
    assert api.get(f"/v1/packages/{package.digest}/manifest").status_code == 200


def test_a_package_with_a_yanked_version_is_published_only_on_purpose(api: Api) -> None:
    package, other = api.package(seed=1), api.package(seed=2)
    for one in (package, package, other):
        api.publish(one)
    api.post("/v1/releases/tiny/versions/2/yank", {"reason": "wrong corpus"})
    body = {"name": "tiny", "package_digest": package.digest}
    refused = api.post("/v1/releases", body)
    assert (refused.status_code, api.post("/v1/releases", body | {"name": "big"}).status_code) == (409, 201)
    assert "Version 2 of 'tiny' has this package, and was yanked: wrong corpus" in refused.json()["detail"]
    assert api.post("/v1/releases", body | {"yanked": True}).json()["version"] == 4


def test_lost_blob_is_unavailable_not_missing(api: Api) -> None:
    package = api.package()
    layer = package.manifest.layers[0]
    api.service.blobs.delete(layer.digest)
    answer = api.get(f"/v1/packages/{package.digest}/blobs/{layer.digest}")
    assert answer.status_code == 503
    assert "retry-after" in answer.headers


def test_part_of_a_blob_is_unavailable_not_the_whole(api: Api) -> None:
    package = api.package()
    layer = package.manifest.layers[0]
    cut(api, layer.digest)
    for headers in ({}, {"range": "bytes=0-0"}):
        answer = api.get(f"/v1/packages/{package.digest}/blobs/{layer.digest}", headers=headers)
        assert (answer.status_code, answer.headers["cache-control"]) == (503, "no-store")
        assert f"{layer.size_bytes - 1} bytes instead of {layer.size_bytes}" in answer.json()["detail"]


@pytest.mark.parametrize("damage", ["lost", "cut"])
def test_a_package_without_all_its_bytes_is_not_given_to_devices(api: Api, damage: str) -> None:
    first, second = api.package(seed=0), api.package(seed=1)
    api.publish(first)
    api.post("/v1/releases", {"name": "tiny", "package_digest": second.digest})
    digest = next(one.digest for one in second.manifest.layers if one not in first.manifest.layers)
    if damage == "lost":
        api.service.blobs.delete(digest)
    else:
        cut(api, digest)
    body = {"name": "tiny", "package_digest": second.digest, "alias": "stable"}
    for answer in (
        api.post("/v1/releases", body),
        api.put("/v1/releases/tiny/aliases/stable", {"version": 2}),
    ):
        assert answer.status_code == 503
        assert digest in answer.json()["detail"]
    assert api.get("/v1/releases/tiny/aliases/stable").json()["version"] == 1
    assert len(api.get("/v1/releases").json()["items"]) == 2


def cut(api: Api, digest: str) -> None:
    """Remove the last byte of a stored blob, as a full disk or a broken copy may."""
    path = api.service.blobs.path(digest)
    path.chmod(0o600)
    os.truncate(path, path.stat().st_size - 1)

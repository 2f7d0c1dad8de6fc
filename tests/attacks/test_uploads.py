"""A device that sends malicious logs: bytes equal to others' blobs, logs that cost hours, endless uploads.

Uploads are stored apart from blobs, each in its own folder, so a device can delete only its own bytes. The
work that a device may cause is limited before it is queued.
"""

import struct
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from permille.choices import EstimatorKind
from permille.package.blobs import BlobFolder
from permille.schemas.runs import LOG_MEDIA_TYPE
from permille.store import uploads
from permille.store.database import Database
from permille.zo.header import DirectionKind, LogHeader, Schedule
from permille.zo.log import MAGIC
from permille_service import settings
from tests.api_service import Api, TestDevice, new_run_id, run_metrics, running_api
from tests.attacks.test_connections import answer_of, device_and_run, is_problem, sending, wait_until
from tests.running_service import running_service
from tests.unit.store.conftest import Clock

LAYER = b"a layer of a public model" * 1000


def report(api: Api, token: str) -> str:
    """Report a new run and return its id."""
    run_id = new_run_id()
    assert api.post("/v1/runs", {"run_id": run_id, "metrics": run_metrics()}, token).status_code == 201
    return run_id


def put(api: Api, run_id: str, data: bytes, token: str) -> Any:
    headers = api.auth(token) | {"Content-Type": LOG_MEDIA_TYPE}
    return api.client.put(f"/v1/runs/{run_id}/log", content=data, headers=headers)


def log_of(steps: int, *, queries: int, k: int) -> bytes:
    """Return the beginning of a log in groups that states `steps` steps. No step follows."""
    header = LogHeader(
        package_digest="sha256:" + "0" * 64,
        mask_digest="sha256:" + "0" * 64,
        seed=1,
        directions=DirectionKind.GROUPS,
        estimator=EstimatorKind.GRADIENT,
        queries=queries,
        epsilon=1e-3,
        learning_rate=1e-3,
        schedule=Schedule.CONSTANT,
        total_steps=steps,
        step_unit_exponent=-20,
        counts=(k,),
    ).to_bytes()
    head = MAGIC + struct.pack("<I", len(header)) + header + struct.pack("<I", steps)
    return head + struct.pack("<I", zlib.crc32(head))


@pytest.fixture
def api(tmp_path: Path) -> Any:
    """Run a service that lets one device send often."""
    with running_api(tmp_path, uploads_per_device_day=1000, runs_per_device_day=1000) as running:
        yield running


@pytest.mark.attack(4, "sends and deletes a log equal to a blob of unfinished work, in tight loops")
def test_no_device_destroys_bytes_that_a_build_has(api: Api) -> None:
    """Devices send and delete the same bytes that a worker stores for a job that has not ended."""
    tokens = [api.device().token() for _ in range(2)]
    stop = threading.Event()
    rounds = [0, 0]

    def send_and_delete(number: int) -> None:
        while not stop.is_set():
            run_id = report(api, tokens[number])
            assert put(api, run_id, LAYER, tokens[number]).status_code == 202
            assert api.delete(f"/v1/runs/{run_id}/log", tokens[number]).status_code == 204
            rounds[number] += 1

    missing = 0
    with ThreadPoolExecutor(max_workers=2) as pool:
        attackers = [pool.submit(send_and_delete, number) for number in range(2)]
        try:
            digest = api.service.blobs.put_bytes(LAYER)
            while min(rounds) < 5 and not any(attacker.done() for attacker in attackers):
                missing += not api.service.blobs.has(digest)
        finally:
            stop.set()
        for attacker in attackers:
            attacker.result()
    assert missing == 0
    assert api.service.blobs.has(digest)


@pytest.mark.attack(4, "deletes a log while it is sent again")
def test_one_log_sent_and_deleted_at_once_is_whole_or_gone(api: Api) -> None:
    device = api.device()
    token = device.token()
    run_id = report(api, token)

    def send() -> None:
        for _ in range(25):
            assert put(api, run_id, LAYER, token).status_code in (202, 409, 429)

    def delete() -> None:
        for _ in range(25):
            assert api.delete(f"/v1/runs/{run_id}/log", token).status_code == 204

    with ThreadPoolExecutor(max_workers=2) as pool:
        for done in [pool.submit(send), pool.submit(delete)]:
            done.result()
    assert put(api, run_id, LAYER, token).status_code == 202
    upload_id = _upload_of(api, run_id)
    folder = uploads.open_folder(api.service.blobs, tenant_id=api.tenant_id, upload_id=upload_id)
    assert folder.read(str(api.get(f"/v1/runs/{run_id}").json()["log"]["log_digest"]), limit=1 << 20) == LAYER
    uploads.sweep(api.service.database, api.service.blobs)
    assert api.service.blobs.below("uploads", api.tenant_id).names() == [upload_id]


@pytest.mark.attack(3, "deletes a log that is on its way, and lets the rest of it arrive")
@pytest.mark.parametrize("swept", [False, True])
def test_a_log_that_was_deleted_while_it_came_is_not_kept(tmp_path: Path, swept: bool) -> None:
    with running_service(tmp_path, "--no-worker") as running:
        token, run_id = device_and_run(running)
        head = f"PUT /v1/runs/{run_id}/log HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {token}\r\n"
        head += f"Content-Type: {LOG_MEDIA_TYPE}\r\nContent-Length: 8\r\nConnection: close\r\n"
        with sending(running.url, f"{head}Expect: 100-continue\r\n\r\n".encode(), 1) as (opened,):
            assert b" 100 " in opened.recv(65_536)  # Its row and folder exist.
            opened.sendall(b"half")
            uploaded = running.data_dir / "blobs" / "uploads"
            wait_until(lambda: any(path.is_file() for path in uploaded.rglob("*")))
            with running.client() as device:
                device.headers["Authorization"] = f"Bearer {token}"
                assert device.delete(f"/v1/runs/{run_id}/log").status_code == 204
                if swept:
                    database = Database(f"sqlite:///{running.data_dir}/permille.db")
                    assert uploads.sweep(database, BlobFolder(running.data_dir / "blobs")) == 1
                    database.close()
                opened.sendall(b"rest")
                assert is_problem(answer_of(opened), 409, "conflict")
                assert device.get(f"/v1/runs/{run_id}").json()["log"] is None
        assert [path for path in uploaded.rglob("*") if path.is_file()] == []


@pytest.mark.attack(4, "cuts uploads off, or has the service killed between row and bytes")
def test_bytes_without_a_living_row_are_swept_and_never_said_to_be_if_they_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    with running_api(tmp_path, clock=clock) as api:
        device = api.device()
        blobs, quota = api.service.blobs, api.service.settings.quota
        with api.service.database.write() as session:
            row = uploads.begin(
                session, tenant_id=api.tenant_id, device_id=device.id, run_id="run", quota=quota
            )
        folder = uploads.open_folder(blobs, tenant_id=api.tenant_id, upload_id=row.id)
        with uploads.writer(folder) as writer:
            writer.write(LAYER)
            writer.commit()
        assert uploads.sweep(api.service.database, blobs) == 0
        clock.forward(3601)
        with monkeypatch.context() as patch:
            patch.setattr("shutil.rmtree", lambda *_args, **_options: None)  # the disk refuses
            assert uploads.sweep(api.service.database, blobs) == 0
        assert folder.root.exists()
        assert uploads.sweep(api.service.database, blobs) == 1
        assert not folder.root.exists()
        with pytest.raises(Exception, match="too late"), api.service.database.write() as session:
            uploads.hold(session, tenant_id=api.tenant_id, upload_id=row.id, size_bytes=1)


@pytest.mark.attack(10, "sends a small log that says it has years of steps")
def test_a_log_whose_replay_would_take_hours_is_refused_before_it_is_queued(api: Api) -> None:
    token = api.device().token()
    run_id = report(api, token)
    refused = put(api, run_id, log_of(1 << 24, queries=1, k=1 << 20), token)
    assert refused.status_code == 422
    assert "The replay of this log costs" in refused.json()["detail"]
    assert api.get("/v1/jobs").json()["items"] == []
    assert [path for path in api.service.settings.blob_root.rglob("*") if path.is_file()] == []
    assert put(api, run_id, log_of(1000, queries=4096, k=1 << 20), token).status_code == 202


@pytest.mark.attack(10, "sends logs without end")
@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ({}, "wait for their check"),
        ({"uploads_per_device_day": 2}, "logs or states a day"),
        ({"upload_bytes_per_device_day": 2 * len(LAYER)}, "bytes of logs and states a day"),
    ],
)
def test_a_device_sends_so_much_and_no_more(
    tmp_path: Path, setting: dict[str, int], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not setting:
        monkeypatch.setattr(settings, "UPLOADS_WAITING", 2)
    clock = Clock()
    with running_api(tmp_path, clock=clock, **setting) as api:
        greedy, modest = api.device(), api.device()
        assert _sent(api, greedy) == [202, 202]
        if "wait" not in told:  # Deleted uploads count, too.
            for run in api.get("/v1/runs").json()["items"]:
                assert api.delete(f"/v1/runs/{run['run_id']}").status_code == 204
        token = greedy.token()
        refused = put(api, report(api, token), LAYER, token)
        assert (refused.status_code, told in refused.json()["detail"]) == (429, True)
        assert 1 <= int(refused.headers["retry-after"]) <= 86_401
        assert _sent(api, modest) == [202, 202]
        for job in api.get("/v1/jobs").json()["items"]:
            api.post(f"/v1/jobs/{job['id']}/cancel")
        clock.forward(86_401)
        assert _sent(api, greedy) == [202, 202]


@pytest.mark.attack(10, "reports runs without end")
def test_a_device_reports_so_many_runs_a_day(tmp_path: Path) -> None:
    with running_api(tmp_path, runs_per_device_day=3) as api:
        greedy, modest = api.device(), api.device()
        token = greedy.token()
        made = [report(api, token) for _ in range(3)]
        again = {"run_id": made[0], "metrics": run_metrics()}
        assert api.post("/v1/runs", again, token).status_code == 200
        assert api.delete(f"/v1/runs/{made[1]}", token).status_code == 204
        more = {"run_id": new_run_id(), "metrics": run_metrics()}
        assert api.post("/v1/runs", more, token).status_code == 429
        assert api.post("/v1/runs", more, modest.token()).status_code == 201


@pytest.mark.attack(10, "fills the service with reports and logs over many days")
@pytest.mark.parametrize(
    "setting",
    [{}, {"upload_bytes_per_device": 2 * len(LAYER)}, {"runs_per_device": 2}],
)
def test_so_much_is_kept_of_a_device_and_no_more(
    tmp_path: Path, setting: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not setting:
        monkeypatch.setattr(settings, "UPLOADS_KEPT", 2)
    with running_api(tmp_path, **setting) as api:
        greedy, modest = api.device(), api.device()
        assert _sent(api, greedy) == [202, 202]
        token = greedy.token()
        storage = api.get("/v1/device", token).json()["storage"]
        assert (storage["reports"], storage["uploads"], storage["upload_bytes"]) == (2, 2, 2 * len(LAYER))
        held = [run["run_id"] for run in api.get("/v1/runs").json()["items"]]
        new = new_run_id()
        refused = api.post("/v1/runs", {"run_id": new, "metrics": run_metrics()}, token)
        if "runs_per_device" not in setting:
            assert refused.status_code == 201
            refused = put(api, new, LAYER, token)
        assert refused.json()["type"].endswith("/device-quota-spent"), refused.text
        assert refused.status_code == 409 and "of this device" in refused.json()["detail"]
        assert put(api, held[0], LAYER, token).status_code == 202, "what is here may be sent again"
        assert _sent(api, modest) == [202, 202]
        assert api.delete(f"/v1/runs/{held[1]}", token).status_code == 204
        assert put(api, report(api, token), LAYER, token).status_code == 202
        told = {one["id"]: one["storage"] for one in api.get("/v1/devices").json()["items"]}
        assert {told[one.id]["uploads"] for one in (greedy, modest)} == {2}
        assert told[greedy.id] == api.get(f"/v1/devices/{greedy.id}").json()["storage"]


def _sent(api: Api, device: TestDevice) -> list[int]:
    token = device.token()
    return [put(api, report(api, token), LAYER, token).status_code for _ in range(2)]


def _upload_of(api: Api, run_id: str) -> str:
    from permille.store import runs

    with api.service.database.read() as session:
        upload_id = runs.get(session, tenant_id=api.tenant_id, run_id=run_id).log_upload_id
    assert upload_id is not None
    return upload_id

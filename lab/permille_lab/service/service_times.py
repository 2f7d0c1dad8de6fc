"""Measure the service's downloads and a plain nginx's, and polls of 10,000 devices: `make bench-service`.

wrk measures over loopback on one machine. In each round, the contenders take turns. If the machine has other
load, the processor time of the serving processes is more reliable than requests per second. Cells are in
lab/results/service.jsonl. `make results` writes docs/results/service.md from them.
"""

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from sqlalchemy import func, insert, select

from permille.package.blobs import BlobFolder
from permille.store import access, devices
from permille.store.database import Database, now
from permille.store.ids import Prefix, hash_secret, new_device_token, new_id
from permille.store.tables import Artifact, ArtifactBlob, Device, DeviceToken, Tenant
from permille_lab.measuring.cells import RESULTS, Cells
from permille_lab.measuring.machine import machine
from tests.api_service import running_api
from tests.artifacts import add_package
from tests.fleet_site import RELEASE, publish_versions
from tests.packages import tiny_package
from tests.ports import free_port
from tests.running_service import Running, running_service
from tests.unit.store.postgres import postgres_url

DEPLOY = Path(__file__).parents[3] / "deploy"
SCRIPT = Path(__file__).with_name("service_load.lua")
ALIAS = f"/v1/releases/{RELEASE}/aliases/stable"
DOWNLOADS, DEVICES = 8, 10_000
ROUNDS, DOWNLOAD_S = 5, 4
POLL_CONNECTIONS, POLL_S, PAUSE_MS, MOST_POLLS = 100, 30, 300, 12
BLOB_BYTES = 64 << 20
TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server, requests to it, and the processes that serve them.

    Attributes:
        lines: file of the requests, see service_load.lua.
        processes: processes of the measured processor time.
    """

    url: str
    lines: Path
    processes: tuple[int, ...]


def main() -> int:
    """Measure the missing cells and print all cells."""
    cells = Cells(RESULTS / "service.jsonl")
    parts = {"statements": _statements, "polls": _polls}
    for name in ("sqlite", "postgresql"):
        for figure, measure in parts.items():
            with tempfile.TemporaryDirectory() as folder, database_url(name) as url:
                made = partial(measure, Path(folder), url)
                cells.once(figure, {"database": name}, made)
    with tempfile.TemporaryDirectory() as folder:
        cells.once("downloads", {"bytes": BLOB_BYTES}, partial(_downloads, Path(folder)))
    for figure, chosen, result in cells:
        print(figure, json.dumps(chosen), json.dumps(result))
    return 0


@contextmanager
def database_url(name: str) -> Iterator[str | None]:
    """Yield the URL of a database of this kind, None for the service's file."""
    if name == "sqlite":
        yield None
        return
    with postgres_url() as url:
        yield url


def _statements(folder: Path, url: str | None) -> dict[str, Any]:
    """Count the SQL statements of each request of a poll, and of some other reads."""
    named: dict[str, Any] = {} if url is None else {"database_url": url}
    with running_api(folder, **named) as api:
        package = api.package()
        api.publish(package, RELEASE)
        token = api.device(release=RELEASE).token()
        job = api.get("/v1/jobs").json()["items"][0]["id"]
        paths = {
            "alias, seen for the first time": (ALIAS, token),
            "alias": (ALIAS, token),
            "timestamp of the list of releases": ("/v1/trust/metadata/timestamp.json", token),
            "federations": ("/v1/device/federations", token),
            "manifest": (f"/v1/packages/{package.digest}/manifest", token),
            "job, by an operator": (f"/v1/jobs/{job}", None),
        }
        return {name: api.statements(path, caller) for name, (path, caller) in paths.items()}


def _downloads(folder: Path) -> dict[str, Any]:
    """Measure downloads of a blob from nginx, from nginx on behalf of the API, and from the API."""
    accel = {"PERMILLE_DOWNLOADS": "accel"}
    with (
        _service(folder / "serve", None) as (serving, its_rows),
        _service(folder / "accel", None, **accel) as (asking, their_rows),
    ):
        own, passed = _stock_blob(serving, its_rows), _stock_blob(asking, their_rows)
        blobs = asking.data_dir / "blobs"
        plain = "/plain/" + BlobFolder(blobs).path(passed.rpartition("/")[2]).relative_to(blobs).as_posix()
        with _nginx(folder, blobs, asking.url) as (url, processes):
            ways = {
                "nginx": (url, f"- {plain}", processes),
                "accel": (url, f"{asking.token} {passed}", (*processes, asking.api_pid)),
                "uvicorn": (serving.url, f"{serving.token} {own}", (serving.api_pid,)),
            }
            targets = {
                name: Target(url=where, lines=_lines(folder, name, [line]), processes=ids)
                for name, (where, line, ids) in ways.items()
            }
            return _rounds(targets)


def _polls(folder: Path, url: str | None) -> dict[str, Any]:
    """Measure polls of an alias by all devices, with random pauses, until the service has seen each one."""
    with _service(folder, url) as (running, database):
        _stock(running, database)
        tokens = _add_devices(database, DEVICES)
        left, seen, loads = tokens, 0, []
        own = (running.api_pid,)
        begun, used = time.monotonic(), _processor_s(own)
        for number in range(MOST_POLLS):
            # wrk may end before the last device. The others poll in the next round, or all if none is left.
            lines = _lines(folder, f"polls-{number}", [f"{token} {ALIAS}" for token in left])
            loads.append(_wrk(running.url, lines, POLL_CONNECTIONS, POLL_S, PAUSE_MS))
            left = left[loads[-1]["requests"] :] or tokens
            if (seen := _seen(database)) == DEVICES:
                break
        requests = sum(load["requests"] for load in loads)
        return {
            "devices": seen,
            "requests": requests,
            "failed": sum(load["failed"] for load in loads),
            "seconds": round(time.monotonic() - begun, 1),
            "p99_s": max(load["p99_s"] for load in loads),
            "cpu_us": round(1e6 * (_processor_s(own) - used) / requests),
            "machine": machine(),
        }


def _rounds(targets: Mapping[str, Target]) -> dict[str, Any]:
    """Return medians over rounds in which the contenders take turns. The first round warms up."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in targets}
    for number in range(ROUNDS + 1):
        for name, target in targets.items():
            used = _processor_s(target.processes)
            load = _wrk(target.url, target.lines, DOWNLOADS, DOWNLOAD_S)
            if load["failed"]:
                raise SystemExit(f"{load['failed']} requests to {name} failed.")
            used = _processor_s(target.processes) - used
            load["cpu_us"] = 1e6 * used / max(1, load["requests"])
            load["cpu_s_a_gb"] = 1e9 * used / max(1, load["bytes"])
            load["per_s"] = load["requests"] / load["seconds"]
            load["bytes_per_s"] = load["bytes"] / load["seconds"]
            if number:
                found[name].append(load)
            sys.stderr.write(f"  {name}: {load['per_s']:.0f} a second, {load['cpu_us']:.0f} us\n")
    kept = ("per_s", "bytes_per_s", "p50_s", "p99_s", "cpu_us", "cpu_s_a_gb")
    medians = {
        name: {key: round(statistics.median(load[key] for load in loads), 6) for key in kept}
        for name, loads in found.items()
    }
    return {"machine": machine(), "rounds": ROUNDS, **medians}


def _wrk(url: str, lines: Path, connections: int, seconds: int, pause_ms: int = 0) -> dict[str, Any]:
    command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "--latency", "--timeout", "30s"]
    command += ["-s", str(SCRIPT), url, "--", str(lines), str(pause_ms)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10 * seconds + 60)
    load: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return load


def _lines(folder: Path, name: str, lines: list[str]) -> Path:
    path = folder / f"{name}.txt"
    path.write_text("\n".join(lines) + "\n")
    return path


@contextmanager
def _service(folder: Path, url: str | None, **settings: str) -> Iterator[tuple[Running, Database]]:
    """Run a service without a worker. Yield the service and its database."""
    folder.mkdir(exist_ok=True)
    if url is not None:
        settings["PERMILLE_DATABASE_URL"] = url
    with running_service(folder, "--no-worker", **settings) as running:
        database = Database(url or f"sqlite:///{running.data_dir}/permille.db")
        yield running, database
        database.close()


@contextmanager
def _nginx(folder: Path, blobs: Path, api: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Run nginx with the configuration of deploy/nginx, but without TLS and with public blobs.

    Yield its address and its worker processes.
    """
    port = free_port()
    server = re.sub(r"\n *ssl_[^\n]*", "", (DEPLOY / "nginx/permille.conf").read_text())
    server = server.replace("listen 8443 ssl", f"listen 127.0.0.1:{port}")
    server = server.replace("server 127.0.0.1:8321", f"server {api.removeprefix('http://')}")
    server = server.replace("/var/lib/permille/blobs/", f"{blobs}/")
    sent = re.search(r"location /permille-blobs/ \{.*?\n    \}", server, re.DOTALL)
    assert sent is not None
    plain = sent[0].replace("/permille-blobs/", "/plain/").replace("internal;", "")
    temporary = " ".join(
        f"{name}_temp_path {folder}/{name};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    config = folder / "nginx.conf"
    config.write_text(
        f"{'user root;' if os.geteuid() == 0 else ''} worker_processes 1; pid {folder}/nginx.pid;"
        f"error_log stderr; events {{}} http {{ access_log off; {temporary}"
        f"{server.replace(sent[0], sent[0] + plain)} }}"
    )
    program = shutil.which("nginx") or "/usr/sbin/nginx"
    process = subprocess.Popen([program, "-p", str(folder), "-c", str(config), "-g", "daemon off;"])
    try:
        _wait_for(f"http://127.0.0.1:{port}/livez")
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        yield f"http://127.0.0.1:{port}", tuple(map(int, children))
    finally:
        process.terminate()
        process.wait(30)


def _wait_for(url: str) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            if httpx.get(url, trust_env=False).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        if time.monotonic() > deadline:
            raise TimeoutError(f"{url} did not answer within 60 seconds.")
        time.sleep(0.1)


def _processor_s(processes: tuple[int, ...]) -> float:
    """Return the processor seconds of these processes so far."""
    fields = (Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split() for one in processes)
    return sum(int(found[11]) + int(found[12]) for found in fields) / TICK


def _stock(running: Running, database: Database) -> str:
    """Publish a package under four versions of a release, and return its digest."""
    package = tiny_package(running.data_dir / "blobs")
    with database.write() as session:
        tenant = access.first_tenant(session)
        assert tenant is not None
        add_package(session, tenant_id=tenant.id, manifest=package.manifest)
        publish_versions(session, tenant_id=tenant.id, digest=package.digest)
    return package.digest


def _stock_blob(running: Running, database: Database) -> str:
    """Add a large blob to a package, and return its path in the API."""
    package = _stock(running, database)
    digest = BlobFolder(running.data_dir / "blobs").put_bytes(os.urandom(BLOB_BYTES))
    with database.write() as session:
        row = session.scalars(select(Artifact).where(Artifact.digest == package)).one()
        blob = ArtifactBlob(artifact_id=row.id, position=99, tenant_id=row.tenant_id, role="dense")
        blob.media_type, blob.digest, blob.size_bytes = "application/octet-stream", digest, BLOB_BYTES
        session.add(blob)
    return f"/v1/packages/{package}/blobs/{digest}"


def _add_devices(database: Database, count: int) -> list[str]:
    """Add devices that have never polled, and return their tokens."""
    secrets = [new_device_token() for _ in range(count)]
    with database.write() as session:
        tenant_id, at = session.scalars(select(Tenant.id).limit(1)).one(), now(session)
        own = {"tenant_id": tenant_id, "created_at": at}
        ids = [new_id(Prefix.DEVICE) for _ in secrets]
        rows = [
            {**own, "id": one, "public_key": one, "name": "device", "release": RELEASE, "alias": "stable"}
            for one in ids
        ]
        session.execute(insert(Device), rows)
        until = at + devices.TOKEN_LIFE
        session.execute(
            insert(DeviceToken),
            [
                {**own, "token_hash": hash_secret(secret), "device_id": one, "expires_at": until}
                for one, secret in zip(ids, secrets, strict=True)
            ],
        )
    return secrets


def _seen(database: Database) -> int:
    with database.read() as session:
        query = select(func.count()).where(Device.last_seen_at.is_not(None), Device.version.is_not(None))
        return session.scalar(query) or 0


if __name__ == "__main__":
    sys.exit(main())

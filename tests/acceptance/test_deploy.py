"""The files in deploy/ are valid for their own tools. Settings and metrics that they name exist."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from json import JSONDecodeError
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
import yaml

from permille.store.database import make_engine
from permille.version import __version__
from permille_service.settings import Settings
from permille_workers.runtime.settings import WorkerSettings
from tests.api_service import Api, running_api
from tests.chart import CHART, REQUIRED, ChartError, render
from tests.ports import free_port
from tests.running_service import UP, environment

DEPLOY = Path(__file__).parents[2] / "deploy"
SECRETS = {
    "POSTGRES_PASSWORD": "p",
    "WORKER_PASSWORD": "w",
    "METRICS_TOKEN": "m",
    "GRAFANA_PASSWORD": "g",
    "HOST": "models.example.org",
}


def run(*command: str, **more: str) -> str:
    """Run a tool that must succeed. Return its output."""
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=120, env={**os.environ, **more}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_docker_compose_reads_the_compose_file() -> None:
    told = run("docker-compose", "-f", str(DEPLOY / "compose/compose.yaml"), "config", **SECRETS)
    services = yaml.safe_load(told)["services"]
    assert set(services) == {"postgres", "redis", "net", "api", "worker", "nginx", "prometheus", "grafana"}
    assert (
        services["api"]["environment"]["PERMILLE_DATABASE_URL"]
        == "postgresql+psycopg://permille:p@postgres/permille"
    )
    for service in services.values():
        for volume in service.get("volumes", ()):
            source = volume if isinstance(volume, str) else volume["source"]
            mounted = Path(source.partition(":")[0])
            if mounted.is_absolute() and mounted.parts[-2] not in ("tls", "secrets", "compose"):
                assert mounted.is_file(), mounted


def test_what_starts_jobs_collects_the_children_that_they_leave() -> None:
    """The first process of a container inherits orphans, and Python does not wait for them."""
    told = run("docker-compose", "-f", str(DEPLOY / "compose/compose.yaml"), "config", **SECRETS)
    services = yaml.safe_load(told)["services"]
    assert all(services[name]["init"] for name in ("api", "worker"))
    pod = render(REQUIRED)["Deployment", "permille-worker"]["spec"]["template"]["spec"]
    assert pod["shareProcessNamespace"] is True


def test_the_database_is_asked_as_the_api_asks_it() -> None:
    """The image first starts a server that has a Unix socket only."""
    told = run("docker-compose", "-f", str(DEPLOY / "compose/compose.yaml"), "config", **SECRETS)
    assert "127.0.0.1" in yaml.safe_load(told)["services"]["postgres"]["healthcheck"]["test"]


def test_no_container_shares_the_network_of_one_that_is_replaced() -> None:
    """A container that joined the network of another one loses it when that one is started again."""
    told = run("docker-compose", "-f", str(DEPLOY / "compose/compose.yaml"), "config", **SECRETS)
    services = yaml.safe_load(told)["services"]
    owners = {mode.removeprefix("service:") for one in services.values() if (mode := one.get("network_mode"))}
    assert owners == {"net"}
    # It has no code, settings or files of ours, so no upgrade replaces it.
    assert services["net"].keys() <= {"image", "command", "init", "restart", "ports", "networks"}
    for name, service in services.items():
        if service.get("network_mode"):
            assert "ports" not in service, name
            assert "net" in service["depends_on"], name


@pytest.mark.slow
def test_systemd_reads_the_units(tmp_path: Path) -> None:
    for unit in (DEPLOY / "systemd").glob("*.service"):
        name = unit.name.replace("@", "@1")
        words = unit.read_text().replace("/opt/permille/bin/permille-agent", sys.executable)
        (tmp_path / name).write_text(words.replace("/opt/permille/bin/python", sys.executable))
        assert run("systemd-analyze", "verify", "--man=no", str(tmp_path / name)) == ""


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Return a new key and its certificate."""
    key, certificate = folder / "key.pem", folder / "cert.pem"
    run(
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
        "-subj", "/CN=localhost", "-keyout", str(key), "-out", str(certificate),
    )  # fmt: skip
    return key, certificate


@contextmanager
def nginx(folder: Path, blob_root: Path) -> Iterator[httpx.Client]:
    """Run nginx with our configuration, on sockets in `folder`. The API must listen there on api.sock."""
    make_certificate(folder)
    server = (DEPLOY / "nginx/permille.conf").read_text().replace("/etc/permille/tls", str(folder))
    server = server.replace("server 127.0.0.1:8321", f"server unix:{folder}/api.sock")
    server = server.replace("listen 8443 ssl", f"listen unix:{folder}/nginx.sock ssl")
    server = server.replace("/var/lib/permille/blobs/", f"{blob_root}/")
    temporary = " ".join(
        f"{name}_temp_path {folder}/{name};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    whole = f"pid {folder}/pid; error_log stderr; daemon off; master_process off; events {{}}"
    whole += f" http {{ access_log off; {temporary} {server} }}"
    (folder / "nginx.conf").write_text(whole)
    command = (
        shutil.which("nginx") or "/usr/sbin/nginx",
        "-p",
        str(folder),
        "-c",
        str(folder / "nginx.conf"),
    )
    assert "test is successful" in run(*command, "-t")
    with subprocess.Popen(command) as process:
        try:
            with socket.socket(socket.AF_UNIX) as probe:
                while probe.connect_ex(str(folder / "nginx.sock")):
                    assert process.poll() is None
                    time.sleep(0.02)
            transport = httpx.HTTPTransport(uds=str(folder / "nginx.sock"), verify=False)
            with httpx.Client(transport=transport, base_url="https://127.0.0.1", timeout=60) as client:
                yield client
        finally:
            process.terminate()


@pytest.mark.slow
def test_nginx_sends_what_the_api_lets_it(tmp_path: Path) -> None:
    """Ranges and conditions work as without nginx. The internal location is not reachable from outside."""
    with running_api(tmp_path, downloads="accel") as api, nginx_of(api) as client:
        package = api.package()
        api.publish(package)
        layer = max(package.manifest.layers, key=lambda layer: layer.size_bytes)
        data = package.blobs.read(layer.digest, limit=layer.size_bytes)
        path, etag = f"/v1/packages/{package.digest}/blobs/{layer.digest}", f'"{layer.digest}"'
        token = api.auth(api.device().token())
        for headers, status, body in (
            ({}, 200, data),
            ({"Range": "bytes=10-19"}, 206, data[10:20]),
            ({"Range": "bytes=10-", "If-Range": etag}, 206, data[10:]),
            ({"Range": "bytes=10-", "If-Range": '"other"'}, 200, data),
            ({"If-Match": etag}, 200, data),
            ({"If-None-Match": etag}, 304, b""),
        ):
            found = client.get(path, headers={**token, **headers})
            assert (found.status_code, found.content, found.headers["etag"]) == (status, body, etag), headers
            assert "immutable" in found.headers["cache-control"]
        assert client.head(path, headers=token).headers["content-length"] == str(len(data))
        assert client.get(path).status_code == 401
        inside = package.blobs.path(layer.digest).relative_to(package.blobs.root)
        assert client.get(f"/permille-blobs/{inside}", headers=token).status_code == 404
        assert api.get(path).headers["x-accel-redirect"] == f"/permille-blobs/{inside}"


@contextmanager
def nginx_of(api: Api) -> Iterator[httpx.Client]:
    """Run nginx in front of this API, both on sockets in a temporary folder with a short name."""
    with tempfile.TemporaryDirectory(prefix="nginx") as name:
        config = uvicorn.Config(api.client.app, uds=f"{name}/api.sock", lifespan="off", log_config=None)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive()
                time.sleep(0.02)
            with nginx(Path(name), api.service.settings.blob_root) as client:
                yield client
        finally:
            server.should_exit = True
            thread.join(60)


@pytest.mark.slow
def test_prometheus_reads_its_files_and_the_alerts_fire(tmp_path: Path) -> None:
    for file in (DEPLOY / "prometheus").iterdir():
        shutil.copy(file, tmp_path)
    (tmp_path / "metrics_token").write_text("token")
    run("promtool", "check", "config", str(tmp_path / "prometheus.yml"))
    assert "SUCCESS" in run("promtool", "test", "rules", str(tmp_path / "alerts_test.yml"))


@pytest.mark.slow
@pytest.mark.attack(16, "Prometheus' token is wrong, or /metrics is asked for from outside")
def test_prometheus_scrapes_the_api_as_compose_starts_it(tmp_path: Path) -> None:
    """Run Prometheus with our configuration, and an API with the arguments and settings of compose."""
    told = run("docker-compose", "-f", str(DEPLOY / "compose/compose.yaml"), "config", **SECRETS)
    services = yaml.safe_load(told)["services"]
    for name in ("api", "nginx", "prometheus"):  # They share a network, so the API is on their loopback.
        assert services[name]["network_mode"] == "service:net"
    port, own = free_port(), free_port()
    settings = {name: value for name, value in services["api"]["environment"].items() if value}
    assert settings.pop("PERMILLE_WORKER_ROLE") in services["worker"]["environment"]["PERMILLE_DATABASE_URL"]
    settings |= {
        "PERMILLE_PRIVATE_DIR": str(tmp_path / "private"),
        "PERMILLE_DATABASE_URL": f"sqlite:///{tmp_path}/permille.db",
        "PERMILLE_PORT": str(port),
    }
    arguments = [
        argument.replace("/var/lib/permille", str(tmp_path / "data"))
        for argument in services["api"]["command"]
    ]
    configured = (DEPLOY / "prometheus/prometheus.yml").read_text()
    assert "127.0.0.1:8321" in configured
    short = configured.replace("127.0.0.1:8321", f"127.0.0.1:{port}").replace("interval: 15s", "interval: 1s")
    (tmp_path / "prometheus.yml").write_text(short)
    shutil.copy(DEPLOY / "prometheus/alerts.yml", tmp_path)
    (tmp_path / "metrics_token").write_text("guess")
    prometheus = [
        "prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/rows",
        f"--web.listen-address=127.0.0.1:{own}", "--log.level=error",
    ]  # fmt: skip
    with (
        process([*UP[:3], *arguments], env=environment(**settings)),
        process(prometheus, cwd=tmp_path),
        httpx.Client(base_url=f"http://127.0.0.1:{own}", trust_env=False) as client,
    ):
        # The code 401 shows that the token is the reason, not an API that still starts.
        wait_for_target(client, "down", "401")
        (tmp_path / "metrics_token").write_text(SECRETS["METRICS_TOKEN"])
        wait_for_target(client, "up", "")
        query = {"query": "permille_queue_age_longest_seconds"}
        found = client.get("/api/v1/query", params=query).json()["data"]["result"]
        assert [one["value"][1] for one in found] == ["0"]


def wait_for_target(client: httpx.Client, health: str, error: str) -> None:
    """Wait until Prometheus reports this health and error of the API."""
    until, targets = time.monotonic() + 120, list[dict[str, Any]]()
    while time.monotonic() < until:
        time.sleep(0.2)
        with suppress(httpx.TransportError, KeyError, JSONDecodeError):  # Prometheus may still start
            targets = client.get("/api/v1/targets").json()["data"]["activeTargets"]
            found = [one for one in targets if one["labels"]["job"] == "permille-api"]
            if any(one["health"] == health and error in one["lastError"] for one in found):
                return
    raise AssertionError(f"expected a target that is {health}, got {targets}")


@contextmanager
def process(command: list[str], **options: Any) -> Iterator[None]:
    with subprocess.Popen(command, **options) as running:
        try:
            yield
        finally:
            running.terminate()
            running.wait(60)


def test_helm_finds_no_fault_in_the_chart() -> None:
    assert "1 chart(s) linted, 0 chart(s) failed" in run("helm", "lint", "--strict", str(CHART))


def test_the_chart_has_the_version_of_the_project() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (__version__, __version__)


GPU = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
TOKEN = {"secretKeyRef": {"key": "token", "name": "hub"}}
BUCKET = "s3://my-blobs/permille?region=eu-central-1"
DIGEST = f"sha256:{'5a' * 32}"
# A value for each leaf of values.yaml, an object that it changes, and what is then in this object.
CHANGES: dict[str, tuple[Any, str, str]] = {
    "secrets.service": (
        "s",
        "Deployment/permille-worker",
        "'secretKeyRef': {'key': 'broker-url', 'name': 's'}",
    ),
    "secrets.tls": ("t", "Deployment/permille-api", "'secret': {'secretName': 't'}"),
    "hosts": (["a.org", "b.org"], "Deployment/permille-api", '\'["a.org","b.org","permille-api",'),
    "images.registry": ("r.org/p", "Deployment/permille-worker", "'r.org/p/permille-worker:v"),
    "images.tag": ("9", "Job/permille-migration", "/permille-api:9'"),
    "images.digests.api": (DIGEST, "Deployment/permille-api", f"/permille-api@{DIGEST}'"),
    "images.digests.worker": (DIGEST, "Deployment/permille-worker", f"/permille-worker@{DIGEST}'"),
    "images.pullPolicy": ("Always", "Job/permille-migration", "'imagePullPolicy': 'Always'"),
    "images.pullSecrets": (["p"], "Deployment/permille-api", "'imagePullSecrets': [{'name': 'p'}]"),
    "serviceAccount": ("a", "Deployment/permille-worker", "'serviceAccountName': 'a'"),
    "storage.data.claim": ("1", "Deployment/permille-worker", "{'claimName': '1'}"),
    "storage.data.class": ("c", "PersistentVolumeClaim/permille-data", "'storageClassName': 'c'"),
    "storage.data.size": ("3Gi", "PersistentVolumeClaim/permille-data", "{'storage': '3Gi'}"),
    "storage.private.claim": ("p", "Deployment/permille-api", "{'claimName': 'p'}"),
    "storage.private.class": ("c", "PersistentVolumeClaim/permille-private", "'storageClassName': 'c'"),
    "storage.private.size": ("3Gi", "PersistentVolumeClaim/permille-private", "{'storage': '3Gi'}"),
    "bucket.url": (BUCKET, "Deployment/permille-api", f"'name': 'PERMILLE_BLOB_BUCKET', 'value': '{BUCKET}'"),
    "bucket.root": ("/c", "Deployment/permille-worker", "{'name': 'copies', 'mountPath': '/c'}"),
    "env": ({"HF_TOKEN": TOKEN}, "Job/permille-migration", f"{{'name': 'HF_TOKEN', 'valueFrom': {TOKEN}}}"),
    "api.replicas": (3, "Deployment/permille-api", "'replicas': 3"),
    "api.service.type": ("LoadBalancer", "Service/permille-api", "'type': 'LoadBalancer'"),
    "api.service.annotations": ({"a": "b"}, "Service/permille-api", "'annotations': {'a': 'b'}"),
    "api.resources": ({"limits": {"memory": "3Gi"}}, "Deployment/permille-api", "'memory': '3Gi'"),
    "api.env": ({"A": "7"}, "Deployment/permille-api", "{'name': 'A', 'value': '7'}"),
    "worker.role": ("r", "Job/permille-migration", "{'name': 'PERMILLE_WORKER_ROLE', 'value': 'r'}"),
    "worker.scaling.enabled": (False, "Deployment/permille-worker", "'replicas': 1"),
    "worker.scaling.min": (2, "HorizontalPodAutoscaler/permille-worker", "'minReplicas': 2"),
    "worker.scaling.max": (9, "HorizontalPodAutoscaler/permille-worker", "'maxReplicas': 9"),
    "worker.replicas": (4, "Deployment/permille-worker", "'replicas': 4"),
    "worker.resources": ({"limits": {GPU["key"]: 1}}, "Deployment/permille-worker", "'nvidia.com/gpu': 1"),
    "worker.nodeSelector": ({"gpu": "yes"}, "Deployment/permille-worker", "'nodeSelector': {'gpu': 'yes'}"),
    "worker.tolerations": ([GPU], "Deployment/permille-worker", "'tolerations': [{'effect': 'NoSchedule'"),
    "worker.env": ({"A": "7"}, "Deployment/permille-worker", "{'name': 'A', 'value': '7'}"),
}
# Values without which another one has no effect.
ALSO: dict[str, dict[str, Any]] = {
    "bucket.root": {"bucket": {"url": BUCKET}},
    "worker.replicas": {"worker": {"scaling": {"enabled": False}}},
}


def nested(path: str, value: object) -> dict[str, Any]:
    for key in reversed(path.split(".")):
        value = {key: value}
    assert isinstance(value, dict)
    return value


def merged(values: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    both = {
        key: merged(values[key], more[key]) for key in values.keys() & more if isinstance(more[key], dict)
    }
    return {**values, **more, **both}


def leaves(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, dict) and value and key not in ("env", "resources"):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


@pytest.mark.slow
def test_each_value_of_the_chart_changes_what_it_says() -> None:
    usual = render(REQUIRED)
    assert sorted(CHANGES) == sorted(leaves(yaml.safe_load((CHART / "values.yaml").read_text())))
    for path, (value, place, expected) in CHANGES.items():
        kind, _, name = place.partition("/")
        assert expected not in str(usual[kind, name]), path
        values = merged(merged(REQUIRED, ALSO.get(path, {})), nested(path, value))
        assert expected in str(render(values)[kind, name]), path


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"hosts": []}, "Set hosts to the names under which clients reach the API"),
        ({"hosts": [""]}, "Set hosts to the names under which clients reach the API"),
        ({"images": {"registry": ""}}, "Set images.registry to the registry"),
        ({"env": {"PERMILLE_DATABASE_URL": "x"}}, "The chart sets PERMILLE_DATABASE_URL itself"),
        ({"worker": {"env": {"PERMILLE_DATA_DIR": "x"}}}, "The chart sets PERMILLE_DATA_DIR itself"),
        # YAML reads these as numbers, and Helm would print them as 1.1 and 2e+07.
        ({"images": {"tag": 1.10}}, "at '/images/tag': got number, want string"),
        ({"env": {"PERMILLE_BLOB_CACHE_BYTES": 20_000_000}}, "at '/env/PERMILLE_BLOB_CACHE_BYTES'"),
        ({"replicas": 2}, "additional properties 'replicas' not allowed"),
        ({"worker": {"scaling": {"min": 0}}}, "at '/worker/scaling/min': minimum"),
    ],
)
def test_wrong_values_of_the_chart_are_named(values: dict[str, Any], expected: str) -> None:
    with pytest.raises(ChartError, match=re.escape(expected)):
        render(merged(REQUIRED, values))


def all_changed() -> dict[str, Any]:
    """Return values of the chart that all differ from its own."""
    values: dict[str, Any] = REQUIRED
    for path, (value, _, _) in CHANGES.items():
        values = merged(values, nested(path, value))
    return values


def test_no_pod_of_the_chart_can_become_root_or_ask_kubernetes() -> None:
    for values in (REQUIRED, all_changed()):
        pods = [
            found["spec"]["template"]["spec"]
            for found in render(values).values()
            if "template" in found["spec"]
        ]
        assert len(pods) == 3
        for pod in pods:
            assert pod["automountServiceAccountToken"] is False
            identity = pod["securityContext"].pop("fsGroup", 10001), pod["securityContext"].pop("runAsUser")
            assert identity == (10001, 10001)
            assert pod["securityContext"].pop("fsGroupChangePolicy", "OnRootMismatch") == "OnRootMismatch"
            assert pod["securityContext"] == {
                "runAsNonRoot": True,
                "seccompProfile": {"type": "RuntimeDefault"},
            }
            [container] = pod["containers"]
            rights = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
            assert container["securityContext"] == rights


@pytest.mark.slow
def test_kubernetes_takes_what_the_chart_makes() -> None:
    import kubernetes_validate  # slow, so not at each start of the tests

    usual = render(REQUIRED)
    for objects in (usual, render(all_changed(), release="other")):
        for one in objects.values():
            kubernetes_validate.validate(one, "1.32", strict=True)
    assert sorted({kind for kind, _ in usual}) == [
        "Deployment", "HorizontalPodAutoscaler", "Job", "PersistentVolumeClaim", "PodDisruptionBudget",
        "Service",
    ]  # fmt: skip


def test_two_releases_share_no_object_and_select_only_their_own_pods() -> None:
    one, other = render(REQUIRED, release="permille"), render(REQUIRED, release="second")
    assert not one.keys() & other.keys()
    for objects in (one, other):
        labels = {
            name: deployment["spec"]["template"]["metadata"]["labels"]
            for (kind, name), deployment in objects.items()
            if kind == "Deployment"
        }
        for (kind, name), found in objects.items():
            if kind in ("Deployment", "PodDisruptionBudget"):
                assert found["spec"]["selector"]["matchLabels"] == labels[name]
            if kind == "Service":
                assert found["spec"]["selector"] == labels[name]
    assert one["Service", "permille-api"]["spec"] != other["Service", "second-permille-api"]["spec"]
    assert ("Service", f"{'long-' * 10}api") in render(REQUIRED, release=f"{'long-' * 10}x")
    assert ("Service", "team-one-permille-api") in render(REQUIRED, release="team.one")


def test_the_migration_needs_nothing_that_the_chart_makes() -> None:
    """Helm runs it before it makes or changes any other object."""
    [job] = [one for (kind, _), one in render(REQUIRED).items() if kind == "Job"]
    assert job["metadata"]["annotations"] == {
        "helm.sh/hook": "pre-install,pre-upgrade",
        "helm.sh/hook-delete-policy": "before-hook-creation",  # its template cannot change
    }
    pod = job["spec"]["template"]["spec"]
    [container] = pod["containers"]
    sources = [one["valueFrom"]["secretKeyRef"]["name"] for one in container["env"] if "valueFrom" in one]
    assert sources == ["permille-secrets"]
    assert pod["serviceAccountName"] == "default"
    assert not {"volumes", "initContainers"} & pod.keys()
    assert not {"envFrom", "volumeMounts"} & container.keys()


def test_the_chart_can_be_upgraded_and_a_node_can_be_drained() -> None:
    objects = render(REQUIRED)
    assert objects["PodDisruptionBudget", "permille-api"]["spec"]["maxUnavailable"] >= 1
    target = objects["HorizontalPodAutoscaler", "permille-worker"]["spec"]["scaleTargetRef"]
    # A number here would undo the decisions of the autoscaler.
    assert "replicas" not in objects[target["kind"], target["name"]]["spec"]
    for (kind, _), one in objects.items():
        if kind == "PersistentVolumeClaim":
            assert one["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}


@pytest.mark.slow
def test_the_api_starts_as_in_a_pod_and_answers_the_probes(tmp_path: Path) -> None:
    """Only folders, port, certificate, database and broker are those of the test."""
    deployment = render(REQUIRED)["Deployment", "permille-api"]
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    settings = {one["name"]: one.get("value", "a-secret") for one in container["env"]}
    port = str(free_port())
    tls = make_certificate(tmp_path)
    for name, value in settings.items():
        settings[name] = re.sub("^/var/lib", str(tmp_path), value)
    del settings["PERMILLE_BROKER_URL"], settings["PERMILLE_WORKER_ROLE"]  # Redis and PostgreSQL
    settings |= dict(zip(("PERMILLE_TLS_KEY", "PERMILLE_TLS_CERTIFICATE"), map(str, tls), strict=True))
    settings |= {"PERMILLE_DATABASE_URL": f"sqlite:///{tmp_path}/permille.db", "PERMILLE_PORT": port}
    (tmp_path / "permille").mkdir()
    with process([sys.executable, *container["command"][1:]], env=environment(**settings)):
        for name in ("startupProbe", "livenessProbe", "readinessProbe"):
            probe = [word.replace("8321", port) for word in container[name]["exec"]["command"]]
            until = time.monotonic() + 120
            while subprocess.run([sys.executable, *probe[1:]], capture_output=True, check=False).returncode:
                assert time.monotonic() < until, name
        with httpx.Client(base_url=f"https://127.0.0.1:{port}", verify=False, trust_env=False) as client:
            inside = ("permille-api", "permille-api.default", "permille-api.default.svc")
            for host, status in (
                *dict.fromkeys(("models.example.org", *inside), 200).items(),
                ("example.net", 421),
            ):
                assert client.get("/livez", headers={"Host": host}).status_code == status, host
    assert (tmp_path / "permille-private/own/operator.token").is_file()


@pytest.mark.parametrize("release", ["permille", "mine"])
def test_the_notes_of_the_chart_lead_to_the_first_token(release: str) -> None:
    options = [f"--set=hosts={{{REQUIRED['hosts'][0]}}}", "--set=images.registry=r.org"]
    told = run("helm", "install", release, str(CHART), "--dry-run=client", "--namespace", "models", *options)
    api = "permille-api" if release == "permille" else f"{release}-permille-api"
    [container] = render(REQUIRED, release=release)["Deployment", api]["spec"]["template"]["spec"][
        "containers"
    ]
    settings = {one["name"]: one.get("value") for one in container["env"]}
    token = f"{settings['PERMILLE_PRIVATE_DIR']}/operator.token"
    assert "https://models.example.org" in told
    assert f"kubectl --namespace models exec deployment/{api} -- cat {token}" in told


def test_every_setting_that_is_named_exists() -> None:
    known = {f"PERMILLE_{name}".upper() for name in (*Settings.model_fields, *WorkerSettings.model_fields)}
    texts = [file.read_text() for file in DEPLOY.rglob("*") if file.is_file() and "agent" not in file.name]
    named = {name for text in texts for name in re.findall(r"PERMILLE_[A-Z_]+", text)}
    assert len(named) > 8
    assert named <= known


def test_every_number_that_is_asked_for_is_told() -> None:
    sources = [
        Path(__file__).parents[2] / name
        for name in (
            "service/permille_service/observing.py",
            "extensions/permille_rollouts/service/extension.py",
            "workers/permille_workers/runtime/metrics.py",
        )
    ]
    told = {name for source in sources for name in re.findall(r'"(permille_[a-z_]+)"', source.read_text())}
    dashboard = json.loads((DEPLOY / "grafana/permille.json").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked.append((DEPLOY / "prometheus/alerts.yml").read_text())
    asked.append((CHART / "templates/scaling.yaml").read_text())
    named = {name for text in asked for name in re.findall(r"permille_[a-z_]+", text)}
    assert len(named) > 6
    assert {re.sub(r"_(total|count|bucket)$", "", name) for name in named} <= told


def test_a_schema_is_made_by_a_command_of_its_own(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "permille.store.migrations.schema"]
    url = f"sqlite:///{tmp_path / 'permille.db'}"
    settings = environment(PERMILLE_DATA_DIR=str(tmp_path), PERMILLE_DATABASE_URL=url)
    for _ in range(2):
        subprocess.run(command, env=settings, check=True, timeout=120)
    with make_engine(url).connect() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM jobs").scalar() == 0
    refused = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=120, check=False
    )
    assert refused.returncode == 2
    assert "set PERMILLE_DATABASE_URL" in refused.stderr

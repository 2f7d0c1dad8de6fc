"""What stands in deploy/ is what its own tools accept, and names settings and numbers that exist."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml

from permille.store.database import make_engine
from permille_service.settings import Settings
from permille_workers.runtime.settings import WorkerSettings
from tests.running_service import environment

DEPLOY = Path(__file__).parents[2] / "deploy"
SECRETS = {
    "POSTGRES_PASSWORD": "p",
    "METRICS_TOKEN": "m",
    "GRAFANA_PASSWORD": "g",
    "HOST": "models.example.org",
}


def run(*command: str, **more: str) -> str:
    """The output of a tool that must succeed."""
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=120, env={**os.environ, **more}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_docker_compose_reads_the_compose_file() -> None:
    told = run("docker-compose", "-f", str(DEPLOY / "compose/compose.yaml"), "config", **SECRETS)
    services = yaml.safe_load(told)["services"]
    assert set(services) == {"postgres", "redis", "api", "worker", "nginx", "prometheus", "grafana"}
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


def test_systemd_reads_the_units(tmp_path: Path) -> None:
    for unit in (DEPLOY / "systemd").glob("*.service"):
        name = unit.name.replace("@", "@1")
        words = unit.read_text().replace("/opt/permille/bin/permille-agent", sys.executable)
        (tmp_path / name).write_text(words.replace("/opt/permille/bin/python", sys.executable))
        assert run("systemd-analyze", "verify", "--man=no", str(tmp_path / name)) == ""


def test_nginx_reads_its_configuration(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    run(
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
        "-subj", "/CN=localhost", "-keyout", str(key), "-out", str(certificate),
    )  # fmt: skip
    server = (DEPLOY / "nginx/permille.conf").read_text().replace("/etc/permille/tls", str(tmp_path))
    whole = f"pid {tmp_path}/pid; error_log stderr; events {{}} http {{ access_log off; {server} }}"
    (tmp_path / "nginx.conf").write_text(whole)
    nginx = shutil.which("nginx") or "/usr/sbin/nginx"
    assert "test is successful" in run(nginx, "-t", "-p", str(tmp_path), "-c", str(tmp_path / "nginx.conf"))


def test_prometheus_reads_its_files_and_the_alerts_fire(tmp_path: Path) -> None:
    for file in (DEPLOY / "prometheus").iterdir():
        shutil.copy(file, tmp_path)
    (tmp_path / "metrics_token").write_text("token")
    run("promtool", "check", "config", str(tmp_path / "prometheus.yml"))
    assert "SUCCESS" in run("promtool", "test", "rules", str(tmp_path / "alerts_test.yml"))


def test_kubernetes_takes_the_manifests() -> None:
    kinds = []
    for document in _manifests():
        kubernetes_validate.validate(document, "1.32", strict=True)
        kinds.append(document["kind"])
    assert sorted(set(kinds)) == [
        "ConfigMap", "Deployment", "HorizontalPodAutoscaler", "Job", "PersistentVolumeClaim",
        "PodDisruptionBudget", "Service",
    ]  # fmt: skip


def test_every_setting_that_is_named_exists() -> None:
    known = {f"PERMILLE_{name}".upper() for name in (*Settings.model_fields, *WorkerSettings.model_fields)}
    texts = [file.read_text() for file in DEPLOY.rglob("*") if file.is_file() and "agent" not in file.name]
    named = {name for text in texts for name in re.findall(r"PERMILLE_[A-Z_]+", text)}
    assert len(named) > 8
    assert named <= known


def test_every_number_that_is_asked_for_is_told() -> None:
    sources = [
        Path(__file__).parents[2] / name
        for name in ("service/permille_service/observing.py", "workers/permille_workers/runtime/metrics.py")
    ]
    told = {name for source in sources for name in re.findall(r'"(permille_[a-z_]+)"', source.read_text())}
    dashboard = json.loads((DEPLOY / "grafana/permille.json").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked.append((DEPLOY / "prometheus/alerts.yml").read_text())
    asked.append((DEPLOY / "kubernetes/scaling.yaml").read_text())
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
    assert "expected PERMILLE_DATABASE_URL" in refused.stderr


def _manifests() -> Iterator[dict[str, Any]]:
    for file in sorted((DEPLOY / "kubernetes").glob("*.yaml")):
        yield from yaml.safe_load_all(file.read_text())

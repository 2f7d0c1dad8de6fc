"""Tests of a worker's settings: the same data folder as the API, and one-line errors."""

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from permille.errors import OperatorError
from permille.pipeline.score import Compute
from permille.store.settings import explain
from permille_service.settings import load
from permille_workers.runtime.settings import WorkerSettings
from tests.running_service import environment

SHARED = ("database_url", "blob_root", "model_root", "corpus_root", "tenant_root", "work_root")


def test_worker_and_service_derive_the_same_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERMILLE_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("PERMILLE_CORPUS_ROOT", str(tmp_path / "texts"))
    worker, service = WorkerSettings.model_validate({}), load()
    assert [getattr(worker, name) for name in SHARED] == [getattr(service, name) for name in SHARED]
    assert worker.blob_root == tmp_path / "blobs"
    assert worker.corpus_root == tmp_path / "texts"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "set PERMILLE_DATABASE_URL, PERMILLE_BLOB_ROOT, PERMILLE_MODEL_ROOT"),
        ({"PERMILLE_DATA_DIR": "/nowhere", "PERMILLE_LEASE_S": "0"}, "PERMILLE_LEASE_S: "),
    ],
)
def test_worker_that_misses_a_setting_says_so_in_one_line(settings: dict[str, str], expected: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "permille_workers"],
        capture_output=True,
        text=True,
        env=environment(**settings),
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"permille: {expected}")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("DATABASE_URL", "postgres://me:s3cret@host/x", "A URL of 'postgres' cannot be used. Write "),
        ("DATABASE_URL", "s3cret", "This is no URL of a database"),
        ("BROKER_URL", "s3cret", "Write redis://host:6379/0"),
        ("BROKER_URL", "amqp://me:s3cret@host//", "Write redis://host:6379/0"),
        ("BROKER_URL", "redis://:s3cret@host:s3cret/0", "Write redis://host:6379/0"),
        ("BROKER_URL", "redis://host/s3cret", "Write redis://host:6379/0"),
        ("BROKER_URL", "redis:///0", "Write redis://host:6379/0"),
        ("BROKER_URL", "redis://:s3cret@host/0?socket_timeout=5", "'socket_timeout' is not an option"),
        ("BROKER_URL", "rediss://:s3cret@host/0?ssl_cert_reqs=s3cret", "'ssl_cert_reqs' is not an option"),
        ("KEEPER_TOKEN", "s3cret\nHost: other", "A token consists of letters"),
        ("KEEPER_TOKEN", "s3crét", "A token consists of letters"),
        ("LEASE_S", "inf", "finite number"),
        ("POLL_S", "nan", "finite number"),
        ("SWEEP_S", "1e12", "less than or equal to 1000000000"),
        ("COLLECT_EVERY_S", "1e300", "less than or equal to 1000000000"),
    ],
)
def test_an_odd_setting_is_one_line_with_its_name_and_without_its_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, words: str
) -> None:
    monkeypatch.setenv("PERMILLE_DATA_DIR", str(tmp_path))
    monkeypatch.setenv(f"PERMILLE_{variable}", value)
    with pytest.raises(ValidationError) as refused:
        WorkerSettings.model_validate({})
    line = explain(refused.value)
    assert line.startswith(f"PERMILLE_{variable}: ")
    assert words in line
    assert "s3cr" not in line
    assert "\n" not in line


def test_white_space_around_a_setting_is_removed_and_an_empty_one_is_unset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of secrets often end with a newline. Compose files set empty variables."""
    for name, value in (
        ("DATA_DIR", f"{tmp_path}\n"),
        ("DATABASE_URL", " postgresql+psycopg://me:s3cret@host/x\n"),
        ("KEEPER_TOKEN", "s3cret\r\n"),
        ("WORK_ROOT", f"{tmp_path / 'work'}\n"),
        ("BROKER_URL", ""),
        ("LEASE_S", "45\n"),
        ("DEVICE", ""),
    ):
        monkeypatch.setenv(f"PERMILLE_{name}", value)
    settings = WorkerSettings.model_validate({})
    assert settings.database_url.get_secret_value() == "postgresql+psycopg://me:s3cret@host/x"
    assert settings.keeper_token is not None
    assert settings.keeper_token.get_secret_value() == "s3cret"
    assert (settings.blob_root, settings.work_root) == (tmp_path / "blobs", tmp_path / "work")
    assert (settings.broker_url, settings.lease_s, settings.device) == (None, 45, "cpu")


@pytest.mark.parametrize(
    "url", ["redis://host", "redis://:pass@host:6379/0", "rediss://[::1]/?ssl_cert_reqs=none"]
)
def test_a_redis_of_any_form_is_a_broker(tmp_path: Path, url: str) -> None:
    assert WorkerSettings.model_validate({"data_dir": tmp_path, "broker_url": url}).broker_url is not None


@pytest.mark.parametrize("device", ["cuda:first", "cuda:01", "cuda:", "gpu", "cpu:0"])
def test_a_malformed_device_is_refused_at_the_start(tmp_path: Path, device: str) -> None:
    with pytest.raises(ValueError, match="device"):
        WorkerSettings.model_validate({"data_dir": tmp_path, "device": device})


def test_a_device_that_the_machine_lacks_is_refused_with_its_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    for device in ("cpu", "cuda:0"):
        assert str(Compute(device=device).torch_device) == device
    with pytest.raises(OperatorError, match=r"PERMILLE_DEVICE is cuda:1, but torch finds 1"):
        _ = Compute(device="cuda:1").torch_device

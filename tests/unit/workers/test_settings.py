"""Tests of a worker's settings: the same data folder as the API, and one-line errors."""

import subprocess
import sys
from pathlib import Path

import pytest

from permille.errors import OperatorError
from permille_service.settings import load
from permille_workers.runtime.settings import WorkerSettings
from permille_workers.tasks.compute import torch_device
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


@pytest.mark.parametrize("device", ["cuda:first", "cuda:01", "cuda:", "gpu", "cpu:0"])
def test_a_malformed_device_is_refused_at_the_start(tmp_path: Path, device: str) -> None:
    with pytest.raises(ValueError, match="device"):
        WorkerSettings.model_validate({"data_dir": tmp_path, "device": device})


def test_a_device_that_the_machine_lacks_is_refused_with_its_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert (str(torch_device("cpu")), str(torch_device("cuda:0"))) == ("cpu", "cuda:0")
    with pytest.raises(OperatorError, match=r"PERMILLE_DEVICE is cuda:1, but torch finds 1"):
        torch_device("cuda:1")

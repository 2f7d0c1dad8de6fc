"""Numbers in `config.json` that are not finite are refused at registration, on both databases."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.api_service import Api, running_api
from tests.packages import TINY_LLAMA
from tests.tiny_model import write_model
from tests.unit.store.postgres import postgres_server

NUMBERS = ("NaN", "Infinity", "-Infinity", "1e999")


@contextmanager
def service_on(database: str, folder: Path) -> Iterator[Api]:
    models = folder / "models"
    if database == "sqlite":
        with running_api(folder, model_root=models) as api:
            yield api
        return
    with postgres_server() as server, running_api(folder, model_root=models, database_url=server.url) as api:
        yield api


@pytest.mark.attack(13, "a config with NaN or Infinity is registered, and dies after hours of work")
@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_a_config_without_finite_numbers_is_refused_at_registration(tmp_path: Path, database: str) -> None:
    folder = write_model(tmp_path / "models" / "m")
    request = {"name": "m", "source": {"kind": "folder", "path": "m"}}
    with service_on(database, tmp_path) as api:
        for key in ("initializer_range", "rms_norm_eps", "unknown"):
            for number in NUMBERS:
                text = json.dumps({**TINY_LLAMA, key: "HERE"}).replace('"HERE"', number)
                (folder / "config.json").write_text(text)
                answer = api.post("/v1/models", request)
                assert answer.status_code == 409, (key, number, answer.text)
                assert "finite" in answer.json()["detail"]
        (folder / "config.json").write_text(json.dumps({**TINY_LLAMA, "rms_norm_eps": 1e-5}))
        assert api.post("/v1/models", request).status_code == 201

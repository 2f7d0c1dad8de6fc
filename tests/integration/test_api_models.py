"""Models and corpora are registered only below their root, of a known family, and without code."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest

from permille.models.families import expected_tensors
from permille.schemas.access import Role
from permille.schemas.jobs import JobKind
from permille.store.artifacts import TaskResult
from tests.api_service import Api, running_api
from tests.artifacts import add_artifact, some_model
from tests.packages import TINY_LLAMA
from tests.tiny_model import write_corpus, write_model


def register(api: Api, path: str) -> Any:
    return api.post("/v1/models", {"name": "m", "source": {"kind": "folder", "path": path}})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    return folder


def test_folder_is_registered_with_what_its_files_say(tmp_path: Path, root: Path) -> None:
    write_model(root / "team" / "tiny")
    with running_api(tmp_path, model_root=root) as api:
        model = register(api, "team/tiny").json()
        assert (model["family"], model["parameters"], model["scoped_parameters"]) == ("llama", 28832, 18432)
        assert model["size_bytes"] == 4 * 28832
        assert api.get(f"/v1/models/{model['id']}").json() == model
        assert api.delete(f"/v1/models/{model['id']}").status_code == 204
        assert api.get(f"/v1/models/{model['id']}").status_code == 404
        assert (root / "team" / "tiny" / "model.safetensors").exists()


@pytest.mark.parametrize(
    "path", ["../secret", "/etc", "a/../../secret", "a//b", ".", "..", "a/.hidden/..", "a\u0000b", "a\\..\\b"]
)
def test_path_that_could_leave_the_root_is_refused(api: Api, path: str) -> None:
    assert register(api, path).status_code == 422


def test_link_out_of_the_root_is_refused(tmp_path: Path, root: Path) -> None:
    outside = write_model(tmp_path / "outside")
    (root / "link").symlink_to(outside)
    inside = write_model(root / "inside")
    (inside / "model.safetensors").unlink()
    (inside / "model.safetensors").symlink_to(outside / "model.safetensors")
    with running_api(tmp_path, model_root=root) as api:
        assert register(api, "link").status_code == 404
        assert register(api, "inside").status_code == 409
        missing = register(api, "missing")
        assert missing.status_code == 404
        assert "below the model root (`permille up` prints this folder, and --model-root" in missing.text
        assert str(tmp_path) not in missing.text


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "mamba"}, "state-space"),
        ({"model_type": "gpt2"}, "llama"),
        ({"num_local_experts": 8}, "mixture of experts"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"model_type": "own", "auto_map": {"AutoModel": "x.Y"}}, "auto_map"),
    ],
)
def test_other_architectures_are_refused_by_name(
    tmp_path: Path, root: Path, change: dict[str, Any], named: str
) -> None:
    folder = write_model(root / "m")
    (folder / "config.json").write_text(json.dumps({**TINY_LLAMA, **change}))
    with running_api(tmp_path, model_root=root) as api:
        answer = register(api, "m")
        assert answer.status_code == 409
        assert named in answer.json()["detail"]


def test_pickled_weights_are_not_opened_by_the_api(tmp_path: Path, root: Path) -> None:
    folder = write_model(root / "m")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"no pickle at all")
    with running_api(tmp_path, model_root=root) as api:
        answer = register(api, "m")
        assert answer.status_code == 201
        shapes = expected_tensors(TINY_LLAMA).values()
        assert answer.json()["family"] == "llama"
        assert answer.json()["parameters"] == sum(map(math.prod, shapes))


def test_hub_model_needs_a_full_commit_and_no_url(api: Api) -> None:
    def hub(repository: str, commit: str) -> int:
        source = {"kind": "hub", "repository": repository, "commit": commit}
        status: int = api.post("/v1/models", {"name": "m", "source": source}).status_code
        return status

    assert hub("owner/name", "0" * 40) == 201
    assert hub("owner/name", "main") == 422
    assert hub("owner/name", "0" * 39) == 422
    assert hub("https://evil.example/x", "0" * 40) == 422
    assert hub("../x", "0" * 40) == 422
    request = {"model_id": api.get("/v1/models").json()["items"][0]["id"], "method": "random"}
    needs = api.post("/v1/preflights", {"kind": "mask", "request": request}).json()
    assert needs["accepted"]
    assert {(one["name"], one["needed"], one["enough"]) for one in needs["figures"]} == {
        *((name, None, True) for name in ("memory", "disk")),
    }
    assert "first job downloads them" in needs["unknown"]


def test_corpus_is_a_text_file_below_its_root_or_on_the_list(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpora" / "texts.jsonl")
    (tmp_path / "corpora" / "data.bin").write_bytes(b"x")
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "corpora" / "link.txt").symlink_to(tmp_path / "secret.txt")

    with running_api(tmp_path, corpus_root=tmp_path / "corpora") as api:

        def add(source: dict[str, str]) -> Any:
            return api.post("/v1/corpora", {"name": f"c{next(numbers)}", "source": source})

        numbers = itertools.count()
        made = add({"kind": "file", "path": "texts.jsonl"})
        assert made.status_code == 201
        assert made.json()["size_bytes"] == (tmp_path / "corpora" / "texts.jsonl").stat().st_size
        assert add({"kind": "file", "path": "data.bin"}).status_code == 409
        assert add({"kind": "file", "path": "link.txt"}).status_code == 404
        assert "--corpus-root or PERMILLE_CORPUS_ROOT" in add({"kind": "file", "path": "none.txt"}).text
        assert add({"kind": "file", "path": "../secret.txt"}).status_code == 422
        assert add({"kind": "streamed", "dataset": "c4"}).status_code == 201
        assert add({"kind": "streamed", "dataset": "https://evil.example"}).status_code == 422


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl", b"Once upon a time\nthere was plain text.\n", "the ending .txt"),
        ("b.jsonl", b'{"body": "x"}\n', "no-text-field"),
        ("c.jsonl", b"Plain text in one line.", "not-json"),
        ("d.jsonl.gz", b'{"text": "not packed"}\n', "not a complete gzip file"),
        ("e.txt", b"\xff\xfe\x00\x01\n", "not-utf8"),
        ("f.txt", b" \n\n", "There is no text"),
        ("g.jsonl", b"", "There is no text"),
    ],
)
def test_corpus_that_is_not_what_its_name_says_is_refused(
    tmp_path: Path, name: str, content: bytes, says: str
) -> None:
    (tmp_path / "corpora").mkdir()
    (tmp_path / "corpora" / name).write_bytes(content)
    with running_api(tmp_path, corpus_root=tmp_path / "corpora") as api:
        answer = api.post("/v1/corpora", {"name": "c", "source": {"kind": "file", "path": name}})
        assert answer.status_code == 409
        assert says in answer.json()["detail"]


def test_a_second_input_of_a_name_is_refused_and_another_tenants_is_not(api: Api) -> None:
    other = api.operator(Role.OPERATOR, tenant="other")
    for path, source in (
        ("/v1/corpora", {"kind": "streamed", "dataset": "c4"}),
        ("/v1/models", {"kind": "hub", "repository": "owner/name", "commit": "0" * 40}),
    ):
        body = {"name": "same", "source": source}
        first = api.post(path, body)
        assert first.status_code == 201
        again = api.post(path, body)
        assert again.status_code == 409
        assert first.json()["id"] in again.json()["detail"]
        assert f"`permille {path.removeprefix('/v1/')} remove same`" in again.json()["detail"]
        assert api.post(path, body, other).status_code == 201
        assert api.delete(f"{path}/{first.json()['id']}").status_code == 204
        assert api.post(path, body).status_code == 201


@pytest.mark.parametrize("field", ["evaluation_corpus_id", "calibration_corpus_id"])
def test_what_a_result_was_made_of_stays(api: Api, field: str) -> None:
    """This also holds for a corpus that only measured or calibrated a quantization."""
    corpus = api.post("/v1/corpora", {"name": "c", "source": {"kind": "streamed", "dataset": "c4"}}).json()
    options = {"scheme": "auto-round", "calibration_corpus_id": corpus["id"]}
    with api.service.database.write() as session:
        model_id = some_model(session, api.tenant_id)
        request: dict[str, object] = {"model_id": model_id}
        request |= {"options": options} if field in options else {field: corpus["id"]}
        add_artifact(
            session,
            tenant_id=api.tenant_id,
            kind=JobKind.QUANTIZATION,
            request=request,
            made=TaskResult(model_id=model_id, digest="sha256:" + "0" * 64, provenance={}, blobs=()),
        )
    for path in (f"/v1/corpora/{corpus['id']}", f"/v1/models/{model_id}"):
        refused = api.delete(path)
        assert (refused.status_code, "quant_" in refused.json()["detail"]) == (409, True)
        assert api.get(path).status_code == 200

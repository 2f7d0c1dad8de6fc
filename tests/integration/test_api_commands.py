"""The operator's command line against a real service: `up`, its commands, its exit codes, its end."""

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from permille.package.reader import Package
from permille.store import access
from permille.store.database import Database
from permille_service.cli import output
from permille_service.cli.main import main
from tests.artifacts import add_package
from tests.packages import tiny_package
from tests.running_service import Running, environment, permille, running_service
from tests.tiny_model import write_corpus, write_model


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Run a service without a worker, with a model folder and a corpus file."""
    folder = tmp_path_factory.mktemp("up")
    write_model(folder / "models" / "tiny")
    write_corpus(folder / "corpora" / "texts.jsonl")
    options = (
        "--model-root",
        str(folder / "models"),
        "--corpus-root",
        str(folder / "corpora"),
        "--no-worker",
    )
    with running_service(folder, *options) as running:
        yield running


def test_ollamas_file_outside_of_the_root_is_told_what_to_do_with(
    up: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = "ab" * 32
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{digest}"}
    manifest = tmp_path / "manifests/registry.ollama.ai/library/smollm2/135m"
    manifest.parent.mkdir(parents=True)
    manifest.write_text(json.dumps({"layers": [layer]}))
    blob = tmp_path / "blobs" / f"sha256-{digest}"
    blob.parent.mkdir()
    blob.write_bytes(b"GGUF")
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    refused = up.permille("models", "add", "chat", "--ollama", "smollm2:135m")
    assert refused.returncode == 4
    told = " ".join(refused.stderr.split())
    assert f"`ln {blob} ROOT/smollm2-135m.gguf`" in told
    assert f"--model-root {tmp_path}" in told


def test_codes_of_a_file_are_not_asked_of_a_model_without_one(up: Running) -> None:
    up.answer("models", "add", "no-file", "--folder", "tiny")
    refused = up.permille("quantizations", "create", "--model", "no-file", "--scheme", "source", "--no-wait")
    assert refused.returncode == 3
    assert "keeps the codes of a GGUF file" in " ".join(refused.stderr.split())


def test_commands_make_list_and_show(up: Running) -> None:
    model = up.answer("models", "add", "listed", "--folder", "tiny")
    corpus = up.answer("corpora", "add", "texts", "--file", "texts.jsonl")
    assert model["family"] == "llama"
    listed = up.answer("models", "list")  # Other tests have added models, too.
    assert [item["id"] for item in listed if item["name"] == "listed"] == [model["id"]]
    mask = ("masks", "create", "--model", model["id"], "--corpus", corpus["id"], "--sequences", "4")
    job = up.answer(*mask, "--no-wait")
    assert job["state"] == "queued"
    assert up.answer("jobs", "show", job["id"])["id"] == job["id"]
    assert up.answer("jobs", "cancel", job["id"])["state"] == "cancelled"
    watched = up.permille("jobs", "watch", job["id"])
    assert watched.returncode == 1
    assert "cancelled" in watched.stderr
    kinds = [event["kind"] for event in up.answer("jobs", "events", job["id"])]
    assert kinds[0] == "state"
    table = up.permille("models", "list").stdout
    assert model["id"][: len("model_") + 10] in table
    assert up.answer("preflight", "--model", "listed", "--method", "random")["accepted"] is True
    build = ("builds", "create", "--model", "listed", "--corpus", "texts", "--sequences", "4")
    job = up.answer(*build, "--no-wait")
    assert up.answer("builds", "show", job["id"])["package_digest"] is None


def test_a_stream_without_a_network_is_told_at_once_with_the_text_that_is_included(up: Running) -> None:
    added = up.permille("corpora", "add", "stream", "--streamed", "c4")  # tests run with HF_HUB_OFFLINE=1
    assert added.returncode == 0
    assert "the hub cannot be reached from here" in " ".join(added.stdout.split())
    assert "corpus.jsonl.gz" in added.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("corpora", "add", "more", "--file", "nosuch.jsonl"), 4, "`permille up` prints this folder"),
        (
            ("models", "add", "more", "--gguf", "/home/me/a.gguf"),
            3,
            "--model-root and --corpus-root set them",
        ),
        (("models", "add", "more", "--gguf", ""), 3, "--gguf: string should have at least 1 character"),
        (("corpora", "add", "more", "--streamed", "pile"), 3, "--streamed: input should be 'c4'"),
        (("packages", "show", "sha256:" + "0" * 64), 4, "There is no package"),
    ],
)
def test_first_mistakes_are_told_by_the_names_that_were_typed(
    up: Running, arguments: tuple[str, ...], code: int, words: str
) -> None:
    refused = up.permille(*arguments)
    assert (refused.returncode, words in " ".join(refused.stderr.split())) == (code, True), refused.stderr


def test_an_address_with_a_path_is_told(up: Running) -> None:
    refused = up.permille("--url", f"{up.url}/ui", "models", "list")
    assert refused.returncode == 4
    assert "Give the service's address without a path" in " ".join(refused.stderr.split())


def test_names_and_beginnings_stand_for_ids(up: Running) -> None:
    model = up.answer("models", "add", "named", "--folder", "tiny")
    assert up.answer("models", "show", "named") == up.answer("models", "show", model["id"]) == model
    unknown = up.permille("masks", "create", "--model", "unknown", "--method", "random")
    assert (unknown.returncode, unknown.stderr) == (
        4,
        "permille: There is no model 'unknown'. See `permille models list`.\n",
    )
    assert up.answer("models", "remove", "named") == {"removed": model["id"]}


def test_what_is_refused_is_said_in_the_words_of_the_command(up: Running) -> None:
    up.answer("models", "add", "refused", "--folder", "tiny")
    for options, said in (
        ((), "--corpus is missing"),
        (("--method", "random", "--length", "64"), "--length does not go with the other options"),
        (
            ("--method", "random", "--density", "3"),
            "--density: input should be less than or equal to 0.5, got 3",
        ),
        (("--method", "random", "--scope", "some"), "--scope must be of another form"),
    ):
        refused = up.permille("masks", "create", "--model", "refused", *options)
        assert refused.returncode == 3
        assert said in refused.stderr
        assert "[0-9]" not in refused.stderr
    assert up.permille("masks", "create", "--model", "refused", "--method", "none").returncode == 2


def test_ctrl_c_while_waiting_leaves_the_job_running(up: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    up.answer("models", "add", "waited", "--folder", "tiny")

    def press(*_: object) -> None:
        raise KeyboardInterrupt

    def queued() -> set[str]:
        return {job["id"] for job in up.answer("jobs", "list", "--state", "queued")}

    before = queued()
    monkeypatch.setattr(output.Follower, "follow", press)  # at the first event of the stream
    done = up.permille("masks", "create", "--model", "waited", "--method", "random")
    assert done.returncode == 130
    (job,) = queued() - before
    assert f"job {job} goes on. Follow it with `permille jobs watch {job}`" in done.stderr
    assert up.answer("jobs", "cancel", job)["state"] == "cancelled"


def test_invitation_and_tokens(up: Running) -> None:
    absent = up.permille("invitations", "create", "--release", "absent")
    assert (absent.returncode, "There is no release 'absent'" in absent.stderr) == (4, True)
    token = up.answer("tokens", "create", "ci", "--role", "viewer")
    refused = permille("--url", up.url, "--token", token["secret"], "tenants", "create", "x")
    assert refused.returncode == 6
    assert up.permille("tokens", "revoke", "ci").returncode == 0
    assert permille("--url", up.url, "--token", token["secret"], "models", "list").returncode == 6


def test_exit_codes_tell_scripts_what_to_do(up: Running, tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nowhere = f"http://127.0.0.1:{closed.getsockname()[1]}"
        assert permille("--url", nowhere, "--token", "x", "models", "list").returncode == 5
    assert up.permille("models", "show", "model_01jd3kq8z7m4n5p6r7s8t9v0wx").returncode == 4
    nope = up.permille("runs", "show", "nope")
    assert nope.returncode == 4
    assert nope.stderr == "permille: There is no run 'nope'. See `permille runs list`.\n"
    assert up.permille("models", "add", "UPPER", "--folder", "tiny").returncode == 3
    assert up.permille("models", "add", "x").returncode == 2
    assert up.permille("nonsense").returncode == 2
    assert permille("--url", up.url, "--token", "pmo_wrong", "models", "list").returncode == 6
    for address in (up.url.removeprefix("http://"), up.url.replace("http", "https")):
        asked = permille("--url", address, "--token", "x", "models", "list")
        assert (asked.returncode, "with http://" in asked.stderr) == (2, True), asked.stderr
    assert permille("--data-dir", str(tmp_path), "models", "list").returncode == 5
    error = permille("--url", up.url, "--token", "pmo_wrong", "models", "list", "--json")
    document = json.loads(error.stdout)
    assert document["exit_code"] == 6
    assert document["problem"]["type"].endswith("/unauthenticated")


def test_environment_names_service_and_token(up: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERMILLE_URL", up.url)
    monkeypatch.setenv("PERMILLE_TOKEN", up.token)
    assert main(["devices", "list", "--json"]) == 0
    monkeypatch.setenv("PERMILLE_TOKEN", "wrong")
    assert main(["devices", "list"]) == 6


@pytest.mark.parametrize("command", [[], ["up"], ["models", "add"], ["builds", "create"], ["jobs", "watch"]])
def test_every_command_explains_itself(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--help"]) == 0
    assert "Usage: permille" in capsys.readouterr().out


def test_import_of_the_command_line_is_light() -> None:
    heavy = {"sqlalchemy", "fastapi", "numpy", "cryptography", "tuf"}
    code = f"import sys, permille_service.cli.main; print({heavy} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment()
    )
    assert done.stdout == "set()\n"


def packed(up: Running, seed: int = 0) -> Package:
    """Put a package into the service."""
    db = Database(f"sqlite:///{up.data_dir / 'permille.db'}")
    package = tiny_package(up.data_dir / "blobs", seed=seed)
    with db.write() as session:
        tenant = access.first_tenant(session)
        assert tenant is not None
        add_package(session, tenant_id=tenant.id, manifest=package.manifest)
    db.close()
    return package


def test_an_export_names_its_package_and_the_shape_of_a_pass(up: Running) -> None:
    package = packed(up, seed=1)
    export = ("exports", "create", "--package", package.digest[:20])
    job = up.answer(*export, "--weights", "int4", "--variants", "4", "--no-wait")
    (found,) = up.answer("exports", "list")
    assert (found["id"], found["state"], found["package_digest"]) == (job["id"], "queued", None)
    asked = found["request"]
    assert (asked["package_digest"], asked["weights"], asked["variants"]) == (package.digest, "int4", 4)
    refused = up.permille(*export, "--variants", "17")
    assert (refused.returncode, "rows are too few for 17 variants" in refused.stderr) == (
        3,
        True,
    )

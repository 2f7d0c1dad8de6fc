"""The operator's command line against a real service: `up`, its commands, its exit codes, its end."""

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from permille_service.cli.main import main
from tests.running_service import Running, environment, permille, running_service
from tests.tiny_model import write_corpus, write_model


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A service without a worker, with a model folder and a corpus file."""
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


def test_commands_make_list_and_show(up: Running) -> None:
    model = up.answer("models", "add", "tiny", "--folder", "tiny")
    corpus = up.answer("corpora", "add", "texts", "--file", "texts.jsonl")
    assert model["family"] == "llama"
    assert [item["id"] for item in up.answer("models", "list")] == [model["id"]]
    job = up.answer("masks", "create", "--model", model["id"], "--corpus", corpus["id"], "--no-wait")
    assert job["state"] == "queued"
    assert up.answer("jobs", "show", job["id"])["id"] == job["id"]
    assert up.answer("jobs", "cancel", job["id"])["state"] == "cancelled"
    watched = up.permille("jobs", "watch", job["id"])
    assert watched.returncode == 1
    assert "cancelled" in watched.stderr
    kinds = [event["kind"] for event in up.answer("jobs", "events", job["id"])]
    assert kinds[0] == "state"
    table = up.permille("models", "list").stdout
    assert model["id"] in table
    assert up.answer("preflight", "--model", model["id"], "--method", "random")["accepted"] is True
    build = ("builds", "create", "--model", model["id"], "--corpus", corpus["id"], "--sequences", "4")
    job = up.answer(*build, "--fisher-exponents", "--no-wait")
    assert up.answer("builds", "show", job["id"])["package_digest"] is None
    assert up.permille(*build, "--method", "random", "--fisher-exponents").returncode == 3


def test_invitation_and_tokens(up: Running) -> None:
    invitation = up.answer("invitations", "create", "--release", "tiny")
    assert len(invitation["invitation"]) == 22
    token = up.answer("tokens", "create", "ci", "--role", "viewer")
    refused = permille("--url", up.url, "--token", token["secret"], "invitations", "create", "--release", "x")
    assert refused.returncode == 6
    assert up.permille("tokens", "revoke", token["id"]).returncode == 0
    assert permille("--url", up.url, "--token", token["secret"], "models", "list").returncode == 6


def test_exit_codes_tell_scripts_what_to_do(up: Running, tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nowhere = f"http://127.0.0.1:{closed.getsockname()[1]}"
        assert permille("--url", nowhere, "--token", "x", "models", "list").returncode == 5
    assert up.permille("models", "show", "model_01jd3kq8z7m4n5p6r7s8t9v0wx").returncode == 4
    nope = up.permille("runs", "show", "nope")
    assert nope.returncode == 4
    assert nope.stderr.endswith("no run 'nope'\n")
    assert up.permille("models", "add", "UPPER", "--folder", "tiny").returncode == 3
    assert up.permille("models", "add", "x").returncode == 2
    assert up.permille("nonsense").returncode == 2
    assert permille("--url", up.url, "--token", "pmo_wrong", "models", "list").returncode == 6
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
    code = (
        "import sys, permille_service.cli.main; print('sqlalchemy' in sys.modules, 'fastapi' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=environment(),
        cwd=Path.cwd(),
    )
    assert done.stdout.split() == ["False", "False"]

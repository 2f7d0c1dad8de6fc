"""The operator's command line against a real service: `up`, its commands, its exit codes, its end."""

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_up_stops_both_processes_and_cleans_up(tmp_path: Path, number: signal.Signals) -> None:
    with running_service(tmp_path) as running:
        children = _children(running.process.pid)
        assert len(children) == 2
        assert httpx.get(f"{running.url}/v1/health").json()["status"] == "ok"
        running.process.send_signal(number)
        assert running.process.wait(60) == 0
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]
    assert not (tmp_path / "data" / "service.url").exists()
    assert (tmp_path / "data" / "operator.token").stat().st_mode & 0o777 == 0o600


def test_killed_up_leaves_no_process_behind(tmp_path: Path) -> None:
    with running_service(tmp_path) as running:
        children = _children(running.process.pid)
        running.process.kill()
        running.process.wait(10)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and any(map(_alive, children)):
        time.sleep(0.1)
    assert not any(map(_alive, children))


def test_port_is_written_to_its_file_and_a_second_service_is_refused(tmp_path: Path) -> None:
    port_file = tmp_path / "port"
    with running_service(tmp_path, "--no-worker", "--port-file", str(port_file)) as running:
        port = port_file.read_text().strip()
        assert running.url.endswith(f":{port}")
        again = permille("up", "--data-dir", str(tmp_path / "other"), "--port", port, "--no-worker")
        assert again.returncode == 1
        assert "in use" in again.stderr


def test_open_bind_without_tls_is_wrong_usage(tmp_path: Path) -> None:
    done = permille("up", "--data-dir", str(tmp_path), "--host", "0.0.0.0")
    assert done.returncode == 2
    assert "tls" in done.stderr


def test_up_takes_host_and_port_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PERMILLE_HOST", "192.0.2.7")
    assert main(["up", "--data-dir", str(tmp_path)]) == 2
    assert "'192.0.2.7'" in capsys.readouterr().err
    monkeypatch.setenv("PERMILLE_PORT", "70000")
    assert main(["up", "--data-dir", str(tmp_path), "--host", "127.0.0.1"]) == 2
    assert "--port" in capsys.readouterr().err


def test_port_file_of_an_earlier_service_is_gone_when_one_starts(tmp_path: Path) -> None:
    port_file = tmp_path / "port"
    port_file.write_text("1\n")
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = str(busy.getsockname()[1])
        options = ("--data-dir", str(tmp_path / "data"), "--port", port, "--port-file", str(port_file))
        assert permille("up", *options, "--no-worker").returncode == 1
    assert not port_file.exists()


def test_tls_service_is_reached_with_its_certificate(tmp_path: Path) -> None:
    certificate, key = _self_signed(tmp_path, "IP:127.0.0.1")
    options = ("--tls-certificate", str(certificate), "--tls-key", str(key), "--no-worker")
    with running_service(tmp_path, *options) as running:
        assert running.url.startswith("https://")
        listed = running.permille("--ca-file", str(certificate), "models", "list", "--json")
        assert (listed.returncode, json.loads(listed.stdout)) == (0, [])
        assert running.permille("models", "list").returncode == 5


def test_service_on_every_address_is_reached_by_its_name(tmp_path: Path) -> None:
    certificate, key = _self_signed(tmp_path, "DNS:localhost")
    options = ("--tls-certificate", str(certificate), "--tls-key", str(key), "--no-worker")
    with running_service(tmp_path, *options, "--host", "0.0.0.0", "--allow-host", "localhost") as running:
        assert running.url.startswith("https://localhost:")
        listed = running.permille("--ca-file", str(certificate), "models", "list", "--json")
        assert (listed.returncode, listed.stderr) == (0, "")


def _self_signed(folder: Path, name: str) -> tuple[Path, Path]:
    certificate, key = folder / "cert.pem", folder / "key.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ed25519",
        "-nodes",
        "-days",
        "1",
        "-subj",
        "/CN=permille",
    ]
    subprocess.run(
        [*command, "-addext", f"subjectAltName={name}", "-keyout", str(key), "-out", str(certificate)],
        check=True,
        capture_output=True,
    )
    return certificate, key


def _children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(part) for part in text.split()]


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


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

"""`permille up` with real processes: one per data folder, its children are restarted, all of them end."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from permille.exits import CommandError
from permille_service.cli.main import main
from permille_service.cli.up import Supervised
from tests.preloaded import children
from tests.running_service import permille_up, running_service


@pytest.mark.slow
def test_a_second_up_on_a_data_folder_or_port_is_refused(tmp_path: Path) -> None:
    port_file = tmp_path / "port"
    with running_service(tmp_path, "--no-worker", "--port-file", str(port_file)) as running:
        again = permille_up("--data-dir", str(running.data_dir), "--port", "0", "--no-worker")
        assert again.returncode == 5
        assert f"already running at {running.url}" in again.stderr
        assert (running.data_dir / "service.url").read_text().strip() == running.url
        _wait_until(port_file.exists)
        port = port_file.read_text().strip()
        assert running.url.endswith(f":{port}")
        elsewhere = permille_up("--data-dir", str(tmp_path / "other"), "--port", port, "--no-worker")
        assert elsewhere.returncode == 1
        assert "in use" in elsewhere.stderr
        assert running.answer("models", "list") == []


@pytest.mark.slow
def test_processes_that_are_killed_start_again_where_they_were(tmp_path: Path) -> None:
    with running_service(tmp_path, real="yes") as running:
        api, worker = children(running.process.pid)
        os.kill(worker, signal.SIGKILL)
        os.kill(api, signal.SIGKILL)
        log = tmp_path / "up.log"
        _wait_until(lambda: log.read_text().count("starting it again") >= 2)
        assert "the worker ended with SIGKILL: starting it again in 0.5 s" in log.read_text()
        assert "the API ended with SIGKILL" in log.read_text()
        _wait_until(lambda: len(children(running.process.pid)) == 2)
        _wait_until(lambda: running.permille("models", "list").returncode == 0)
        assert (running.data_dir / "service.url").read_text().strip() == running.url
        started = children(running.process.pid)
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(60) == 0
    assert not [pid for pid in started if Path(f"/proc/{pid}").exists()]
    assert not (running.data_dir / "service.url").exists()


def test_a_worker_with_wrong_settings_ends_up_with_a_clear_error(tmp_path: Path) -> None:
    with running_service(tmp_path, PERMILLE_LEASE_S="-1") as running:
        assert running.process.stdout is not None
        assert "The worker ended with exit code 2" in running.process.stdout.read()
        assert running.process.wait(60) == 1
    assert "starting it again" not in (tmp_path / "up.log").read_text()
    assert not (running.data_dir / "service.url").exists()


def test_a_process_that_keeps_ending_is_given_up() -> None:
    command = [sys.executable, "-c", "import sys; sys.exit(3)"]
    process = Supervised(name="worker", start=lambda: subprocess.Popen(command), delays_s=(0.0, 0.1))
    with pytest.raises(CommandError, match="ended 3 times within 60 s of its start with exit code 3"):
        while True:
            process.look_after()
            time.sleep(0.01)


def test_up_stops_both_processes_and_cleans_up(tmp_path: Path) -> None:
    with running_service(tmp_path) as running:
        started = children(running.process.pid)
        assert len(started) == 2
        assert httpx.get(f"{running.url}/v1/health", timeout=60.0).json()["status"] == "ok"
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(60) == 0
    assert not [pid for pid in started if Path(f"/proc/{pid}").exists()]
    assert not (tmp_path / "data" / "service.url").exists()
    assert (tmp_path / "data" / "operator.token").stat().st_mode & 0o777 == 0o600


def test_killed_up_leaves_no_process_behind(tmp_path: Path) -> None:
    with running_service(tmp_path) as running:
        started = children(running.process.pid)
        assert len(started) == 2
        running.process.kill()
        running.process.wait(60)
    _wait_until(lambda: not any(map(_alive, started)))


def test_open_bind_without_tls_is_wrong_usage(tmp_path: Path) -> None:
    done = permille_up("--data-dir", str(tmp_path), "--host", "0.0.0.0")
    assert done.returncode == 2
    assert "tls" in done.stderr


@pytest.mark.parametrize("flag", ["--model-root", "--corpus-root"])
def test_a_root_that_is_no_folder_is_refused_and_not_made(tmp_path: Path, flag: str) -> None:
    refused = permille_up("--data-dir", str(tmp_path / "data"), flag, str(tmp_path / "mdoels"))
    assert refused.returncode == 2
    assert f"{flag}: there is no folder" in refused.stderr
    assert list(tmp_path.iterdir()) == []


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
        assert permille_up(*options, "--no-worker").returncode == 1
    assert not port_file.exists()


@pytest.mark.slow
def test_tls_service_on_every_address_is_reached_by_its_name_with_its_certificate(tmp_path: Path) -> None:
    certificate, key = _self_signed(tmp_path, "DNS:localhost")
    options = ("--tls-certificate", str(certificate), "--tls-key", str(key), "--no-worker")
    with running_service(tmp_path, *options, "--host", "0.0.0.0", "--allow-host", "localhost") as running:
        assert running.url.startswith("https://localhost:")
        listed = running.permille("--ca-file", str(certificate), "models", "list", "--json")
        assert (listed.returncode, json.loads(listed.stdout), listed.stderr) == (0, [], "")
        assert running.permille("models", "list").returncode == 5


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


def _wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"

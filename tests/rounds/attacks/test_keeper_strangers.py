"""Strangers who post, drip or stay connected: a keeper keeps its important log and serves its caller."""

import socket
import ssl
import stat
import subprocess
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from permille.bounded_server import Connections, Places
from permille.errors import OperatorError, PackageError
from permille_rounds.keeper.main import init, main, open_server
from permille_rounds.keeper.memory import Memory
from permille_rounds.privacy.rules import PrivacyMode
from permille_rounds.private_rounds import draw_round_noise, round_of_sum, unmasked_sum, vector_of
from permille_rounds.rounds import History
from permille_rounds.workers.task import private_sum
from tests.rounds.federations import make_contributions
from tests.rounds.keeper.keepers import running
from tests.rounds.keeper.test_keeper import federation, send_all
from tests.rounds.private import make_masked, make_private


def health(port: int) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=20) as answer:
        status: int = answer.status
        return status


@pytest.mark.attack(17, "a thousand posts without a token push the refusal of a second set out of the log")
def test_strangers_leave_nothing_in_a_keepers_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    init(tmp_path / "keeper")
    token = (tmp_path / "keeper" / "keeper.token").read_text()
    with running(tmp_path / "keeper") as (port, _):
        rules = federation(tmp_path / "keeper", port)
        _, masked = send_all(rules)
        private_sum(rules, 0, masked[:35], token)
        for _ in range(2):
            with pytest.raises(OperatorError, match="409"):
                private_sum(rules, 0, masked[1:36], token)
        before = _log_of(tmp_path / "keeper", capsys)
        for headers in ({}, {"Authorization": "Bearer guess"}) * 25:
            request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/sums", b"x", headers)
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(request, timeout=20)
        assert _log_of(tmp_path / "keeper", capsys) == before
        assert before.count("already opened for another set") == 1


@pytest.mark.attack(17, "who has the token asks for nonsense until a second set's refusal is forgotten")
def test_the_refusal_of_a_second_set_is_never_forgotten(tmp_path: Path) -> None:
    memory = Memory(tmp_path / "keeper.sqlite")
    memory.note_second_set("sha256:1", "a second set")
    for number in range(1005):
        memory.note_refusal(f"nonsense {number}")
    lines = memory.lines()
    assert sum("a second set" in line for line in lines) == 1
    assert len(lines) == 1001


@pytest.mark.attack(17, "connections of one address, and of many, drip a byte at a time into a keeper")
def test_dripping_strangers_make_room_for_who_asks(tmp_path: Path) -> None:
    init(tmp_path / "keeper")
    token = (tmp_path / "keeper" / "keeper.token").read_text()
    with running(tmp_path / "keeper") as (port, _):
        rules = federation(tmp_path / "keeper", port)
        _, masked = send_all(rules)
        strangers = []
        for number in range(120):
            stranger = socket.socket()
            stranger.bind((f"127.0.0.{2 + number % 12}", 0))
            stranger.connect(("127.0.0.1", port))
            stranger.sendall(b"POST /v1/sums HTTP/1.1\r\nx: ")
            strangers.append(stranger)
        assert health(port) == 200
        assert private_sum(rules, 0, masked, token).any()
        for stranger in strangers:
            stranger.close()


@pytest.mark.attack(17, "strangers begin a TLS handshake and stay, or hang up in the middle")
def test_handshakes_that_never_end_make_room(tmp_path: Path) -> None:
    init(tmp_path / "keeper")
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
         "-subj", "/CN=localhost", "-keyout", str(key), "-out", str(certificate)],
        check=True, capture_output=True,
    )  # fmt: skip
    server = open_server(tmp_path / "keeper", ("127.0.0.1", 0), (certificate, key))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    strangers = [socket.create_connection(("127.0.0.1", server.server_port)) for _ in range(50)]
    for stranger in strangers:
        stranger.sendall(b"\x16\x03\x01")
    trusting = ssl._create_unverified_context()
    address = f"https://127.0.0.1:{server.server_port}/health"
    with urllib.request.urlopen(address, timeout=20, context=trusting) as answer:
        assert answer.status == 200
    for stranger in strangers:
        stranger.close()
    until = time.monotonic() + 30
    while server.places and time.monotonic() < until:
        time.sleep(0.05)
    assert not server.places
    server.shutdown()
    server.server_close()
    thread.join(20)


@pytest.mark.attack(17, "a stranger sends its head so slowly that each byte comes in time")
def test_a_stranger_has_seconds_for_its_head() -> None:
    held = Connections(Places(stranger_s=0.2))
    slow, other = socket.socketpair()
    proved, caller = socket.socketpair()
    assert held.admit(slow, "192.0.2.1") is not None
    known = held.admit(proved, "192.0.2.2")
    assert known is not None
    known.proved = True
    assert other.recv(1) == b"", "it is closed"
    caller.setblocking(False)
    time.sleep(0.3)
    with pytest.raises(BlockingIOError):
        caller.recv(1)
    for one in (slow, other, proved, caller):
        one.close()


@pytest.mark.attack(17, "strangers take all places while the caller's requests are under way")
def test_no_stranger_takes_the_place_of_a_caller() -> None:
    held, pairs = Connections(Places()), [socket.socketpair() for _ in range(50)]
    callers = [held.admit(pairs[i][0], f"192.0.2.{i}") for i in range(32)]
    for caller in callers:
        assert caller is not None
        caller.proved = True
    assert held.admit(pairs[40][0], "198.51.100.1") is None
    first = callers[0]
    assert first is not None
    held.leave(first)
    assert held.admit(pairs[41][0], "198.51.100.1") is not None
    assert held.admit(pairs[42][0], "198.51.100.2") is not None, "the other stranger made room"
    assert pairs[41][1].recv(1) == b""
    for pair in pairs:
        for one in pair:
            one.close()


@pytest.mark.attack(17, "a keeper answers in due form with a sum that is none, or with one shifted far")
@pytest.mark.parametrize("shift", [0, 1 << 20, -(1 << 24)])
def test_a_keeper_that_lies_makes_a_round_void(shift: int) -> None:
    rules = make_private(mode=PrivacyMode.KEEPER)
    history = History.begin(rules)
    masked, _ = make_masked(history, make_contributions(history, 40))
    honest_V = sum(vector_of(each) for each in make_contributions(history, 40)) + draw_round_noise(rules)
    assert round_of_sum(rules, 0, 40, honest_V).weight_K.tolist() == [40] * rules.steps
    answer_V = np.random.Generator(np.random.PCG64(1)).integers(0, 1 << 32, len(honest_V), dtype=np.uint32)
    lie_V = honest_V + shift if shift else unmasked_sum(rules, 0, masked, answer_V)
    with pytest.raises(PackageError, match="The keeper or a device lies"):
        round_of_sum(rules, 0, 40, lie_V)


@pytest.mark.attack(17, "files and links that wait in the folder where a keeper writes its key")
@pytest.mark.parametrize("name", ["keeper.token", "keeper.sqlite", "keeper.sqlite-wal", "keeper.key"])
@pytest.mark.parametrize("is_link", [True, False])
def test_init_writes_into_no_file_that_another_user_made(tmp_path: Path, name: str, is_link: bool) -> None:
    home, other = tmp_path / "keeper", tmp_path / "other"
    home.mkdir(mode=0o777)
    other.touch(mode=0o666)
    if is_link:
        (home / name).symlink_to(other)
    else:
        (home / name).touch(mode=0o666)
    with pytest.raises(OperatorError, match=r"exists already|Choose an empty folder"):
        init(home)
    assert other.read_bytes() == b""
    assert [path.name for path in home.iterdir()] == [name]


@pytest.mark.attack(17, "another user reads the folder of a keeper")
def test_a_keepers_folder_is_its_own(tmp_path: Path) -> None:
    home = tmp_path / "keeper"
    home.mkdir(mode=0o777)
    home.chmod(0o777)
    init(home)
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in home.iterdir()} == {0o600}


def _log_of(home: Path, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    main(["--home", str(home), "log"])
    return capsys.readouterr().out

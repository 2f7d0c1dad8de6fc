"""Tests of a keeper: one answer per set after any kill, and refusal of second sets, strangers and floods."""

import os
import signal
import socket
import stat
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from permille.errors import OperatorError, RetryableError
from permille_rounds.contribution import Contribution
from permille_rounds.definition import Definition
from permille_rounds.keeper.main import init, main, open_server, public_text
from permille_rounds.masked import Masked, Opening, decode_masked, encode_masked, opening_of
from permille_rounds.privacy.rules import Keeper, PrivacyMode
from permille_rounds.private_rounds import noised_sum, unmasked_sum, vector_of
from permille_rounds.rounds import History
from permille_rounds.workers.task import ask_keeper, private_sum
from tests.rounds.federations import make_contributions
from tests.rounds.keeper.keepers import STEPS, running, wait_until_dead
from tests.rounds.private import device_key, make_private

DEVICES = 40


@pytest.fixture
def home(tmp_path: Path) -> Path:
    init(tmp_path / "keeper")
    return tmp_path / "keeper"


@pytest.fixture
def site(home: Path) -> Iterator[tuple[Definition, str]]:
    """Run a keeper. Yields a federation with this keeper, and its token."""
    with running(home) as (port, _):
        yield federation(home, port), (home / "keeper.token").read_text()


def federation(home: Path, port: int) -> Definition:
    key = public_text(X25519PrivateKey.from_private_bytes((home / "keeper.key").read_bytes()))
    return make_private(
        mode=PrivacyMode.KEEPER, privacy={"keeper": Keeper(key=key, url=f"http://127.0.0.1:{port}")}
    )


def send_all(rules: Definition) -> tuple[list[Contribution], list[Masked]]:
    """Return the contributions of the devices, and their masked messages."""
    history = History.begin(rules)
    plain, masked = make_contributions(history, DEVICES), []
    for index, each in enumerate(plain):
        key = device_key(index)
        data = encode_masked(rules, 0, history.digest, vector_of(each), key)
        masked.append(decode_masked(data, rules, key.public_key()))
    return plain, masked


def test_the_service_gets_the_sum_and_noise_that_it_never_saw_alone(site: tuple[Definition, str]) -> None:
    rules, token = site
    plain, masked = send_all(rules)
    sum_V = private_sum(rules, 0, masked, token)
    noise_V = sum_V - noised_sum(rules, 0, plain, np.zeros(len(sum_V), dtype=np.int64))
    assert noise_V.any()
    assert np.abs(noise_V).max() < 10 * 4000
    assert private_sum(rules, 0, masked, token).tolist() == sum_V.tolist()
    assert private_sum(rules, 0, masked[::-1], token).tolist() == sum_V.tolist()


@pytest.mark.attack(13, "malformed rounds")
def test_a_second_set_of_a_round_is_refused_and_noted_on_both_sides(
    home: Path,
    site: tuple[Definition, str],
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rules, token = site
    _, masked = send_all(rules)
    private_sum(rules, 0, masked[:35], token)
    with pytest.raises(OperatorError, match=r"\(409\): 34 seals .* were already opened for another set"):
        private_sum(rules, 0, masked[1:36], token)
    assert "the keeper refused with 409" in caplog.text
    main(["--home", str(home), "log"])
    noted = capsys.readouterr().out
    assert "summed 35 devices in round 0" in noted
    assert "seals of round 0" in noted


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
def test_a_keeper_killed_at_any_step_gives_one_answer(home: Path, step: str) -> None:
    token = (home / "keeper.token").read_text()
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    rules = federation(home, port)
    _, masked = send_all(rules)
    with running(home, port, step) as (_, process):
        with pytest.raises(RetryableError):
            private_sum(rules, 0, masked, token)
        assert wait_until_dead(process) == signal.SIGKILL
    with pytest.raises(RetryableError, match="does not answer"):
        private_sum(rules, 0, masked, token)
    with running(home, port):
        first = private_sum(rules, 0, masked, token)
        with pytest.raises(OperatorError, match="409"):
            private_sum(rules, 0, masked[:-1], token)
    with running(home, port):
        assert private_sum(rules, 0, masked, token).tolist() == first.tolist()


def test_what_was_kept_before_a_kill_is_the_answer(home: Path) -> None:
    """Noise that was stored before a kill is used for the answer, although nobody received it."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    rules, token = federation(home, port), (home / "keeper.token").read_text()
    _, masked = send_all(rules)
    with running(home, port, "kept"), pytest.raises(RetryableError):
        private_sum(rules, 0, masked, token)
    opening = opening_of(rules, 0, masked)
    with open_server(home, ("127.0.0.1", 0), None) as server:
        kept = server.memory.answer_once(opening, lambda: b"drawn again")
    assert kept != b"drawn again"
    with running(home, port):
        answer_V = ask_keeper(opening, token)
    assert kept.endswith(answer_V.tobytes())
    assert unmasked_sum(rules, 0, masked, answer_V).any()


@pytest.mark.attack(13, "malformed rounds")
def test_strangers_and_forgers_get_nothing(site: tuple[Definition, str], tmp_path: Path) -> None:
    rules, token = site
    _, masked = send_all(rules)
    with pytest.raises(OperatorError, match="401"):
        private_sum(rules, 0, masked, "guess")
    with pytest.raises(OperatorError, match="PERMILLE_KEEPER_TOKEN"):
        private_sum(rules, 0, masked, None)
    with pytest.raises(OperatorError, match=r"422\): round-limit"):
        private_sum(rules, 0, masked[:31], token)
    opening = opening_of(rules, 0, masked)
    forged = [(key, os.urandom(80), signature) for key, _, signature in opening.entries]
    with pytest.raises(OperatorError, match=r"422\): round-signature"):
        ask_keeper(Opening(definition=rules, round_number=0, entries=tuple(forged)), token)
    init(tmp_path / "other")
    _, foreign = send_all(federation(tmp_path / "other", int(rules.privacy.keeper.url.rsplit(":")[-1])))  # type: ignore[union-attr]
    with pytest.raises(OperatorError, match=r"422\): round-binding"):
        private_sum(foreign[0].definition, 0, foreign, token)
    assert private_sum(rules, 0, masked, token).any()


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/", {}, 404),
        ("/v1/sums", {}, 401),
        ("/v1/sums", {"authorization": "Bearer "}, 401),
        ("/v1/sums", {"authorization": "Bearer {token}", "content-length": "999999999999"}, 411),
        ("/v1/sums", {"authorization": "Bearer {token}", "content-length": "99999999"}, 413),
        ("/v1/sums", {"authorization": "Bearer {token}", "content-length": "-5"}, 411),
        ("/v1/sums", {"authorization": "Bearer {token}"}, 422),
    ],
)
def test_requests_that_are_no_question(
    site: tuple[Definition, str], path: str, headers: dict[str, str], status: int
) -> None:
    rules, token = site
    shown = {name: value.format(token=token) for name, value in headers.items()}
    url = rules.privacy.keeper.url  # type: ignore[union-attr]
    request = urllib.request.Request(url + path, data=b"", headers=shown, method="POST")
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=60)
    assert refused.value.code == status
    with urllib.request.urlopen(url + "/health", timeout=60) as alive:
        assert alive.status == 200


def test_a_keepers_files_are_its_own_and_its_key_stays(home: Path) -> None:
    with open_server(home, ("127.0.0.1", 0), None):
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in home.iterdir()}
    assert modes["keeper.key"] == modes["keeper.token"] == modes["keeper.sqlite"] == 0o600
    with pytest.raises(OperatorError, match="exists already"):
        init(home)
    with pytest.raises(OperatorError, match="--tls-certificate"):
        open_server(home, ("0.0.0.0", 0), None)


def test_a_lost_memory_is_not_made_anew(home: Path) -> None:
    (home / "keeper.sqlite").unlink()
    with pytest.raises(SystemExit, match=r"keeper\.sqlite is missing"):
        main(["--home", str(home), "log"])
    with pytest.raises(OperatorError, match=r"keeper\.sqlite is missing"):
        open_server(home, ("127.0.0.1", 0), None)


@contextmanager
def lying(parts: Iterator[bytes]) -> Iterator[int]:
    """Send these parts to one caller, in place of a keeper. Yields the port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def say() -> None:
            caller, _ = listener.accept()
            with caller, suppress(OSError):
                caller.recv(1 << 16)
                for part in parts:
                    caller.sendall(part)

        threading.Thread(target=say, daemon=True).start()
        yield listener.getsockname()[1]


def slowly() -> Iterator[bytes]:
    yield b"HTTP/1.0 200 OK\r\ncontent-length: 1000\r\n\r\n"
    for _ in range(1000):
        time.sleep(0.05)
        yield b"x"


@pytest.mark.parametrize(
    ("parts", "error", "words"),
    [
        (slowly, RetryableError, "did not answer within"),
        (lambda: iter([b"x" * 100_000]), RetryableError, "does not answer"),
        (lambda: iter([b"HTTP/1.0 200 OK\r\n\r\n" + bytes(1_000_000)]), RetryableError, "does not answer"),
        (lambda: iter([b"HTTP/1.0 200 OK\r\n\r\n"]), RetryableError, "does not answer"),
        (
            lambda: iter([b"HTTP/1.0 302 Found\r\nlocation: http://[::1]/\r\n\r\n"]),
            OperatorError,
            "302",
        ),
    ],
)
def test_whatever_answers_in_a_keepers_place_moves_nothing(
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    parts: Callable[[], Iterator[bytes]],
    error: type[Exception],
    words: str,
) -> None:
    monkeypatch.setattr("permille_rounds.workers.task._LONGEST_S", 1.0 if parts is slowly else 60.0)
    with lying(parts()) as port:
        rules = federation(home, port)
        with pytest.raises(error, match=words):
            private_sum(rules, 0, send_all(rules)[1], "token")

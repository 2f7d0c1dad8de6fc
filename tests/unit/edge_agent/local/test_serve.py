"""The local server: the schema of OpenAI, and who may speak to it."""

import http.client
import json
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from permille.errors import InputError, OperatorError
from permille_agent.local import serve
from permille_agent.local.model import LocalModel
from permille_agent.local.serve import LocalServer, read_or_make_token
from permille_agent.state.home import open_home
from tests.bigram_engine import bigram_engine
from tests.packages import CHATML
from tests.unit.edge_agent.runs import home_with_package, train_quickly, user_text

TOKEN = "a-token-of-the-test"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    folder = tmp_path_factory.mktemp("served")
    home, _ = home_with_package(folder / "home", chat_template=CHATML)
    train_quickly(home, [user_text(folder)])
    with LocalModel(home, bigram_engine) as model:
        server = LocalServer(("127.0.0.1", 0), model, TOKEN)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        server.server_close()


def _ask(
    server: LocalServer,
    method: str,
    path: str,
    body: object = None,
    *,
    headers: dict[str, str] | None = None,
    raw: bytes | None = None,
) -> tuple[int, bytes, http.client.HTTPMessage]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    data = raw if raw is not None else None if body is None else json.dumps(body).encode()
    connection.request(method, path, data, {"Authorization": f"Bearer {TOKEN}", **(headers or {})})
    response = connection.getresponse()
    answer = response.read()
    connection.close()
    return response.status, answer, response.headers


def _json(server: LocalServer, path: str, body: object) -> dict[str, Any]:
    status, answer, _ = _ask(server, "POST", path, body)
    assert status == 200, answer
    result: dict[str, Any] = json.loads(answer)
    return result


def test_models_are_listed_the_active_one_first(server: LocalServer) -> None:
    status, answer, headers = _ask(server, "GET", "/v1/models")

    assert status == 200
    assert [model["id"] for model in json.loads(answer)["data"]] == ["personal", "base"]
    assert "Access-Control-Allow-Origin" not in headers
    assert headers["Cache-Control"] == "no-store"
    for method in ("PUT", "DELETE", "OPTIONS", "PATCH", "HEAD"):
        assert _ask(server, method, "/v1/models")[0] == 501


def test_a_completion_has_the_fields_of_the_schema(server: LocalServer) -> None:
    body = {"prompt": "On day 3", "max_tokens": 5, "temperature": 0, "presence_penalty": 0.5}

    answer = _json(server, "/v1/completions", body)

    assert (answer["object"], answer["model"]) == ("text_completion", "personal")
    (choice,) = answer["choices"]
    assert set(choice) == {"index", "text", "logprobs", "finish_reason"}
    assert answer["usage"]["completion_tokens"] == 5
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + 5
    assert choice["finish_reason"] == "length"
    own = {"id": answer["id"], "created": answer["created"]}
    assert answer == {**_json(server, "/v1/completions", body), **own}


def test_base_and_personal_answer_otherwise(server: LocalServer) -> None:
    body = {"prompt": "On day 3 the", "max_tokens": 8, "temperature": 0}
    base, personal = (_json(server, "/v1/completions", {**body, "model": m}) for m in ("base", "personal"))
    assert base["choices"][0]["text"] != personal["choices"][0]["text"]


def test_chat_answers_as_the_assistant(server: LocalServer) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]

    body = {"messages": messages, "max_completion_tokens": 4, "seed": 1}

    answer = _json(server, "/v1/chat/completions", body)

    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert answer["usage"]["completion_tokens"] <= 4


@pytest.mark.parametrize("kind", ["chat", "plain"])
def test_a_stream_says_the_same_as_the_whole(server: LocalServer, kind: str) -> None:
    path = "/v1/chat/completions" if kind == "chat" else "/v1/completions"
    body: dict[str, Any] = {"max_tokens": 9, "temperature": 0.7, "seed": 5, "prompt": "The river"}
    if kind == "chat":
        body["messages"] = [{"role": "user", "content": "Hi"}]

    status, answer, headers = _ask(server, "POST", path, {**body, "stream": True})

    assert status == 200
    assert headers["Content-Type"].startswith("text/event-stream")
    events = answer.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events[:-2]]
    whole = _json(server, path, body)["choices"][0]
    if kind == "chat":
        assert "".join(chunk["delta"].get("content", "") for chunk in chunks) == whole["message"]["content"]
    else:
        assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
    assert [chunk["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["finish_reason"] == whole["finish_reason"]


@pytest.mark.parametrize("token", ["", "wrong", TOKEN + "x", TOKEN[:-1], "ünïcode"])
def test_another_token_is_refused(server: LocalServer, token: str) -> None:
    for path in ("/v1/models", "/v1/completions", "/anything"):
        headers = {"Authorization": f"Bearer {token}".encode().decode("latin-1")}
        status, answer, _ = _ask(server, "GET", path, headers=headers)
        assert status == 401
        assert TOKEN not in answer.decode()
    assert _ask(server, "GET", "/v1/models", headers={"Authorization": f"Basic {TOKEN}"})[0] == 401


FOREIGN = ("evil.example", "127.0.0.1", "127.0.0.1:1", "evil.example:{port}", "", "localhost.evil:{port}")
LOOPBACK = ("127.0.0.1:{port}", "localhost:{port}", "LOCALHOST:{port}", "[::1]:{port}")


@pytest.mark.parametrize("host", FOREIGN + LOOPBACK)
def test_a_host_that_is_not_loopback_is_refused(server: LocalServer, host: str) -> None:
    headers = {"Host": host.format(port=server.port)}
    assert _ask(server, "GET", "/v1/models", headers=headers)[0] == (200 if host in LOOPBACK else 421)


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/v1/completions", {}, 400, "prompt"),
        ("/v1/completions", {"prompt": ["a"]}, 400, "prompt"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
        ("/v1/completions", {"prompt": "a", "temperature": 3}, 400, "temperature"),
        ("/v1/completions", {"prompt": "a", "top_p": 0}, 400, "top_p"),
        ("/v1/completions", {"prompt": "a", "n": 2}, 400, "n"),
        ("/v1/completions", {"prompt": "a", "model": "gpt"}, 404, "personal, base"),
        ("/v1/chat/completions", {"messages": []}, 400, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "tool", "content": "x"}]}, 400, "role"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a </s>"}]}, 400, "special token"),
        ("/v1/embeddings", {"prompt": "a"}, 404, "POST knows /v1/completions"),
    ],
)
def test_bad_requests_say_what_was_expected(
    server: LocalServer, path: str, body: object, status: int, words: str
) -> None:
    found, answer, _ = _ask(server, "POST", path, body)

    assert found == status
    error = json.loads(answer)["error"]
    assert error["type"] == "invalid_request_error"
    assert words in error["message"]


def test_bodies_are_json_with_a_length_and_bounded(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _ask(server, "POST", "/v1/completions", raw=b"{not json")[0] == 400
    chunked = {"Transfer-Encoding": "chunked"}
    assert _ask(server, "POST", "/v1/completions", raw=b"0\r\n\r\n", headers=chunked)[0] == 411
    assert _ask(server, "POST", "/v1/completions", raw=b"x", headers={"Content-Length": "-1"})[0] == 411
    monkeypatch.setattr(serve, "MAX_BODY_BYTES", 10)
    assert _ask(server, "POST", "/v1/completions", {"prompt": "a long prompt"})[0] == 413


def test_too_many_requests_at_a_time_are_turned_away(server: LocalServer) -> None:
    for _ in range(serve.MAX_REQUESTS):
        assert server.requests.acquire(blocking=False)
    try:
        assert _ask(server, "GET", "/v1/models")[0] == 503
    finally:
        for _ in range(serve.MAX_REQUESTS):
            server.requests.release()
    assert _ask(server, "GET", "/v1/models")[0] == 200


def test_the_token_is_made_once_and_readable_by_its_owner_only(tmp_path: Path) -> None:
    home = open_home(tmp_path / "home")

    path, token = read_or_make_token(home)

    assert read_or_make_token(home) == (path, token)
    assert len(token) >= 43
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.write_text("")
    with pytest.raises(OperatorError, match="Delete the file"):
        read_or_make_token(home)


def test_only_loopback_addresses_and_free_ports_are_bound(server: LocalServer) -> None:
    with pytest.raises(InputError, match=r"loopback only, not on 0\.0\.0\.0"):
        LocalServer(("0.0.0.0", 0), server.model, TOKEN)
    with pytest.raises(OperatorError, match="Cannot listen on"):
        LocalServer(("127.0.0.1", server.port), server.model, TOKEN)

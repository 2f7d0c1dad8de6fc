"""Tests of the local server: the interfaces of OpenAI and Ollama, and access control."""

import gzip
import http.client
import json
import socket
import stat
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from permille.errors import InputError, OperatorError, PackageError
from permille_agent.local import serve
from permille_agent.local.model import Generated, LocalModel, Sampling, own_sampling
from permille_agent.local.replies import Choices
from permille_agent.local.serve import Access, LocalServer, read_or_make_access
from permille_agent.state.home import open_home
from tests.bigram_engine import bigram_engine
from tests.packages import CHATML, tiny_package
from tests.unit.edge_agent.runs import home_with_package, train_quickly, user_text

TOKEN = "a-token-of-the-test"
PAGE = "http://localhost:3000"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    folder = tmp_path_factory.mktemp("served")
    home, _ = home_with_package(folder / "home", chat_template=CHATML)
    train_quickly(home, [user_text(folder)])
    access = Access(token=TOKEN, token_file=home.root / "serve.token", origins=(PAGE,))
    with LocalModel(home, bigram_engine) as model:
        server = LocalServer(("127.0.0.1", 0), model, access)
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
    for method in ("PUT", "DELETE", "PATCH"):
        assert _ask(server, method, "/v1/models")[0] == 404
    assert _ask(server, "TRACE", "/v1/models")[0] == 501
    for path in ("/v1/models/", "//v1/models", "/models"):
        assert _ask(server, "GET", path)[1] == answer


def test_each_request_first_drops_a_memory_that_is_gone(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    complete = LocalModel.complete

    def completed(*arguments: Any) -> Any:
        calls.append("complete")
        return complete(*arguments)

    monkeypatch.setattr(LocalModel, "keep_up", lambda _: calls.append("keep up"))
    monkeypatch.setattr(LocalModel, "complete", completed)
    _ask(server, "POST", "/v1/completions", {"prompt": "On day 3"}, headers={"Authorization": "Bearer no"})
    assert calls == []
    _json(server, "/v1/completions", {"prompt": "On day 3", "max_tokens": 1})
    assert calls == ["keep up", "complete"]


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


def _events(server: LocalServer, body: object) -> list[dict[str, Any]]:
    status, answer, _ = _ask(server, "POST", "/v1/chat/completions", body)
    assert status == 200, answer
    return [json.loads(line.removeprefix(b"data: ")) for line in answer.split(b"\n\n")[:-2]]


def test_a_stream_ends_with_its_usage_where_that_is_asked_for(server: LocalServer) -> None:
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 5,
        "temperature": 0,
        "stream": True,
    }

    plain = _events(server, body)
    counted = _events(server, {**body, "stream_options": {"include_usage": True}})

    assert all("usage" not in event for event in plain)
    assert [event["usage"] for event in counted[:-1]] == [None] * len(plain)
    assert counted[-1]["choices"] == []
    assert counted[-1]["usage"] == _json(server, "/v1/chat/completions", {**body, "stream": False})["usage"]


def test_an_unknown_model_is_the_personal_one(server: LocalServer) -> None:
    body = {"prompt": "On day 3 the", "max_tokens": 8, "temperature": 0}
    named, unknown = (_json(server, "/v1/completions", {**body, "model": m}) for m in ("personal", "gpt-4o"))
    assert unknown["model"] == "personal"
    assert unknown["choices"] == named["choices"]
    for name in ("base", "base:latest"):
        assert json.loads(_ask(server, "GET", f"/v1/models/{name}")[1])["id"] == "base"
    assert json.loads(_ask(server, "GET", "/v1/models/gpt-4o?x=1")[1])["id"] == "personal"


def test_parts_of_a_text_are_its_lines_and_a_developer_is_the_system(server: LocalServer) -> None:
    body = {"max_tokens": 4, "temperature": 0}
    parts = [{"type": "text", "text": "Hi", "cache_control": {}}, {"type": "text", "text": "there"}]
    told, meant = (
        _json(server, "/v1/chat/completions", {**body, "messages": messages})
        for messages in (
            [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}],
            [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi\nthere"}],
        )
    )
    assert told["choices"] == meant["choices"]
    assert told["usage"] == meant["usage"]


def test_null_is_as_good_as_nothing(server: LocalServer) -> None:
    names = ("model", "max_tokens", "temperature", "top_p", "seed", "stop", "stream", "stream_options", "n")
    answer = _json(server, "/v1/completions", {"prompt": ["The river"], **dict.fromkeys(names), "seed": -1})
    assert answer["usage"]["completion_tokens"] > 0


def test_what_breaks_a_stream_is_told_in_it(server: LocalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_messages: object, _variant: object, _sampling: object) -> tuple[Generated, Iterator[str]]:
        def pieces() -> Iterator[str]:
            yield "so far"
            raise InputError("these values break the model")

        return Generated(prompt_tokens=1), pieces()

    monkeypatch.setattr(server.model, "reply", broken)
    body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}

    for path in ("/v1/chat/completions", "/api/chat"):
        status, answer, _ = _ask(server, "POST", path, body)
        assert status == 200
        last = json.loads(answer.rstrip().splitlines()[-1].removeprefix(b"data: "))
        assert "these values break the model" in json.dumps(last["error"])


def test_pages_of_named_origins_may_ask_and_no_others(server: LocalServer) -> None:
    asked = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,x-stainless",
    }
    for origin, status in ((PAGE, 204), ("http://localhost:3001", 403), ("null", 403)):
        found, answer, headers = _ask(
            server,
            "OPTIONS",
            "/v1/chat/completions",
            headers={"Origin": origin, "Authorization": "", **asked},
        )
        assert found == status
        assert headers.get("Access-Control-Allow-Origin") == (PAGE if status == 204 else None)
        assert status == 204 or b"--allow-origin" in answer
    for token, status in ((TOKEN, 200), ("wrong", 401)):
        found, _, headers = _ask(
            server, "GET", "/v1/models", headers={"Origin": PAGE, "Authorization": f"Bearer {token}"}
        )
        assert (found, headers["Access-Control-Allow-Origin"]) == (status, PAGE)


@pytest.mark.parametrize(
    "origin",
    [
        *("*", "null", "http://example.org", "http://localhost:3000/", "file://localhost", "localhost:3000"),
        *("http://localhost:x", "http://[::1", "http://jo@localhost"),
    ],
)
def test_only_origins_of_this_machine_can_be_allowed(origin: str) -> None:
    with pytest.raises(InputError, match=r"like http://localhost:3000"):
        Access(token=TOKEN, token_file=Path("serve.token"), origins=(origin,))


def test_a_body_with_a_coding_is_refused_by_its_name(server: LocalServer) -> None:
    status, answer, _ = _ask(
        server, "POST", "/v1/completions", raw=gzip.compress(b"{}"), headers={"Content-Encoding": "gzip"}
    )
    assert (status, b"'gzip'" in answer) == (415, True)


@pytest.mark.parametrize("token", ["", "wrong", TOKEN + "x", TOKEN[:-1], "ünïcode"])
def test_another_token_is_refused(server: LocalServer, token: str) -> None:
    for path in ("/v1/models", "/v1/completions", "/anything"):
        headers = {"Authorization": f"Bearer {token}".encode().decode("latin-1")}
        status, answer, _ = _ask(server, "GET", path, headers=headers)
        assert status == 401
        assert TOKEN not in answer.decode()
        assert str(server.access.token_file) in answer.decode()
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
        ("/v1/completions", {"prompt": ["a", "b"]}, 400, "prompt"),
        ("/v1/completions", {"prompt": [1, 2]}, 400, "prompt"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
        ("/v1/completions", {"prompt": "a", "temperature": 3}, 400, "temperature"),
        ("/v1/completions", {"prompt": "a", "top_p": -1}, 400, "top_p"),
        ("/v1/completions", {"prompt": "a", "top_p": float("nan")}, 400, "top_p"),
        ("/v1/completions", {"prompt": "a", "n": 2}, 400, "one answer"),
        (
            "/v1/completions",
            {"prompt": "a", "response_format": {"type": "json_object"}},
            400,
            "Ask for JSON in the message",
        ),
        ("/v1/chat/completions", {"messages": []}, 400, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "tool", "content": "x"}]}, 400, "messages: Send"),
        ("/v1/chat/completions", {"messages": [{"role": "bot", "content": "x"}]}, 400, "role: Send"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}]},
            400,
            "reads only text",
        ),
        ("/v1/audio", {"prompt": "a"}, 404, "/v1/completions"),
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


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/api/chat", {"messages": [{"role": "user", "content": "a", "images": ["aGk="]}]}, 400, "no images"),
        (
            "/api/chat",
            {"messages": [{"role": "user", "content": "a"}], "format": "json"},
            400,
            "for JSON",
        ),
        ("/api/generate", {"prompt": "a", "options": {"top_p": 7}}, 400, "options.top_p"),
        ("/api/pull", {"model": "a"}, 404, "/api/chat"),
        ("/api/embed", {"input": "a"}, 501, "embeddings"),
        ("/api/embeddings", {"prompt": "a"}, 501, "embeddings"),
    ],
)
def test_errors_of_ollama_are_texts(
    server: LocalServer, path: str, body: object, status: int, words: str
) -> None:
    found, answer, _ = _ask(server, "POST", path, body)

    assert found == status
    assert words in json.loads(answer)["error"]


def test_bodies_are_json_with_a_length_and_bounded(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for raw in (b"{not json", b"", b"\xff\xfe{", b"[" * 200_000):
        assert _ask(server, "POST", "/v1/completions", raw=raw)[0] == 400
    for length in ("-1", "+5", "1_0", "9" * 30):
        found, answer, _ = _ask(
            server, "POST", "/v1/completions", raw=b"x", headers={"Content-Length": length}
        )
        assert (found, b"Content-Length" in answer) == (400, True)
    for chunk in (b"-1\r\n", b"0x1\r\n", b"\r\n"):
        chunked = {"Transfer-Encoding": "chunked"}
        assert _ask(server, "POST", "/v1/completions", raw=chunk, headers=chunked)[0] == 400
    packed = {"Transfer-Encoding": "gzip, chunked"}
    assert _ask(server, "POST", "/v1/completions", raw=b"0\r\n\r\n", headers=packed)[0] == 501
    monkeypatch.setattr(serve, "MAX_BODY_BYTES", 10)
    assert _ask(server, "POST", "/v1/completions", {"prompt": "a long prompt"})[0] == 413
    monkeypatch.setattr(serve, "MAX_DISCARDED_BYTES", 1 << 16)
    assert _ask(server, "POST", "/v1/completions", raw=b" " * (1 << 17))[0] == 413


def test_another_method_is_refused_in_json(server: LocalServer) -> None:
    status, answer, headers = _ask(server, "DELETE", "/api/delete", {"model": "personal"})
    assert (status, headers["Content-Type"]) == (404, "application/json")
    assert "no DELETE /api/delete" in json.loads(answer)["error"]


def test_programs_that_look_for_ollama_find_it(server: LocalServer) -> None:
    for path in ("/", "", "/v1/models", "/api/tags", "/health"):
        found, _, headers = _ask(server, "GET", path)
        assert found == 200
        known = int(headers["Content-Length"])
        status, nothing, headers = _ask(server, "HEAD", path)
        assert (status, nothing, int(headers["Content-Length"])) == (200, b"", known)
    assert _ask(server, "GET", "/")[1] == b"Ollama is running"


def test_localhost_is_served_on_both_its_addresses(server: LocalServer) -> None:
    second = server.with_ipv6()
    assert second is not None
    try:
        connection = http.client.HTTPConnection("::1", server.port, timeout=30)
        connection.request("GET", "/v1/models", headers={"Authorization": f"Bearer {TOKEN}"})
        assert connection.getresponse().status == 200
        connection.close()
        assert second.requests is server.requests
        with pytest.raises(OperatorError, match="Cannot listen on ::1"):
            server.with_ipv6()
    finally:
        second.shutdown()
        second.server_close()


CHAT, GENERATE = "/v1/chat/completions", "/api/generate"
HI = {"role": "user", "content": "hi"}
CALLED = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ODD: list[tuple[str, bytes | dict[str, Any]]] = [
    (GENERATE, {"prompt": "In", "system": "", "template": "", "format": "", "options": None}),
    (GENERATE, {"prompt": "In", "format": None, "images": None, "raw": None, "context": [1, 2]}),
    (GENERATE, {"prompt": "In", "options": {"num_predict": 2.0, "seed": 4.0, "top_k": -1, "stop": None}}),
    (GENERATE, {"prompt": "In", "options": {"num_predict": 2, "temperature": None, "stop": []}}),
    (GENERATE, {"prompt": None, "keep_alive": -1}),
    ("/api/chat", {"messages": None, "keep_alive": "5m"}),
    ("/api/chat", {"messages": []}),
    ("/api/chat", {"messages": [HI, {"role": "tool", "content": "4"}], "options": {"num_predict": -1}}),
    ("/api/show", {"model": "personal", "verbose": False}),
    (CHAT, {"max_tokens": 4.0, "messages": [HI], "n": 1.0, "stream_options": None, "top_p": 0}),
    (CHAT, {"max_tokens": -1, "max_completion_tokens": 2, "messages": [HI], "seed": 1 << 70}),
    (CHAT, {"max_tokens": -1, "messages": [HI], "stop": "e"}),
    (CHAT, {"max_tokens": 2, "messages": [HI, {"role": "assistant", "content": None}, HI]}),
    (CHAT, {"max_tokens": 2, "messages": [{"role": "user", "content": "What is <s>old</s> in HTML?"}]}),
    (
        CHAT,
        {
            "max_tokens": 2,
            "tools": [],
            "messages": [
                HI,
                {"role": "assistant", "tool_calls": [CALLED]},
                {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "4"}]},
            ],
        },
    ),
    (
        CHAT,
        {
            "max_tokens": 2,
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "input_text", "text": "a"}, {"type": "text", "text": None}],
                },
                {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
                {"role": "user", "content": ["b"]},
                {"role": "assistant", "content": [{"type": "thinking", "thinking": "c"}, "d"]},
                {"role": "tool", "content": {"result": 4}},
                {"role": "tool", "content": [{"type": "image_url", "image_url": {"url": "a"}}]},
                HI,
            ],
        },
    ),
    (CHAT, b'{"max_tokens": 2, "messages": [{"role": "user", "content": "plums \\ud83d"}]}'),
    (CHAT, b'{"max_tokens": 2, "messages": [{"role": "user", "content": "\\ude00\\ud83d\\ude00"}]}'),
    ("/v1/completions", b'{"prompt": "b", "prompt": "a", "max_tokens": 2, "logit_bias": NaN}'),
    ("/v1/completions", b'\xef\xbb\xbf{"prompt": "a", "max_tokens": 2}'),
    ("/v1/completions", b'{"prompt": "a", "max_tokens": 2, "temperature": "0.5"}'),
]


@pytest.mark.parametrize(("path", "body"), ODD, ids=str)
def test_what_programs_really_send_is_answered(
    server: LocalServer, path: str, body: bytes | dict[str, Any]
) -> None:
    raw = body if isinstance(body, bytes) else json.dumps({"stream": False, **body}).encode()
    headers = {"Content-Type": "application/json; charset=UTF-8", "Expect": "100-continue"}
    status, answer, _ = _ask(server, "POST", path, raw=raw, headers=headers)
    assert status == 200, answer
    assert json.loads(answer)


def test_what_a_template_refuses_is_a_matter_of_the_request(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing = "{{ raise_exception('turns must alternate') }}"
    monkeypatch.setattr(server.model.tokenizer.template, "source", refusing)
    status, answer, _ = _ask(server, "POST", CHAT, {"messages": [HI, HI]})
    assert status == 400
    assert "turns must alternate" in json.loads(answer)["error"]["message"]


def test_the_turns_of_tools_are_left_out_and_half_an_emoji_is_replaced(server: LocalServer) -> None:
    body = {"max_tokens": 4, "temperature": 0}
    told, meant = (
        _json(server, CHAT, {**body, "messages": messages})
        for messages in (
            [
                {"role": "user", "content": "hi \ud83d you"},
                {"role": "assistant", "content": None, "tool_calls": [CALLED]},
                {"role": "function", "name": "f", "content": "4"},
            ],
            [{"role": "user", "content": "hi \ufffd you"}],
        )
    )
    assert told["choices"] == meant["choices"]
    assert told["usage"] == meant["usage"]


def _kept(connection: http.client.HTTPConnection, method: str, path: str, body: Any) -> int:
    """Send a request, and check that the connection is kept, or that its end was announced."""
    before = connection.sock
    connection.request(
        method,
        path,
        body,
        {"Authorization": f"Bearer {TOKEN}"},
        encode_chunked=not isinstance(body, bytes | None),
    )
    assert before is None or connection.sock is before
    response = connection.getresponse()
    response.read()
    closed = response.headers.get("Connection") == "close"
    assert closed == (response.status >= 400) == (connection.sock is None)
    return response.status


def test_a_connection_is_kept_until_its_end_is_announced(server: LocalServer) -> None:
    plain = json.dumps({"prompt": "a", "max_tokens": 2}).encode()
    stream = json.dumps({"prompt": "a", "max_tokens": 2, "stream": True}).encode()
    asked: list[tuple[str, str, Any, int]] = [
        ("POST", "/v1/completions", plain, 200),
        ("POST", "/v1/completions", stream, 200),
        ("POST", "/v1/completions", b'{"prompt": "a", "max_tokens": 0}', 400),
        ("POST", "/v1/completions", iter([plain[:5], plain[5:]]), 200),
        ("POST", GENERATE, iter([b'{"prompt": "a", "options": ', b'{"num_predict": 2}}']), 200),
        ("GET", "/v1/models", b"a body that nobody needs", 200),
        ("HEAD", "/", None, 200),
        ("DELETE", "/api/delete", b'{"model": "a"}', 404),
        ("POST", "/v1/completions", b"x" * (3 << 20), 413),
        ("POST", "/api/embed", b"{}", 501),
        ("POST", "/v1/completions", plain, 200),
    ]
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    for method, path, body, status in asked:
        assert (method, path, _kept(connection, method, path, body)) == (method, path, status)
    connection.close()


def test_a_stream_for_http_1_0_ends_with_its_connection(server: LocalServer) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 2, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.0\r\nHost: localhost:{server.port}\r\nAuthorization: Bearer {TOKEN}"
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as client:
        client.sendall(f"{head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = b"".join(iter(lambda: client.recv(1 << 16), b""))
    assert b"chunked" not in answer
    assert answer.endswith(b"data: [DONE]\n\n")


def test_a_malformed_address_is_answered(server: LocalServer) -> None:
    # Without this header, the client would parse the malformed address itself.
    own = {"Host": f"127.0.0.1:{server.port}"}
    status, answer, _ = _ask(server, "GET", "http://[/v1/models", headers=own)
    assert status == 400 and b"is not a valid path" in answer


def test_generation_ends_where_its_client_has_hung_up(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, left, ended = (threading.Event() for _ in range(3))

    def endless(_messages: object, _variant: object, _sampling: object) -> tuple[Generated, Iterator[str]]:
        def pieces() -> Iterator[str]:
            try:
                begun.set()
                assert left.wait(30)
                while True:
                    yield "more"
            finally:
                ended.set()

        return Generated(prompt_tokens=1), pieces()

    monkeypatch.setattr(server.model, "reply", endless)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}]})
    connection.request("POST", "/v1/chat/completions", body, {"Authorization": f"Bearer {TOKEN}"})
    assert begun.wait(30)
    connection.close()
    left.set()
    assert ended.wait(30)


def test_too_many_requests_at_a_time_are_turned_away(server: LocalServer) -> None:
    for _ in range(serve.MAX_REQUESTS):
        assert server.requests.acquire(blocking=False)
    try:
        assert _ask(server, "POST", "/v1/completions", {"prompt": "Hi", "max_tokens": 1})[0] == 503
        assert _ask(server, "GET", "/health")[0] == 200  # else a supervisor would restart the server
    finally:
        for _ in range(serve.MAX_REQUESTS):
            server.requests.release()
    assert _ask(server, "POST", "/v1/completions", {"prompt": "Hi", "max_tokens": 1})[0] == 200


def test_the_token_is_made_once_and_readable_by_its_owner_only(tmp_path: Path) -> None:
    home = open_home(tmp_path / "home")

    access = read_or_make_access(home)

    assert read_or_make_access(home) == access
    assert len(access.token) >= 43
    assert stat.S_IMODE(access.token_file.stat().st_mode) == 0o600
    access.token_file.write_text("")
    with pytest.raises(OperatorError, match="Delete the file"):
        read_or_make_access(home)


def test_only_loopback_addresses_and_free_ports_are_bound(server: LocalServer) -> None:
    with pytest.raises(InputError, match=r"loopback only, not on 0\.0\.0\.0"):
        LocalServer(("0.0.0.0", 0), server.model, server.access)
    with pytest.raises(OperatorError, match="Cannot listen on"):
        LocalServer(("127.0.0.1", server.port), server.model, server.access)


@pytest.mark.parametrize(
    ("config", "own"),
    [
        ({}, Sampling()),
        ({"eos_token_id": 1}, Sampling()),
        ({"do_sample": True}, Sampling(temperature=1.0, top_p=1.0, top_k=50, repeat_penalty=1.0)),
        ({"do_sample": False, "temperature": 0.6}, Sampling(temperature=0.0, top_p=1.0, repeat_penalty=1.0)),
        (
            {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05},
            Sampling(temperature=0.7, top_p=0.8, top_k=20, repeat_penalty=1.05),
        ),
        ({"temperature": 1, "top_k": 0}, Sampling(temperature=1.0, top_p=1.0, top_k=0, repeat_penalty=1.0)),
        ({"temperature": 0.0}, Sampling(temperature=0.0, top_p=1.0, top_k=50, repeat_penalty=1.0)),
        ({"repetition_penalty": 1.2}, Sampling(repeat_penalty=1.2)),
    ],
    ids=str,
)
def test_a_models_own_generation_settings_are_the_defaults(
    tmp_path: Path, config: dict[str, Any], own: Sampling
) -> None:
    files = {"generation_config.json": json.dumps(config).encode()}
    assert own_sampling(tiny_package(tmp_path, files=files)) == own
    asked = Choices().sampling(own, None)
    assert asked == replace(own, max_new_tokens=1024, seed=asked.seed, stop=())


def test_generation_settings_out_of_range_are_an_error_of_the_package(tmp_path: Path) -> None:
    assert own_sampling(tiny_package(tmp_path)) == Sampling()
    files = {"generation_config.json": b'{"top_p": 3}'}
    with pytest.raises(PackageError, match="top_p"):
        own_sampling(tiny_package(tmp_path, files=files))

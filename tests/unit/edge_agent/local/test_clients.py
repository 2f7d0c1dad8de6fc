"""Tests of the local server with unmodified programs: the clients of OpenAI and Ollama, and Open WebUI.

Open WebUI is an application, so it cannot be imported. One test repeats requests of its release 0.12.4,
recorded between that program and a personal SmolLM2. They come from its page and from its API, with a
connection of each kind. Of the 36 tools in a recorded request, one is kept. The other tests send the requests
that its source code builds.
"""

import json
import threading
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import ollama
import openai
import pytest

from permille_agent.local.model import LocalModel
from permille_agent.local.serve import Access, LocalServer
from tests.bigram_engine import bigram_engine
from tests.packages import CHATML
from tests.unit.edge_agent.runs import home_with_package, train_quickly, user_text

TOKEN = "a-token-of-the-test"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("served")
    home, _ = home_with_package(folder / "home", chat_template=CHATML)
    train_quickly(home, [user_text(folder)])
    with LocalModel(home, bigram_engine) as model:
        server = LocalServer(("127.0.0.1", 0), model, Access(token=TOKEN, token_file=folder / "serve.token"))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.port}"
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def of_openai(root: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{root}/v1", api_key=TOKEN, max_retries=0) as client:
        yield client


@pytest.fixture
def of_ollama(root: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[ollama.Client]:
    monkeypatch.setenv("OLLAMA_API_KEY", TOKEN)
    with ollama.Client(host=root) as client:
        yield client


def test_openai_lists_and_finds_models(of_openai: openai.OpenAI) -> None:
    assert [model.id for model in of_openai.models.list()] == ["personal", "base"]
    assert of_openai.models.retrieve("base").id == "base"


def test_openai_chats(of_openai: openai.OpenAI) -> None:
    answer = of_openai.chat.completions.create(
        model="gpt-4o-mini",
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Say hello"}]},
        ],
        max_completion_tokens=8,
        seed=1,
        n=1,
        stop=["\n\n\n"],
    )

    assert answer.choices[0].message.role == "assistant"
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 8


def test_openai_streams_a_chat_with_its_usage(of_openai: openai.OpenAI) -> None:
    chunks = list(
        of_openai.chat.completions.create(
            model="personal",
            messages=[{"role": "user", "content": "Say hello"}],
            max_tokens=8,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )

    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason in ("stop", "length")
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens <= 8


def test_openai_completes(of_openai: openai.OpenAI) -> None:
    answer = of_openai.completions.create(model="base", prompt="On day 3", max_tokens=5, temperature=0)
    assert answer.model == "base"
    streamed = of_openai.completions.create(
        model="base", prompt="On day 3", max_tokens=5, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in streamed) == answer.choices[0].text


def test_openai_is_told_what_is_wrong(of_openai: openai.OpenAI, root: str) -> None:
    with pytest.raises(openai.InternalServerError, match="no embeddings") as refused:
        of_openai.embeddings.create(model="personal", input="a text")
    assert refused.value.status_code == 501
    with (
        openai.OpenAI(base_url=f"{root}/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError, match=r"serve\.token"),
    ):
        stranger.models.list()


def test_ollama_lists_and_shows_models(of_ollama: ollama.Client) -> None:
    listed = of_ollama.list().models
    assert [model.model for model in listed] == ["personal:latest", "base:latest"]
    assert len({model.digest for model in listed}) == 2
    details = listed[0].details
    assert details is not None
    assert (details.family, details.quantization_level) == ("llama", "nf4")
    shown = of_ollama.show("personal")
    assert shown.capabilities == ["completion"]
    assert shown.modelinfo is not None
    assert shown.modelinfo["llama.context_length"] == 128
    assert {model.model for model in of_ollama.ps().models} == {"personal:latest", "base:latest"}


def test_ollama_chats_and_streams_the_same(of_ollama: ollama.Client) -> None:
    messages = [{"role": "user", "content": "Say hello"}]
    options = {"temperature": 0.7, "seed": 5, "num_predict": 8, "top_k": 40, "num_ctx": 4096}

    whole = of_ollama.chat("personal", messages, options=options)
    chunks = list(of_ollama.chat("personal", messages, options=options, stream=True))

    assert whole.model == "personal:latest"
    assert whole.eval_count is not None
    assert whole.eval_count <= 8
    assert "".join(chunk.message.content or "" for chunk in chunks) == whole.message.content
    assert [chunk.done for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].done_reason == whole.done_reason
    assert chunks[-1].total_duration is not None
    assert chunks[-1].total_duration > 0


def test_ollama_generates_by_the_template_or_raw(of_ollama: ollama.Client) -> None:
    options = {"temperature": 0, "num_predict": 8}
    answered = of_ollama.generate("base", "Say hello", system="Be brief.", options=options)
    chatted = of_ollama.chat(
        "base",
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say hello"}],
        options=options,
    )
    assert answered.response == chatted.message.content
    raw = of_ollama.generate("base", "Say hello", raw=True, options=options)
    assert raw.prompt_eval_count is not None
    assert answered.prompt_eval_count is not None
    assert raw.prompt_eval_count < answered.prompt_eval_count
    assert of_ollama.generate("base", "").done_reason == "load"
    assert of_ollama.generate("base", "", keep_alive=0).done_reason == "unload"
    with pytest.raises(ollama.ResponseError, match="no embeddings"):
        of_ollama.embed("base", "a text")


TASK = (
    "### Task:\nGenerate a concise, 3-5 word title with an emoji summarizing the chat history.\n"
    '### Output:\nJSON format: { "title": "your concise title here" }\n'
    "### Chat History:\n<chat_history>\nUSER: Say hello\n</chat_history>"
)
HEADERS = {
    "Authorization": f"Bearer {TOKEN}",
    "Content-Type": "application/json",
    "Accept": "*/*",
    "Accept-Encoding": "gzip, deflate, br",
    "User-Agent": "Python/3.11 aiohttp/3.12",
    # Open WebUI sends these with ENABLE_FORWARD_USER_INFO_HEADERS.
    "X-OpenWebUI-User-Name": "Anna",
    "X-OpenWebUI-User-Id": "8a1e",
    "X-OpenWebUI-User-Email": "anna@example.org",
    "X-OpenWebUI-User-Role": "admin",
    "X-OpenWebUI-Chat-Id": "5c0f",
}


RECORDED = [
    json.loads(line) for line in (Path(__file__).parent / "open_webui.jsonl").read_text().splitlines()
]


@pytest.mark.parametrize("asked", RECORDED, ids=lambda asked: asked["path"])
def test_what_open_webui_sent_is_answered(root: str, asked: dict[str, Any]) -> None:
    with httpx.Client(base_url=root, headers=HEADERS, timeout=300) as webui:
        answer = webui.request(asked["method"], asked["path"], json=asked["body"])
    assert (answer.status_code, answer.headers["content-type"]) == (200, asked["type"]), answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    documents = [json.loads(line) for line in lines if line != "[DONE]"]
    if asked["path"] == "/v1/chat/completions":
        choices = [document["choices"][0] for document in documents]
        parts = [choice.get("message", choice.get("delta"))["content"] for choice in choices[:-1] or choices]
        assert "".join(parts) and choices[-1]["finish_reason"] in ("stop", "length")
    elif asked["path"] == "/api/chat":
        assert "".join(document["message"]["content"] for document in documents)
        assert documents[-1]["done"] is True
    else:
        assert [
            model.get("name", model.get("id"))
            for model in documents[0].get("models", documents[0].get("data"))
        ]


def test_open_webui_with_a_connection_of_openai(root: str) -> None:
    """Send the requests of Open WebUI's connection of the kind "OpenAI".

    See `backend/open_webui/routers/openai.py` (verify_connection, get_all_models, generate_chat_completion)
    and `tasks.py` (generate_title, generate_follow_ups).
    """
    with httpx.Client(base_url=f"{root}/v1", headers=HEADERS, timeout=300) as webui:
        models = webui.get("/models").json()
        assert all(model.get("id") for model in models["data"])
        picked = models["data"][0]["id"]

        turn = {"role": "user", "content": [{"type": "text", "text": "Say hello"}]}
        chat = {
            "model": picked,
            "stream": True,
            "messages": [{"role": "system", "content": "Be brief."}, turn],
            "stream_options": {"include_usage": True},
            "max_tokens": 8,
            "seed": 5,  # another seed may end the answer at once
        }
        with webui.stream("POST", "/chat/completions", json=chat) as answer:
            assert "text/event-stream" in answer.headers["Content-Type"]
            lines = [line for line in answer.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
        assert events[-1]["usage"]["total_tokens"] > 0
        assert any(event["choices"] and event["choices"][0]["delta"].get("content") for event in events)

        title = {
            "model": picked,
            "messages": [{"role": "user", "content": TASK}],
            "stream": False,
            "max_tokens": 8,  # Open WebUI renames "max_completion_tokens" for addresses other than OpenAI's
        }
        follow_ups = {"model": picked, "messages": title["messages"], "stream": False}
        for task in (title, follow_ups):
            answer = webui.post("/chat/completions", json=task)
            assert isinstance(answer.json()["choices"][0]["message"]["content"], str), answer.text


def test_open_webui_with_a_connection_of_ollama(root: str) -> None:
    """Send the requests of Open WebUI's connection of the kind "Ollama".

    See `backend/open_webui/routers/ollama.py` (verify_connection, get_all_models, get_ollama_loaded_models,
    get_ollama_versions, generate_chat_completion, unload_model). `utils/payload.py` converts the body.
    """
    with httpx.Client(base_url=root, headers=HEADERS, timeout=300) as webui:
        version = webui.get("/api/version").json()["version"]
        assert all(part.isdigit() for part in version.split("."))
        models = webui.get("/api/tags").json()["models"]
        assert all(model["name"] == model["model"] for model in models)
        loaded = webui.get("/api/ps").json()["models"]
        assert all(datetime.fromisoformat(model["expires_at"]) for model in loaded)
        picked = models[0]["model"]
        assert webui.post("/api/show", json={"name": picked}).json()["details"]["family"] == "llama"

        chat = {
            "model": picked,
            "messages": [
                {"role": "user", "content": "Say hello"},
                {"role": "assistant", "content": "Hello", "thinking": "A greeting."},
                {"role": "user", "content": "Again"},
            ],
            "stream": True,
            "tools": [{"type": "function", "function": {"name": "get_current_timestamp", "parameters": {}}}],
            "options": {"temperature": 0.5, "num_predict": 8, "repeat_penalty": 1.1, "num_ctx": 2048},
            "keep_alive": "5m",
            "think": False,
        }
        with webui.stream("POST", "/api/chat", json=chat) as answer:
            assert answer.headers["Content-Type"] == "application/x-ndjson"
            lines = [json.loads(line) for line in answer.iter_lines()]
        assert all("content" in line["message"] for line in lines)
        assert lines[-1]["done"]
        assert {"eval_count", "eval_duration", "prompt_eval_count", "total_duration"} < lines[-1].keys()

        whole = webui.post("/api/chat", json={**chat, "stream": False}).json()
        assert isinstance(whole["message"]["content"], str)
        assert whole["done_reason"] in ("stop", "length")
        picture = [{"role": "user", "images": ["iVBORw0KGgo="]}]  # a picture without text has no "content"
        refused = webui.post("/api/chat", json={**chat, "messages": picture})
        assert (refused.status_code, "reads only text" in refused.json()["error"]) == (400, True)

        unload = {"model": picked, "keep_alive": 0, "prompt": ""}
        assert webui.post("/api/generate", json=unload).json()["done_reason"] == "unload"

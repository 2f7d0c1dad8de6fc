"""The part of Ollama's REST API that Open WebUI and the `ollama` client use.

Models have names such as `personal:latest`. Streams are lines of JSON. Requests that change the installed
models (`pull`, `create`, `delete`) are not supported. Use `permille-agent` for them.
"""

import json
import math
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Annotated, Any, Literal

from pydantic import Field

from permille.digests import digest_of
from permille.models.families import expected_tensors
from permille.version import __version__
from permille_agent.local.model import Generated, LocalModel, Sampling, Variant
from permille_agent.local.replies import (
    Choices,
    Fields,
    Message,
    NoEmbeddingsError,
    Reply,
    notes_of,
    parsed,
    turns,
    variant_of,
)


class Options(Choices):
    """Sampling options. A `num_predict` of -1 means no limit in Ollama. Here it means the default limit."""

    num_predict: int | None = None


class Request(Fields):
    """Fields of both generating requests. `format` must be empty, since it is not supported."""

    model: str | None = None
    stream: bool | None = None
    # Programs in Go send null for no options.
    options: Options | None = None
    format: Literal[""] | None = None
    keep_alive: str | float | None = None

    def sampling(self, model: LocalModel) -> Sampling:
        """Return the sampling settings of this request."""
        options = self.options or Options()
        return options.sampling(model.sampling, options.num_predict)


class ChatRequest(Request):
    """Body of POST /api/chat. A request without messages only loads the model."""

    messages: Annotated[list[Message], Field(max_length=1000)] | None = None


class GenerateRequest(Request):
    """Body of POST /api/generate. A request without a prompt only loads the model.

    A chat model answers the prompt. With `raw`, it continues the prompt.
    """

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: Annotated[list[str], Field(max_length=0)] | None = None


class NamedRequest(Fields):
    """Body of POST /api/show."""

    model: str | None = None
    name: str | None = None


class GenerateForm:
    """An answer of `/api/generate`, as a `permille_agent.local.replies.AnswerFormat`."""

    media_type = "application/x-ndjson"

    def __init__(self, variant: Variant) -> None:
        """Start the clock for the durations in the answer."""
        self._model = _name(variant)
        self._started_ns = self._first_ns = time.monotonic_ns()

    def whole(self, text: str, generated: Generated) -> Mapping[str, Any]:
        """See `AnswerFormat`."""
        return self._last(text, generated)

    def documents(self, pieces: Iterator[str], generated: Generated) -> Iterator[Mapping[str, Any]]:
        """See `AnswerFormat`."""
        for number, piece in enumerate(pieces):
            if not number:
                # The time until the first piece counts as the time for the prompt.
                self._first_ns = time.monotonic_ns()
            yield self._head(piece) | {"done": False}
        yield self._last("", generated)

    def encode(self, document: Mapping[str, Any]) -> bytes:
        """See `AnswerFormat`."""
        return json.dumps(document).encode() + b"\n"

    def end(self) -> bytes:
        """See `AnswerFormat`."""
        return b""

    def loaded(self, request: Request) -> Mapping[str, Any]:
        """Answer a request that only loads or unloads the model. Nothing happens: it is always loaded."""
        reason = "unload" if request.keep_alive == 0 else "load"
        return self._head("") | {"done": True, "done_reason": reason}

    def _last(self, text: str, generated: Generated) -> dict[str, Any]:
        now_ns = time.monotonic_ns()
        return self._head(text) | {
            "done": True,
            "done_reason": generated.finish_reason,
            "total_duration": now_ns - self._started_ns,
            "load_duration": 0,  # the model is always loaded
            "prompt_eval_count": generated.prompt_tokens,
            "prompt_eval_duration": self._first_ns - self._started_ns,
            "eval_count": generated.completion_tokens,
            "eval_duration": now_ns - self._first_ns,
            **notes_of(generated),
        }

    def _head(self, text: str) -> dict[str, Any]:
        return {"model": self._model, "created_at": _instant(time.time()), **self._text(text)}

    def _text(self, text: str) -> Mapping[str, Any]:
        return {"response": text}


class ChatForm(GenerateForm):
    """An answer of `/api/chat`."""

    def _text(self, text: str) -> Mapping[str, Any]:
        return {"message": {"role": "assistant", "content": text}}


def get(model: LocalModel, path: str) -> Mapping[str, Any] | None:
    """Answer a GET request. Return None for an unknown path."""
    match path:
        case "/api/version":
            return {"version": __version__}
        case "/api/tags":
            return {"models": [_entry(model, variant) for variant in model.variants]}
        case "/api/ps":
            # The model stays loaded as long as the server runs.
            running = {"expires_at": "9999-12-31T23:59:59Z", "size_vram": 0}
            return {
                "models": [
                    {**_entry(model, variant), **running, "context_length": model.room(variant)}
                    for variant in model.variants
                ]
            }
    return None


def post(model: LocalModel, path: str, body: bytes) -> Reply | Mapping[str, Any] | None:
    """Answer a POST request. Return None for an unknown path.

    Raises:
        InputError: the request is malformed, or asks for something that the model cannot do.
    """
    match path:
        case "/api/chat":
            return _chat(model, parsed(ChatRequest, body))
        case "/api/generate":
            return _generate(model, parsed(GenerateRequest, body))
        case "/api/show":
            named = parsed(NamedRequest, body)
            return _show(model, variant_of(model, named.model or named.name))
        case "/api/embed" | "/api/embeddings":
            raise NoEmbeddingsError
    return None


def error(status: HTTPStatus, message: str) -> Mapping[str, Any]:  # noqa: ARG001 - see Interface
    """Return the document of an error."""
    return {"error": message}


def _chat(model: LocalModel, request: ChatRequest) -> Reply | Mapping[str, Any]:
    variant = variant_of(model, request.model)
    form = ChatForm(variant)
    if not request.messages:
        return form.loaded(request)
    written = model.reply(turns(request.messages), variant, request.sampling(model))
    # In Ollama's API a missing `stream` means a stream, unlike in OpenAI's.
    return Reply(form, *written, stream=request.stream is not False)


def _generate(model: LocalModel, request: GenerateRequest) -> Reply | Mapping[str, Any]:
    variant = variant_of(model, request.model)
    form = GenerateForm(variant)
    if not request.prompt:
        return form.loaded(request)
    sampling = request.sampling(model)
    if request.raw or not model.tokenizer.can_chat:
        written = model.complete(request.prompt, variant, sampling)
    else:
        system = [("system", request.system)] if request.system else []
        written = model.reply([*system, ("user", request.prompt)], variant, sampling)
    return Reply(form, *written, stream=request.stream is not False)


def _entry(model: LocalModel, variant: Variant) -> dict[str, Any]:
    package = model.package
    return {
        "name": _name(variant),
        "model": _name(variant),
        "modified_at": _instant(package.blobs.path(package.digest).stat().st_mtime),
        "size": package.manifest.size_bytes,
        # Variants share one package and differ only in these values, so this digest tells them apart.
        "digest": digest_of(model.values(variant).tobytes()).removeprefix("sha256:"),
        "details": _details(model),
    }


def _show(model: LocalModel, variant: Variant) -> Mapping[str, Any]:
    package, details = model.package, _details(model)
    family = details["family"]
    return {
        "modelfile": "",
        "parameters": f"temperature {model.sampling.temperature}\ntop_p {model.sampling.top_p}",
        "template": "",
        "details": details,
        "model_info": {
            "general.architecture": family,
            "general.parameter_count": _weights(model),
            f"{family}.context_length": model.room(variant),
            f"{family}.embedding_length": package.config["hidden_size"],
        },
        "capabilities": ["completion"],
        "modified_at": _entry(model, variant)["modified_at"],
    }


def _details(model: LocalModel) -> dict[str, Any]:
    family = model.package.manifest.model.family
    weights = _weights(model)
    size = f"{weights / 1e9:.1f}B" if weights >= 1e9 else f"{weights / 1e6:.2f}M"
    return {
        "parent_model": "",
        "format": "permille",
        "family": family,
        "families": [family],
        "parameter_size": size,
        "quantization_level": model.package.manifest.scheme.name.value,
    }


def _weights(model: LocalModel) -> int:
    return sum(math.prod(shape) for shape in expected_tensors(model.package.config).values())


def _name(variant: Variant) -> str:
    return f"{variant.value}:latest"


def _instant(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()

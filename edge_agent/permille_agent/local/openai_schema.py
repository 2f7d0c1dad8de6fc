"""The REST interface of OpenAI, as vLLM and llama.cpp's server offer it: models, completions and chats."""

import json
import time
import uuid
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import Annotated, Any, Literal

from pydantic import Field

from permille_agent.local.model import Generated, LocalModel, Sampling, Variant
from permille_agent.local.replies import (
    Choices,
    Fields,
    Message,
    MostTokens,
    NoEmbeddingsError,
    Reply,
    notes_of,
    parsed,
    turns,
    variant_of,
)


class StreamOptions(Fields):
    """Options of a stream."""

    include_usage: bool | None = None


class TextFormat(Fields):
    """The only format of an answer: text. A request for JSON must fail, because nothing here enforces it."""

    type: Literal["text"]


class Request(Choices):
    """Fields of both kinds of completion requests."""

    model: str | None = None
    max_tokens: MostTokens | None = None
    max_completion_tokens: MostTokens | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: TextFormat | None = None
    n: Annotated[int, Field(ge=1, le=1)] | None = None

    def choices(self, model: LocalModel) -> Sampling:
        """Return the sampling settings of this request."""
        # `max_tokens` is the old name of `max_completion_tokens`. Programs may send both.
        return self.sampling(model.sampling, self.max_completion_tokens or self.max_tokens)


class CompletionRequest(Request):
    """Body of POST /v1/completions. A list of prompts must have exactly one item."""

    prompt: str | Annotated[list[str], Field(min_length=1, max_length=1)]

    def text(self) -> str:
        """Return the prompt."""
        return self.prompt if isinstance(self.prompt, str) else self.prompt[0]


class ChatRequest(Request):
    """Body of POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, max_length=1000)


class CompletionForm:
    """A completion, as a `permille_agent.local.replies.AnswerFormat`."""

    media_type = "text/event-stream; charset=utf-8"
    prefix = "cmpl"
    whole_object = "text_completion"
    piece_object = "text_completion"

    def __init__(self, variant: Variant, *, usage_wanted: bool) -> None:
        """Choose the form of an answer. With `usage_wanted`, a stream ends with a chunk of token counts."""
        self._usage_wanted = usage_wanted
        self._head = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": variant.value,
        }

    def whole(self, text: str, generated: Generated) -> Mapping[str, Any]:
        """See `AnswerFormat`."""
        choice = {"index": 0, **self._text(text), "logprobs": None, "finish_reason": generated.finish_reason}
        return {
            **self._head,
            "object": self.whole_object,
            "choices": [choice],
            "usage": _usage(generated),
            **notes_of(generated),
        }

    def documents(self, pieces: Iterator[str], generated: Generated) -> Iterator[Mapping[str, Any]]:
        """See `AnswerFormat`."""
        yield from (self._chunk(delta, None) for delta in self._beginning())
        for piece in pieces:
            yield self._chunk(self._delta(piece), None)
        yield {**self._chunk(self._delta(""), generated.finish_reason), **notes_of(generated)}
        if self._usage_wanted:
            yield {**self._head, "object": self.piece_object, "choices": [], "usage": _usage(generated)}

    def encode(self, document: Mapping[str, Any]) -> bytes:
        """See `AnswerFormat`."""
        return b"data: " + json.dumps(document).encode() + b"\n\n"

    def end(self) -> bytes:
        """See `AnswerFormat`."""
        return b"data: [DONE]\n\n"

    def _chunk(self, delta: Mapping[str, Any], finish_reason: str | None) -> Mapping[str, Any]:
        choice = {"index": 0, **delta, "logprobs": None, "finish_reason": finish_reason}
        # As in OpenAI's API, if usage is wanted, all documents but the last have a `usage` of null.
        usage = {"usage": None} if self._usage_wanted else {}
        return {**self._head, "object": self.piece_object, "choices": [choice], **usage}

    def _beginning(self) -> list[Mapping[str, Any]]:
        return []

    def _text(self, text: str) -> Mapping[str, Any]:
        return {"text": text}

    def _delta(self, text: str) -> Mapping[str, Any]:
        return {"text": text}


class ChatForm(CompletionForm):
    """A chat completion."""

    prefix = "chatcmpl"
    whole_object = "chat.completion"
    piece_object = "chat.completion.chunk"

    def _beginning(self) -> list[Mapping[str, Any]]:
        return [{"delta": {"role": "assistant", "content": ""}}]

    def _text(self, text: str) -> Mapping[str, Any]:
        return {"message": {"role": "assistant", "content": text}}

    def _delta(self, text: str) -> Mapping[str, Any]:
        return {"delta": {"content": text} if text else {}}


def get(model: LocalModel, path: str) -> Mapping[str, Any] | None:
    """Answer a GET request. Return None for an unknown path."""
    match path.removeprefix("/v1").split("/"):
        case ["", "models"]:
            return {"object": "list", "data": [_entry(variant) for variant in model.variants]}
        case ["", "models", *name]:
            return _entry(variant_of(model, "/".join(name)))
        case ["", "health"]:
            return {"status": "ok"}  # as llama.cpp's server says it
    return None


def post(model: LocalModel, path: str, body: bytes) -> Reply | None:
    """Answer a POST request. Return None for an unknown path.

    Raises:
        InputError: the request is malformed, or asks for something that the model cannot do.
    """
    match path.removeprefix("/v1"):  # as in llama.cpp's server
        case "/completions":
            completion = parsed(CompletionRequest, body)
            variant = variant_of(model, completion.model)
            written = model.complete(completion.text(), variant, completion.choices(model))
            return _reply(completion, CompletionForm, variant, written)
        case "/chat/completions":
            chat = parsed(ChatRequest, body)
            variant = variant_of(model, chat.model)
            written = model.reply(turns(chat.messages), variant, chat.choices(model))
            return _reply(chat, ChatForm, variant, written)
        case "/embeddings":
            raise NoEmbeddingsError
    return None


def error(status: HTTPStatus, message: str) -> Mapping[str, Any]:
    """Return the document of an error."""
    kind = "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": status.phrase.lower()}}


def _reply(
    request: Request, form: type[CompletionForm], variant: Variant, written: tuple[Generated, Iterator[str]]
) -> Reply:
    options = request.stream_options
    usage_wanted = options is not None and bool(options.include_usage)
    return Reply(form(variant, usage_wanted=usage_wanted), *written, stream=bool(request.stream))


def _entry(variant: Variant) -> Mapping[str, Any]:
    return {"id": variant.value, "object": "model", "created": 0, "owned_by": "permille"}


def _usage(generated: Generated) -> Mapping[str, int]:
    return {
        "prompt_tokens": generated.prompt_tokens,
        "completion_tokens": generated.completion_tokens,
        "total_tokens": generated.prompt_tokens + generated.completion_tokens,
    }

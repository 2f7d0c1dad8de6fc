"""Types that both REST APIs of the local server share: settings, messages and replies."""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Annotated, Any, Final, Literal, Protocol, TypeVar

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from permille.errors import InputError, PermilleError
from permille_agent.local.model import Generated, LocalModel, Sampling, Variant
from permille_agent.state.home import first_error

MOST_TOKENS: Final = 32_768
# A small model may never write its end of turn. So this limit also replaces Ollama's -1 (no limit).
DEFAULT_TOKENS: Final = 1024
_SEEDS: Final = 1 << 63
_CANNOT: Final = {
    "content": "content: The model reads only text. Send a string or a list of text parts, and no images.",
    "images": "images: The model reads only text. Send no images.",
    "format": "format: The server cannot enforce a format. Ask for JSON in the message instead.",
    "response_format": "response_format: The server cannot enforce a format. Ask for JSON in the message "
    "instead.",
    "n": "n: A request gets one answer. Leave it out, and send more requests for more answers.",
}
"""Messages for fields that ask for more than the model can do. pydantic's own messages name only the type."""

Request = TypeVar("Request", bound=BaseModel)


class Choices(BaseModel):
    """Sampling settings of a request. A missing setting has the model's own value.

    Unknown fields are ignored, because programs send many of them.
    """

    model_config = ConfigDict(extra="ignore", strict=True)

    temperature: float | None = Field(default=None, ge=0.0, le=2.0)
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    top_k: int | None = None
    repeat_penalty: float | None = Field(
        default=None, gt=0.0, le=10.0, validation_alias=AliasChoices("repeat_penalty", "repetition_penalty")
    )
    seed: int | None = None
    stop: str | list[str] | None = None

    def sampling(self, own: Sampling, max_new_tokens: int | None) -> Sampling:
        """Return the model's `own` settings with these changes. Without a seed, a random one is drawn."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        most = max_new_tokens if max_new_tokens and max_new_tokens > 0 else DEFAULT_TOKENS
        return replace(
            own,
            max_new_tokens=min(most, MOST_TOKENS),
            temperature=own.temperature if self.temperature is None else self.temperature,
            top_p=own.top_p if self.top_p is None else self.top_p,
            top_k=own.top_k if self.top_k is None else max(0, self.top_k),  # -1 and 0 mean no limit
            repeat_penalty=own.repeat_penalty if self.repeat_penalty is None else self.repeat_penalty,
            seed=secrets.randbelow(_SEEDS) if self.seed is None else self.seed % _SEEDS,
            stop=tuple(word for word in stop if word),
        )


class Part(BaseModel):
    """A part of a message's content."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A chat message: a text or a list of text parts. Ollama's `images` must be empty."""

    model_config = ConfigDict(extra="ignore", strict=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]
    images: Annotated[list[str], Field(max_length=0)] | None = None

    def turn(self) -> tuple[str, str]:
        """Return role and text for the chat template. Parts are joined by line breaks, as in vLLM."""
        role = "system" if self.role == "developer" else self.role
        content = self.content
        return role, content if isinstance(content, str) else "\n".join(part.text for part in content)


class AnswerFormat(Protocol):
    """The format of an answer, as one document or as a stream of documents."""

    media_type: str

    def whole(self, text: str, generated: Generated) -> Mapping[str, Any]:
        """Return the whole answer in one document."""

    def documents(self, pieces: Iterator[str], generated: Generated) -> Iterator[Mapping[str, Any]]:
        """Yield the documents of a stream."""

    def encode(self, document: Mapping[str, Any]) -> bytes:
        """Return a document of a stream as it is sent."""

    def end(self) -> bytes:
        """Return what is sent after the last document."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A text that is being generated, and the format of its answer."""

    form: AnswerFormat
    generated: Generated
    pieces: Iterator[str]
    stream: bool


class NoEmbeddingsError(PermilleError):
    """A program asks for embeddings, which this model does not make."""

    def __init__(self) -> None:
        super().__init__(
            "This model writes text and makes no embeddings. Choose a model for embeddings in your program."
        )


class Interface(Protocol):
    """A module that answers the requests of one REST API."""

    def get(self, model: LocalModel, path: str) -> Mapping[str, Any] | None:
        """Answer a GET request. Return None for an unknown path."""

    def post(self, model: LocalModel, path: str, body: bytes) -> Reply | Mapping[str, Any] | None:
        """Answer a POST request. Return None for an unknown path.

        Raises:
            InputError: the request is malformed, or asks for something that the model cannot do.
            NoEmbeddingsError: the request asks for embeddings.
        """

    def error(self, status: HTTPStatus, message: str) -> Mapping[str, Any]:
        """Return the document of an error."""


def parsed(kind: type[Request], body: bytes) -> Request:
    """Parse a request's body.

    Raises:
        InputError: the body is not JSON, or a field is not valid. The message names the field.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as exc:
        fields = exc.errors(include_url=False, include_input=False)[0]["loc"]
        cannot = [_CANNOT[field] for field in fields if field in _CANNOT]
        raise InputError(cannot[0] if cannot else first_error(exc)) from exc


def variant_of(model: LocalModel, name: str | None) -> Variant:
    """Return the variant with this name. An unknown name means the default, as in llama.cpp's server."""
    # Ollama's clients append ":latest" to names.
    known = (name or "").removesuffix(":latest")
    return Variant(known) if known in model.variants else model.variants[0]


def turns(messages: Sequence[Message]) -> list[tuple[str, str]]:
    """Return the turns of messages for a chat template."""
    return [message.turn() for message in messages]

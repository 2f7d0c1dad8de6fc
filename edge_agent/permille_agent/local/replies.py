"""Types that both REST APIs of the local server share: settings, messages and replies."""

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Annotated, Any, Final, Literal, Protocol, TypeVar

from pydantic import AfterValidator, AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from permille.errors import InputError, PermilleError
from permille_agent.local.model import Generated, LocalModel, Sampling, Variant
from permille_agent.state.home import first_error
from permille_agent.text.documents import TOOLS, said

MOST_TOKENS: Final = 32_768
# A small model may never write its end of turn. So this limit also replaces Ollama's -1 (no limit).
DEFAULT_TOKENS: Final = 1024
LEAST_TOP_P: Final = 1e-6
_SEEDS: Final = 1 << 63
_CANNOT: Final = {
    "content": "content: The model reads only text. Send a string or a list of text parts, and no images.",
    "images": "images: The model reads only text. Send no images.",
    "format": "format: The server cannot enforce a format. Ask for JSON in the message instead.",
    "response_format": "response_format: The server cannot enforce a format. Ask for JSON in the message "
    "instead.",
    "role": "role: Send messages of system, developer, user, assistant or tool.",
    "n": "n: A request gets one answer. Leave it out, and send more requests for more answers.",
}
"""Messages for fields that ask for more than the model can do. pydantic's own messages name only the type."""

Request = TypeVar("Request", bound="Fields")


def _some(limit: int) -> int:
    if limit == 0:
        raise ValueError("Ask for at least one token, or send -1 for no limit.")
    return limit


MostTokens = Annotated[int, AfterValidator(_some)]
"""The largest number of tokens of an answer. As in llama.cpp and Ollama, -1 sets no limit."""


class Fields(BaseModel):
    """A part of a request. Unknown fields are ignored, because programs send many of them.

    Some programs write numbers as 4.0 or "4", and both are read.
    """

    model_config = ConfigDict(extra="ignore")


class Choices(Fields):
    """Sampling settings of a request. A missing setting has the model's own value."""

    temperature: float | None = Field(default=None, ge=0.0, le=2.0)
    top_p: float | None = Field(default=None, ge=0.0, le=1.0)
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
            # In both APIs, 0 leaves the most likely token.
            top_p=own.top_p if self.top_p is None else max(self.top_p, LEAST_TOP_P),
            top_k=own.top_k if self.top_k is None else max(0, self.top_k),  # -1 and 0 mean no limit
            repeat_penalty=own.repeat_penalty if self.repeat_penalty is None else self.repeat_penalty,
            seed=secrets.randbelow(_SEEDS) if self.seed is None else self.seed % _SEEDS,
            stop=tuple(word for word in stop if word),
        )


class Message(Fields):
    """A chat message. Its content is checked when it is used. Ollama's `images` must be empty."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Any = None
    images: Annotated[list[str], Field(max_length=0)] | None = None
    tool_calls: list[Any] | None = None

    @property
    def text(self) -> str:
        """The text. Parts are joined by line breaks, as in vLLM.

        Raises:
            InputError: the content has a part that is no text.
        """
        try:
            return said(self.content)
        except InputError as exc:
            raise InputError(_CANNOT["content"]) from exc

    @property
    def of_tools(self) -> bool:
        """Return whether the turn only calls a tool, or is a tool's answer."""
        return self.role in TOOLS or (bool(self.tool_calls) and not self.text.strip())


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
        # Python's parser takes half an emoji, which programs that cut texts send. It becomes U+FFFD.
        # It also takes a byte-order mark, NaN and repeated names.
        document = json.dumps(json.loads(body), ensure_ascii=False)
        whole = document.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        return kind.model_validate_json(whole)
    except ValidationError as exc:
        fields = exc.errors(include_url=False, include_input=False)[0]["loc"]
        cannot = [_CANNOT[field] for field in fields if field in _CANNOT]
        raise InputError(cannot[0] if cannot else first_error(exc)) from exc
    except (ValueError, RecursionError) as exc:
        raise InputError(f"The body is not JSON: {exc!s:.200}") from exc


def notes_of(generated: Generated) -> Mapping[str, Any]:
    """Return the fields about the user's text, which both APIs lack. Clients ignore unknown fields."""
    return generated.notes.fields() if generated.notes else {}


def variant_of(model: LocalModel, name: str | None) -> Variant:
    """Return the variant with this name. An unknown name means the default, as in llama.cpp's server."""
    # Ollama's clients append ":latest" to names.
    known = (name or "").removesuffix(":latest")
    return Variant(known) if known in model.variants else model.variants[0]


def turns(messages: Sequence[Message]) -> list[tuple[str, str]]:
    """Return the turns of messages for a chat template.

    A request's tools are ignored, so the turns of tools in its history are left out.

    Raises:
        InputError: no turn is left.
    """
    roles = {"developer": "system"}
    if not (kept := [message for message in messages if not message.of_tools]):
        raise InputError("messages: Send at least one message of system, user or assistant.")
    return [(roles.get(message.role, message.role), message.text) for message in kept]

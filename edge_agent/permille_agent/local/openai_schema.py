"""The OpenAI REST schema of the local server: what a request may say, and how an answer looks."""

import secrets
import time
import uuid
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from permille_agent.local.model import Generated, Sampling, Variant


class Request(BaseModel):
    """What both kinds of completion share; fields that we do not know are the client's business."""

    model_config = ConfigDict(extra="ignore", strict=True)

    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=1, le=32_768)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=32_768)
    temperature: float = Field(default=1.0, ge=0.0, le=2.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    seed: int | None = Field(default=None, ge=0, le=2**63 - 1)
    stop: str | list[str] | None = None
    stream: bool = False
    n: Literal[1] = 1

    def sampling(self) -> Sampling:
        """The choices for the engine; without a seed, a new one."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return Sampling(
            max_new_tokens=self.max_completion_tokens or self.max_tokens or 256,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=secrets.randbits(63) if self.seed is None else self.seed,
            stop=tuple(word for word in stop if word),
        )


class CompletionRequest(Request):
    """Body of POST /v1/completions."""

    prompt: str


class Message(BaseModel):
    """One chat message."""

    model_config = ConfigDict(extra="ignore", strict=True)

    role: Literal["system", "user", "assistant"]
    content: str


class ChatRequest(Request):
    """Body of POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, max_length=1000)


class Form:
    """How one kind of answer looks."""

    prefix: str
    whole_object: str
    piece_object: str

    def __init__(self, variant: Variant) -> None:
        self._head = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": variant.value,
        }

    def whole(self, text: str, generated: Generated) -> dict[str, Any]:
        """The whole answer in one."""
        usage = {
            "prompt_tokens": generated.prompt_tokens,
            "completion_tokens": generated.completion_tokens,
            "total_tokens": generated.prompt_tokens + generated.completion_tokens,
        }
        choice = {"index": 0, **self._text(text), "logprobs": None, "finish_reason": generated.finish_reason}
        return {**self._head, "object": self.whole_object, "choices": [choice], "usage": usage}

    def piece(self, text: str, finish_reason: str | None) -> dict[str, Any]:
        """One event of a stream."""
        choice = {"index": 0, **self._delta(text), "logprobs": None, "finish_reason": finish_reason}
        return {**self._head, "object": self.piece_object, "choices": [choice]}

    def _text(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _delta(self, text: str) -> dict[str, Any]:
        return {"text": text}


class CompletionForm(Form):
    prefix = "cmpl"
    whole_object = "text_completion"
    piece_object = "text_completion"


class ChatForm(Form):
    prefix = "chatcmpl"
    whole_object = "chat.completion"
    piece_object = "chat.completion.chunk"

    def _text(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}}

    def _delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"role": "assistant", "content": text} if text else {}}

"""The model of this device in the program `llm`, as `permille/home`. This is a plugin of `llm`.

    llm -m permille/home "What did I plant in March?"
    llm chat -m permille/home -o base true

`llm` imports this module at each start, so only an answer imports the agent. Answers are written one after
the other, because an opened model writes one at a time.
"""

import atexit
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, cast

import llm
from llm.parts import Message, TextPart
from pydantic import Field

from permille.errors import PermilleError

if TYPE_CHECKING:
    from permille_agent.embed import LocalModel

MODEL_ID = "permille/home"


@llm.hookimpl
def register_models(register: Callable[[llm.Model], None]) -> None:
    """Add the model to those of `llm`."""
    register(HomeModel())


class HomeModel(llm.Model):
    """The model in use in a home folder of the agent."""

    model_id = MODEL_ID
    can_stream = True

    class Options(llm.Options):
        """Options of an answer (`-o NAME VALUE`)."""

        home: Path | None = Field(default=None, description="Home folder of permille-agent.")
        base: bool = Field(default=False, description="Use the model as it was before training.")
        notes: bool = Field(
            default=True, description="Put passages of your text that fit before the question."
        )
        max_tokens: int = Field(default=256, ge=1, description="Largest number of tokens to generate.")
        temperature: float | None = Field(
            default=None, ge=0, le=2, description="Randomness; 0 gives the most likely text."
        )
        top_p: float | None = Field(
            default=None, ge=0.01, le=1, description="Draw from the likeliest tokens of this probability."
        )
        seed: int = Field(default=0, ge=0, description="The same seed gives the same text.")

    def __init__(self) -> None:
        self._one_at_a_time = threading.Lock()

    def execute(
        self,
        prompt: llm.Prompt,
        stream: bool,  # noqa: ARG002
        response: llm.Response,
        conversation: llm.Conversation | None,  # noqa: ARG002
    ) -> Iterator[str]:
        """Yield the pieces of the answer to a prompt.

        Raises:
            llm.ModelError: no package is installed, the model has no chat template, or the text is too long.
        """
        options = cast(HomeModel.Options, prompt.options)
        try:
            with self._one_at_a_time:
                model = _opened(options.home, options.notes)
                model.keep_up()  # `llm chat` runs long, and the user may remove a text meanwhile
                named = {name: getattr(options, name) for name in ("temperature", "top_p")}
                chosen = {name: value for name, value in named.items() if value is not None}
                sampling = replace(
                    model.sampling, max_new_tokens=options.max_tokens, seed=options.seed, **chosen
                )
                variant = model.variants[-1 if options.base else 0]  # the base comes last
                turns = [(message.role, _text(message)) for message in prompt.messages]
                generated, pieces = model.reply(turns, variant, sampling)
                yield from pieces
        except PermilleError as exc:
            raise llm.ModelError(str(exc)) from exc
        response.set_usage(input=generated.prompt_tokens, output=generated.completion_tokens)


def _text(message: Message) -> str:
    return "\n".join(part.text for part in message.parts if isinstance(part, TextPart))


@cache
def _opened(home: Path | None, notes: bool) -> "LocalModel":
    """Open the model of a home folder once, for all answers of this process."""
    from permille_agent.embed import ANY_ENGINE, LocalModel, default_root, open_home

    model = LocalModel(open_home((home or default_root()).expanduser().absolute()), ANY_ENGINE, notes=notes)
    atexit.register(model.close)
    return model

"""Rendering of chat messages by the package's template, with the character spans of the turns to learn.

The template is foreign code. It is rendered in a child process with limits of time, memory and size
(`permille.sandbox`). A template that exceeds a limit is an error of the package.

A package without a template cannot chat, but it can learn conversations, rendered by `DEFAULT_TEMPLATE`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date
from functools import cached_property
from typing import Any

from permille.errors import InputError, PackageError
from permille.sandbox.process import Sandbox, SandboxError

MAX_RENDERED_CHARACTERS = 8 << 20
# A longer conversation is rendered in windows. Without windows, each turn would be rendered with all text
# before it, which would take hours for 20,000 turns. A training row holds fewer messages than a window.
WINDOW_MESSAGES = 32
TRAINING_DAY = date(2024, 7, 26)
"""Date in the prompts of training conversations, so that a run has the same rows on every day.

Llama 3.2's template prints this date by default."""

DEFAULT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ message['role'] | capitalize }}: {{ message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' else '' }}\n"
    "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)

Messages = Sequence[tuple[str, str]]


class ChatTemplate:
    """Renders messages with one template, in the child process of a package.

    Attributes:
        source: the template's own text.
    """

    def __init__(self, template: str | None, variables: Mapping[str, str], sandbox: Sandbox) -> None:
        """Take a template and its variables (`bos_token`, `eos_token`)."""
        self.source = DEFAULT_TEMPLATE if template is None else template
        self._variables = {"bos_token": "", "eos_token": "", **variables}
        self._sandbox = sandbox

    def render(
        self, messages: Messages, *, add_generation_prompt: bool = False, today: date = TRAINING_DAY
    ) -> str:
        """Render messages as text.

        Args:
            messages: roles and texts.
            add_generation_prompt: append the start of an assistant's turn.
            today: date, or date and time, for templates that print one, such as Llama 3.2's.

        Raises:
            PackageError: the template is not valid, refuses the messages, or exceeds a limit.
        """
        return str(self._render(self._fitting(messages), add_generation_prompt, (), today)["text"])

    def render_with_targets(
        self, messages: Messages, roles: Sequence[str] = ("assistant",)
    ) -> tuple[str, tuple[tuple[int, int], ...]]:
        """Render a conversation, and return its text with the character spans of the turns of `roles`.

        - An assistant's span starts after the generation prompt. Spans of other roles start at the content.
        - A span ends with the rendered turn, so that the model also learns the end of a turn.
        - Some templates rewrite earlier turns. The span of such a turn ends with its content.
        - A long conversation is split into windows, each with the system message before it.

        Raises:
            InputError: a turn of `roles` does not appear in the rendered text.
            PackageError: as for `render`.
        """
        texts: list[str] = []
        spans: list[tuple[int, int]] = []
        length = 0
        for window in _windows(self._fitting(messages)):
            text, found = self._window(window, roles)
            spans += [(length + start, length + end) for start, end in found]
            texts.append(text)
            length += len(text)
        return "".join(texts), tuple(spans)

    @cached_property
    def _takes_system(self) -> bool:
        """Return whether the template writes a system message. Gemma's template refuses it."""
        said = "You are brief."
        return said in self._tried((("system", said), ("user", "Hi")))

    @cached_property
    def _takes_any_order(self) -> bool:
        """Return whether the turns need not alternate. They must with Gemma's and Mistral's templates."""
        return bool(self._tried((("assistant", "Hi"), ("user", "Ho"), ("system", "Yes"), ("user", "No"))))

    def _tried(self, messages: Messages) -> str:
        """Return the text of messages, or an empty one if the template refuses them."""
        try:
            return str(self._render(messages, False, ())["text"])
        except PackageError as exc:
            if exc.code != "chat-template":
                raise
            return ""

    def _fitting(self, messages: Messages) -> Messages:
        """Bring messages into the form that the template takes.

        - A system message is put before the user's if the template does not write it, as llama.cpp does.
        - Neighbours of one role become one message if the turns must alternate. Programs leave out turns of
          tools, begin with a greeting, and tell the system something within a chat.
        """
        if messages and messages[0][0] == "system" and not self._takes_system:
            (_, told), *rest = messages
            if rest and rest[0][0] == "user":
                told, rest = f"{told}\n{rest[0][1]}", rest[1:]
            messages = [("user", told), *rest]
        return messages if _alternate(messages) or self._takes_any_order else _alternating(messages)

    def _window(self, messages: Messages, roles: Sequence[str]) -> tuple[str, list[tuple[int, int]]]:
        turns = [i for i, (role, said) in enumerate(messages) if role in roles and said.strip()]
        answers = {i for i in turns if messages[i][0] == "assistant"}
        # For each turn, ask for the rendered length before the turn and through the turn.
        asked = [prefix for i in turns for prefix in ((i, i in answers), (i + 1, False))]
        # Do not ask for the length before the first message: some templates fail on an empty list.
        answer = self._render(messages, False, [prefix for prefix in asked if prefix[0]])
        text, lengths = str(answer["text"]), list(answer["prefixes"])
        if turns[:1] == [0]:
            lengths.insert(0, None)
        spans: list[tuple[int, int]] = []
        position = 0
        for i, before, through in zip(turns, lengths[::2], lengths[1::2], strict=True):
            content = messages[i][1].strip()
            # The content is searched after the generation prompt, since it may also occur in an earlier turn.
            start = text.find(content, max(before or 0, position))
            if start < 0:
                start = text.find(content, position)
            if start < 0:
                role = messages[i][0]
                raise InputError(f"a message of the {role} does not appear in what the chat template renders")
            if i in answers and before is not None and position <= before <= start:
                start = before
            position = through if through is not None and through > start else 0
            # If the template has rewritten this turn, the span ends with the content.
            position = position or text.index(content, start) + len(content)
            spans.append((start, position))
        return text, spans

    def _render(
        self,
        messages: Messages,
        prompt: bool,
        prefixes: Sequence[tuple[int, bool]],
        today: date = TRAINING_DAY,
    ) -> Mapping[str, Any]:
        request = {
            "do": "render",
            "template": self.source,
            "variables": self._variables,
            "messages": [{"role": role, "content": content} for role, content in messages],
            "prompt": prompt,
            "prefixes": prefixes,
            "limit": MAX_RENDERED_CHARACTERS,
            "today": today.isoformat(),
        }
        characters = sum(len(content) for _, content in messages)
        return answered(lambda: self._sandbox.ask(request, characters=characters), "chat-template")


def answered(ask: Callable[[], Mapping[str, Any]], code: str) -> Mapping[str, Any]:
    """Call `ask` and return the answer of the package's child process.

    Raises:
        PackageError: the child refuses the request (with the code `code`), or exceeds a limit (with
            `sandbox-limit`).
    """
    try:
        answer = ask()
    except SandboxError as exc:
        raise PackageError("sandbox-limit", str(exc)) from exc
    if "error" in answer:
        raise PackageError(code, str(answer["error"]))
    return answer


def _alternate(messages: Messages) -> bool:
    roles = [role for role, _ in messages]
    return all(
        role == ("assistant" if place % 2 else "user")
        for place, role in enumerate(roles[roles[:1] == ["system"] :])
    )


def _alternating(messages: Messages) -> Messages:
    """Join neighbours of one role. A system message after the first turn is a part of the user's."""
    turns: list[tuple[str, str]] = []
    for role, said in messages:
        role = "user" if role == "system" and turns and turns[-1][0] != "system" else role
        if role == "assistant" and (not turns or turns[-1][0] == "system"):
            turns.append(("user", ""))
        if turns and turns[-1][0] == role:
            turns[-1] = (role, f"{turns[-1][1]}\n\n{said}")
        else:
            turns.append((role, said))
    return turns


def _windows(messages: Messages) -> Iterator[Messages]:
    """Split a long conversation into windows that begin with a user's turn if possible."""
    system = [message for message in messages[:1] if message[0] == "system"]
    first = len(system)
    while first < len(messages):
        last = min(first + WINDOW_MESSAGES, len(messages))
        # A window should not end in the middle of an exchange, but must end somewhere.
        while last < min(first + 2 * WINDOW_MESSAGES, len(messages)) and messages[last][0] != "user":
            last += 1
        yield [*system, *messages[first:last]]
        first = last

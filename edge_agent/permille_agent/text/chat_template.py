"""Chat messages to text by the package's template, and which characters of it the assistant said.

The template is foreign code and is rendered in a child process with limits of time, memory and size
(`chat_child.py`); a template that breaks them is an error of the package, never a hang. Packages without a
template get `DEFAULT_TEMPLATE`.
"""

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from permille.errors import InputError, PackageError

MAX_TEMPLATE_CHARACTERS = 64 << 10
MAX_RENDERED_CHARACTERS = 8 << 20
RENDER_TIMEOUT_S = 5.0
# Python and jinja2 are loaded first, on a machine that may be busy.
START_TIMEOUT_S = 60.0

DEFAULT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ message['role'] | capitalize }}: {{ message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' else '' }}\n"
    "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)

Messages = Sequence[tuple[str, str]]


class ChatTemplate:
    """Renders messages with one template. The child starts at the first use; close it, or use `with`."""

    def __init__(
        self,
        template: str | None,
        variables: Mapping[str, str],
        *,
        render_timeout_s: float = RENDER_TIMEOUT_S,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        """Take a template and its variables (`bos_token`, `eos_token`).

        Raises:
            PackageError: the template is longer than 64 Ki characters.
        """
        if template is not None and len(template) > MAX_TEMPLATE_CHARACTERS:
            raise PackageError(
                "chat-template",
                f"expected a template of at most {MAX_TEMPLATE_CHARACTERS} characters, got {len(template)}",
            )
        self._template = DEFAULT_TEMPLATE if template is None else template
        self._variables = {"bos_token": "", "eos_token": "", **variables}
        self._render_timeout_s = render_timeout_s
        self._start_timeout_s = start_timeout_s
        self._child: subprocess.Popen[str] | None = None
        self._answers: queue.Queue[str] = queue.Queue()
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def render(self, messages: Messages, *, add_generation_prompt: bool = False) -> str:
        """The text of `messages`, with the start of an assistant's turn where asked for.

        Raises:
            PackageError: the template is not valid, refuses the messages, or breaks a limit.
        """
        request = {
            "template": self._template,
            "messages": [{"role": role, "content": content} for role, content in messages],
            "add_generation_prompt": add_generation_prompt,
            "variables": self._variables,
            "limit": MAX_RENDERED_CHARACTERS,
        }
        with self._lock:
            answer = json.loads(self._ask(json.dumps(request)))
        if "error" in answer:
            raise PackageError("chat-template", str(answer["error"]))
        return str(answer["text"])

    def render_with_targets(self, messages: Messages) -> tuple[str, tuple[tuple[int, int], ...]]:
        """The text of a whole conversation and the character spans of the assistant's turns in it.

        A turn starts where the prompt for it ends and goes on to where the conversation up to it ends, so
        that the end of turn is learnt, too. Templates that rewrite earlier turns do not keep those prefixes:
        there, the turn is looked for.

        Raises:
            InputError: an assistant's turn does not appear in the rendered text.
            PackageError: as `render`.
        """
        text = self.render(messages)
        spans: list[tuple[int, int]] = []
        position = 0
        for index, (role, content) in enumerate(messages):
            if role != "assistant" or not content.strip():
                continue
            start = self._turn_start(text, messages[:index], content.strip(), position)
            end = self._turn_end(text, messages[: index + 1], start, content.strip())
            spans.append((start, end))
            position = end
        return text, tuple(spans)

    def close(self) -> None:
        """End the child."""
        child, self._child = self._child, None
        if child is None:
            return
        child.kill()
        for stream in (child.stdin, child.stdout):
            if stream is not None:
                stream.close()
        child.wait()

    def _turn_start(self, text: str, before: Messages, content: str, position: int) -> int:
        if before:
            prompt = self.render(before, add_generation_prompt=True)
            found = text.find(content, len(prompt))
            if text.startswith(prompt) and len(prompt) >= position and found >= 0:
                return len(prompt)
        found = text.find(content, position)
        if found < 0:
            raise InputError("an assistant message does not appear in what the chat template renders")
        return found

    def _turn_end(self, text: str, through: Messages, start: int, content: str) -> int:
        rendered = self.render(through)
        if text.startswith(rendered) and len(rendered) > start:
            return len(rendered)
        return text.index(content, start) + len(content)

    def _ask(self, request: str) -> str:
        if self._child is None:
            self._start()
        child = self._child
        try:
            if child is None or child.stdin is None:
                raise BrokenPipeError
            child.stdin.write(request + "\n")
            child.stdin.flush()
        except OSError as exc:
            self.close()
            raise PackageError(
                "chat-template-limit", "expected the rendering child to run, it ended"
            ) from exc
        return self._answer(self._render_timeout_s)

    def _answer(self, timeout_s: float) -> str:
        try:
            answer = self._answers.get(timeout=timeout_s)
        except queue.Empty as exc:
            self.close()
            raise PackageError(
                "chat-template-limit", f"expected the template to render within {timeout_s:g} s, it did not"
            ) from exc
        if not answer:
            self.close()
            raise PackageError("chat-template-limit", "expected rendered text, the child that renders ended")
        return answer

    def _start(self) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-m", "permille_agent.text.chat_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
        )
        self._answers = queue.Queue()
        threading.Thread(target=_read_answers, args=(self._child, self._answers), daemon=True).start()
        self._answer(self._start_timeout_s)  # the child's first line says that it is ready


def _read_answers(child: subprocess.Popen[str], answers: queue.Queue[str]) -> None:
    if child.stdout is None:
        return
    try:
        for line in child.stdout:
            answers.put(line)
    except ValueError:
        return  # closed under our hands by `close`
    answers.put("")

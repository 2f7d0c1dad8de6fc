"""The `Modelfile` beside an exported file. It tells Ollama how to prompt the model.

Ollama never runs the Jinja template in a GGUF file. It recognises some templates by their spelling. With all
other templates, it gives the model bare text. So this module translates the template to Go. It renders
messages with known contents, and takes the text around these contents as the parts of the Go template. These
parts include a default system message.

The parts are then tried on other conversations. If the parts and the template render a conversation
differently, the `Modelfile` gets no `TEMPLATE`, but a comment that says so. Ollama then makes its own choice.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from permille.files import write_atomic
from permille.models.gguf.vocabulary import PromptRules
from permille.sandbox.process import Sandbox, SandboxError
from permille.tokenizer_files import ends_of_turn

Messages = Sequence[tuple[str, str]]
Render = Callable[[Messages, bool], str | None]

_MAX_CONTEXT = 4096
_MAX_CHARACTERS = 1 << 20
_UNKNOWN = "# The chat template is of an unknown form. If Ollama does not recognise it, add a TEMPLATE.\n"
# Conversations that the parts must render as the template does.
_TRIED: tuple[Messages, ...] = (
    (("user", "Why?"),),
    (("user", "One."), ("assistant", "Two, three."), ("user", "Four")),
    (("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"), ("user", "e")),
)
_WITH_SYSTEM = tuple((("system", "Be brief."), *messages) for messages in _TRIED)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatParts:
    """The texts that a chat template puts around messages.

    Attributes:
        first: before a user's message that opens the conversation. It includes a default system message.
        system: before the system message. If the template refuses a system message, this is None, and
            `render` leaves the message out.
        after_system: before the user's message that follows the system message.
        user, user_end: before and after each later message of the user.
        answer, answer_end: before and after each answer.
        prompt: after the last message, before the next answer.
    """

    first: str
    system: str | None
    after_system: str
    user: str
    user_end: str
    answer: str
    answer_end: str
    prompt: str

    def render(self, messages: Messages) -> str:
        """Return the text of a conversation, up to the start of the next answer."""
        pieces = []
        for place, (role, said) in enumerate(messages):
            match role:
                case "system":
                    pieces.append("" if self.system is None else f"{self.system}{said}")
                case "user":
                    after_system = place == 1 and messages[0][0] == "system"
                    before = self.first if not place else self.after_system if after_system else self.user
                    pieces.append(f"{before}{said}{self.user_end}")
                case _:
                    pieces.append(f"{self.answer}{said}{self.answer_end}")
        return "".join([*pieces, self.prompt])

    def go(self) -> str:
        """Return the parts as a Go template, in one line."""
        system = "" if self.system is None else f"{_text(self.system)}{{{{ .Content }}}}"
        return (
            "{{ range $i, $_ := .Messages }}"
            f'{{{{ if eq .Role "system" }}}}{system}'
            '{{ else if eq .Role "user" }}'
            f"{{{{ if eq $i 0 }}}}{_text(self.first)}"
            f"{{{{ else if and (eq $i 1) $.System }}}}{_text(self.after_system)}"
            f"{{{{ else }}}}{_text(self.user)}{{{{ end }}}}"
            f"{{{{ .Content }}}}{_text(self.user_end)}"
            '{{ else if eq .Role "assistant" }}'
            f"{_text(self.answer)}{{{{ .Content }}}}{_text(self.answer_end)}"
            "{{ end }}{{ end }}"
            f"{_text(self.prompt)}"
        )


def modelfile(file: str, rules: PromptRules | None, positions: int) -> str:
    """Return the `Modelfile` of an exported file.

    Args:
        file: the name of the file.
        rules: the rules of a prompt, or None if the package has no tokenizer.
        positions: the length of the model's longest sequence. The `Modelfile` requests at most 4,096
            positions, because Ollama reserves memory for all that are requested.

    Example:
        FROM ./model.gguf
        TEMPLATE \"\"\"{{ range $i, $_ := .Messages }}...\"\"\"
        PARAMETER stop "<|im_end|>"
        PARAMETER num_ctx 4096
    """
    lines = [f"FROM ./{file}\n"]
    if rules is not None and rules.chat_template is not None:
        parts = chat_parts(rules.chat_template, _variables(rules))
        if parts is None:
            lines.append(_UNKNOWN)
        else:
            parts = _without_beginning(parts, rules)
            lines.append(f'TEMPLATE """{parts.go()}"""\n')
        lines += [f'PARAMETER stop "{stop}"\n' for stop in _stops(rules)]
    lines.append(f"PARAMETER num_ctx {min(positions, _MAX_CONTEXT)}\n")
    return "".join(lines)


def add_system(path: Path, text: str) -> None:
    """Add a system message to a `Modelfile`, which only the user can read from then on.

    Ollama ends a text at three quotation marks, so one mark replaces them.
    """
    quoted = text.replace('"""', '"').rstrip('"')
    write_atomic(path, f'{path.read_text()}SYSTEM """{quoted}"""\n'.encode(), mode=0o600)


def chat_parts(template: str, variables: Mapping[str, str]) -> ChatParts | None:
    """Split a chat template into its parts.

    Return None if the template does more than put text around messages.
    """
    # A template is a program of the model's author, so it runs only in the sandbox.
    sandbox = Sandbox()

    def render(messages: Messages, prompt: bool) -> str | None:
        request = {
            "do": "render",
            "template": template,
            "variables": dict(variables),
            "messages": [{"role": role, "content": said} for role, said in messages],
            "prompt": prompt,
            "prefixes": [],
            "limit": _MAX_CHARACTERS,
        }
        try:
            answer = sandbox.ask(request, characters=len(template))
        except SandboxError:
            return None
        return answer.get("text")

    try:
        parts = _taken_apart(render)
        if parts is None:
            return None
        tried = _TRIED if parts.system is None else (*_TRIED, *_WITH_SYSTEM)
        same = all(parts.render(messages) == render(messages, True) for messages in tried)
        return parts if same else None
    finally:
        sandbox.close()


def _taken_apart(render: Render) -> ChatParts | None:
    # These texts mark the places of the messages. `_around` refuses a template that contains one of them.
    said = ("SAID-1", "SAID-2", "SAID-3")
    talk = tuple(zip(("user", "assistant", "user"), said, strict=True))
    whole = _around(render(talk, True), said)
    answered = _around(render(talk[:2], False), said[:2])
    if whole is None or answered is None or not whole[2].startswith(answered[2]):
        return None
    first, between, following, last = whole
    # The end of a user's message is taken to be the longest common start of `between` and `last`.
    shared = next((n for n in range(len(last), 0, -1) if between.startswith(last[:n])), 0)
    before = _around(render((("system", "SAID-0"), *talk[:1]), True), ("SAID-0", said[0]))
    return ChatParts(
        first=first,
        system=before[0] if before else None,
        after_system=before[1] if before else first,
        # `following` is the text after an answer: its end, and then the start of the user's next message.
        user=following[len(answered[2]) :],
        user_end=last[:shared],
        answer=between[shared:],
        answer_end=answered[2],
        prompt=last[shared:],
    )


def _around(text: str | None, said: Sequence[str]) -> list[str] | None:
    """Return the texts before, between and after the messages `said`.

    Return None unless each message occurs in the text exactly once, in order.
    """
    pieces = []
    for one in said:
        if text is None or text.count(one) != 1:
            return None
        before, _, text = text.partition(one)
        pieces.append(before)
    return [*pieces, text or ""]


def _without_beginning(parts: ChatParts, rules: PromptRules) -> ChatParts:
    """Drop the beginning-of-text token if llama.cpp already adds it to every text."""
    begin = _variables(rules)["bos_token"]
    if not rules.add_bos or not begin:
        return parts
    system = parts.system and parts.system.removeprefix(begin)
    after_system = parts.after_system if parts.system is not None else parts.after_system.removeprefix(begin)
    return replace(parts, first=parts.first.removeprefix(begin), system=system, after_system=after_system)


def _variables(rules: PromptRules) -> dict[str, str]:
    return {f"{name}_token": rules.special.get(name, "") for name in ("bos", "eos")}


def _stops(rules: PromptRules) -> list[str]:
    named = [rules.special[name] for name in ("eos", "eot") if name in rules.special]
    found = dict.fromkeys([*named, *ends_of_turn(rules.chat_template)])
    # Ollama knows no escapes, so leave out a token that would end the quotation or the line.
    return [stop for stop in found if stop.isprintable() and '"' not in stop]


def _text(text: str) -> str:
    """Return a Go action that writes a text literally. A JSON string is also a Go string."""
    return f"{{{{ {json.dumps(text, ensure_ascii=False)} }}}}" if text else ""

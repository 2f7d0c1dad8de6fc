"""The child process in which a package's tokenizer and chat template work: one JSON line in, one out.

Both come with the package, so they are code and data of somebody else. A tokenizer's rules can double a text
thirty times, its patterns can look for ever; a template can loop. jinja2's immutable sandbox bounds what a
template may touch, nothing bounds how long either works or how much it allocates. So this process has limits
(`confinement.py`), and the parent bounds the time and the answers (`process.py`).

A user's documents (`documents.py`), which others may have made, are read in a child of their own.
"""

import json
import sys
from array import array
from base64 import b64encode
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from permille.sandbox.confinement import allow_cpu, confine

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from tokenizers import Tokenizer
    from tokenizers.decoders import DecodeStream

# A vocabulary of 256,000 tokens takes 240 MB.
MEMORY_BYTES = 1 << 30
MAX_STREAMS = 64
# Of one request, where no parent is left to end it.
ORPHAN_CPU_S = 600

Answer = Mapping[str, object]


class _RefusedError(Exception):
    """A request that cannot be done. Its message is the answer."""


class _Child:
    """The tokenizer, once it was loaded, and the environment of templates, once one was rendered."""

    def __init__(self) -> None:
        self._loaded: Tokenizer | None = None
        self._special: list[str] = []
        self._streams: dict[int, DecodeStream] = {}
        self._templates: ImmutableSandboxedEnvironment | None = None
        self._compiled: tuple[str, Template] | None = None

    def answer(self, request: dict[str, Any]) -> Answer:
        """Do what one request asks for."""
        requests: dict[str, Callable[..., Answer]] = {
            "load": self.load,
            "encode": self.encode,
            "decode": self.decode,
            "step": self.step,
            "has_special": self.has_special,
            "render": self.render,
            "extract": self.extract,
        }
        try:
            return requests[request.pop("do")](**request)
        except MemoryError:
            return {"error": f"This needs more than {MEMORY_BYTES} bytes of memory."}
        except _RefusedError as exc:
            return {"error": str(exc)[:500]}

    def load(self, size: int, tokens: list[str]) -> Answer:
        """Take a `tokenizer.json` of `size` bytes, which follow; the ids of some tokens."""
        from tokenizers import Tokenizer

        data = sys.stdin.buffer.read(size)
        try:
            self._loaded = Tokenizer.from_buffer(data)
        except Exception as exc:  # the library raises bare Exception for every malformed file
            raise _RefusedError(f"The tokenizers library cannot read tokenizer.json: {exc}") from exc
        self._loaded.no_truncation()
        self._loaded.no_padding()
        added = self._loaded.get_added_tokens_decoder().values()
        self._special = [token.content for token in added if token.special and token.content]
        return {"ids": [self._loaded.token_to_id(token) for token in tokens]}

    def encode(self, text: str, literal: bool, ends: bool, limit: int) -> Answer:
        """Ids of a text and where each stands in it: where `literal`, special tokens in it are text; with the
        tokenizer's own beginning and end where `ends`."""
        self._tokenizer.encode_special_tokens = literal
        found = self._tokenizer.encode(text, add_special_tokens=ends)
        if len(found) > limit:
            raise _RefusedError(f"{len(text)} characters make {len(found)} tokens, more than {limit}.")
        places = found.offsets
        return {
            "ids": _packed(found.ids),
            "starts": _packed([start for start, _ in places]),
            "ends": _packed([end for _, end in places]),
        }

    def decode(self, ids: list[int], limit: int) -> Answer:
        """The text of ids, without special tokens."""
        return {"text": _bounded(self._tokenizer.decode(ids, skip_special_tokens=True), limit)}

    def step(self, stream: int, ids: list[int], limit: int) -> Answer:
        """Return the text that the next ids add to a stream. No ids end the stream."""
        from tokenizers.decoders import DecodeStream

        if not ids:
            self._streams.pop(stream, None)
            return {"text": ""}
        if stream not in self._streams and len(self._streams) >= MAX_STREAMS:
            raise _RefusedError(f"There are {MAX_STREAMS} streams already.")
        decoder = self._streams.setdefault(stream, DecodeStream(skip_special_tokens=True))
        pieces = (decoder.step(self._tokenizer, number) or "" for number in ids)
        return {"text": _bounded("".join(pieces), limit)}

    def has_special(self, texts: list[str]) -> Answer:
        """Return whether one of the texts contains a special token."""
        return {"found": any(token in text for text in texts for token in self._special)}

    def render(
        self,
        template: str,
        variables: dict[str, str],
        messages: list[dict[str, Any]],
        prompt: bool,
        prefixes: list[tuple[int, bool]],
        limit: int,
        today: str = "2024-07-26",
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
    ) -> Answer:
        """The text of messages, with the start of an answer or without; and for the text of so many of them,
        with it or without, how long it is where the whole text begins with it. `today`: an ISO date, which
        templates may print."""
        from jinja2 import TemplateError
        from jinja2.exceptions import SecurityError

        if self._templates is None:
            self._templates = _environment()
        try:
            if self._compiled is None or self._compiled[0] != template:
                self._compiled = (template, self._templates.from_string(template))
            generate, day = self._compiled[1].generate, datetime.fromisoformat(today)

            def text_of(part: list[dict[str, Any]], with_prompt: bool) -> str:
                pieces, room = [], limit
                given = {**variables, "messages": part, "add_generation_prompt": with_prompt}
                # As transformers gives them: templates ask whether they are none, too.
                given |= {"tools": tools, "documents": documents, "strftime_now": day.strftime}
                for piece in generate(**given):
                    pieces.append(piece)
                    room -= len(piece)
                    if room < 0:
                        raise _RefusedError(f"The template makes more than {limit} characters.")
                return "".join(pieces)

            whole = text_of(messages, prompt)
            parts = (text_of(messages[:count], with_prompt) for count, with_prompt in prefixes)
            lengths = [len(part) if whole.startswith(part) else None for part in parts]
        except (TemplateError, SecurityError) as exc:
            raise _RefusedError(f"{type(exc).__name__}: {exc}") from exc
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as exc:
            raise _RefusedError(f"{type(exc).__name__} in the template") from exc
        return {"text": whole, "prefixes": lengths}

    def extract(self, suffix: str, size: int, limit: int) -> Answer:
        """The texts of a document of `size` bytes, which follow; of mail one a message."""
        from permille.sandbox.documents import texts_of

        data = sys.stdin.buffer.read(size)
        try:
            texts = texts_of(suffix, data)
        except MemoryError:
            raise
        except ModuleNotFoundError as exc:
            raise _RefusedError(
                f"reading {suffix} needs {exc.name}: pip install 'permille[documents]'"
            ) from exc
        except Exception as exc:  # libraries raise anything for what is damaged
            raise _RefusedError(f"cannot be read as {suffix} ({type(exc).__name__})") from exc
        if sum(map(len, texts)) > limit:
            raise _RefusedError(f"more than {limit} characters")
        return {"texts": texts}

    @property
    def _tokenizer(self) -> "Tokenizer":
        if self._loaded is None:
            raise _RefusedError("No tokenizer is loaded.")
        return self._loaded


def _environment() -> "ImmutableSandboxedEnvironment":
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(Extension):
        """`{% generation %}...{% endgeneration %}` renders its body: so templates mark answers."""

        tags = {"generation"}  # noqa: RUF012 - the name and type are jinja2's

        def parse(self, parser: Parser) -> list[nodes.Node]:
            """The body alone."""
            next(parser.stream)
            return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = refuse
    return environment


def main() -> int:
    """Answer requests from standard input until it ends."""
    confine(memory_bytes=MEMORY_BYTES)
    child = _Child()
    while line := sys.stdin.buffer.readline():
        allow_cpu(ORPHAN_CPU_S)
        sys.stdout.buffer.write(json.dumps(child.answer(json.loads(line))).encode() + b"\n")
        sys.stdout.buffer.flush()
    return 0


def _packed(numbers: list[int]) -> str:
    return b64encode(array("I", numbers).tobytes()).decode()


def _bounded(text: str, limit: int) -> str:
    if len(text) > limit:
        raise _RefusedError(f"The text has {len(text)} characters, more than {limit}.")
    return text


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter of transformers, with its arguments in its order. jinja2's own escapes HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


if __name__ == "__main__":
    raise SystemExit(main())

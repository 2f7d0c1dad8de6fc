"""The child process that runs the tokenizer and the chat template of a package.

It reads one request per line, as JSON, and answers each request with one line of JSON. The bytes of a
file follow the request that states their size.

The tokenizer and the template come with the package, so they are code and data of a stranger. The
rules of a tokenizer can double a text thirty times, its patterns can search for ever, and a template
can loop. The immutable sandbox of jinja2 limits what a template may access. It does not limit time
and memory. So this process limits itself (`confinement.py`), and its parent limits the time and the size
of answers (`process.py`).

A user's documents may also come from strangers. Another process of this program reads them
(`documents.py`).
"""

import json
import re
import sys
from array import array
from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import astuple
from datetime import datetime
from itertools import accumulate, islice, takewhile
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from permille.extras import install_line
from permille.sandbox.confinement import allow_cpu, confine

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from tokenizers import Tokenizer
    from tokenizers.decoders import DecodeStream

# The limit of memory. A vocabulary of 256,000 tokens takes 240 MB of it.
MEMORY_BYTES = 1 << 30
MAX_STREAMS = 64
MOST_PROBES = 100
# The limit of processor time for one request. It ends this process even if the parent has died.
ORPHAN_CPU_S = 600

Answer = Mapping[str, object]


FAULTS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Errors that a template can raise, besides those of jinja2."""


class _RefusedError(Exception):
    """A request that is refused. The message is the answer."""


class _MessagesRefusedError(Exception):
    """A template has called `raise_exception`, for example because it knows no system's turn."""


class Child:
    """The state of the child: the loaded tokenizer, its open streams, and the compiled template."""

    def __init__(self) -> None:
        self._loaded: Tokenizer | None = None
        self._special: list[str] = []
        self._user_defined: dict[int, str] = {}
        self._prefixed = False
        self._streams: dict[int, DecodeStream] = {}
        self._templates: ImmutableSandboxedEnvironment | None = None
        self._compiled: tuple[str, Template] | None = None

    def answer(self, request: dict[str, Any]) -> Answer:
        """Answer one request."""
        requests: dict[str, Callable[..., Answer]] = {
            "load": self.load,
            "encode": self.encode,
            "decode": self.decode,
            "step": self.step,
            "mark": self.mark,
            "render": self.render,
            "extract": self.extract,
        }
        try:
            return requests[request.pop("do")](**request)
        except MemoryError:
            return {"error": f"This needs more than {MEMORY_BYTES} bytes of memory."}
        except _RefusedError as exc:
            return {"error": str(exc)[:500]}

    def load(self, size: int, tokens: list[str], stops: list[int]) -> Answer:
        """Load a `tokenizer.json` of `size` bytes, which follow the request.

        The file may call `tokens` and the ids `stops` user-defined, as ordinary words. They end or begin a
        text, so they are made special.

        Return the ids of `tokens`, and the tokens that the tokenizer puts before a text.
        """
        from tokenizers import Tokenizer

        data = sys.stdin.buffer.read(size)
        try:
            self._loaded = Tokenizer.from_buffer(data)
        except Exception as exc:  # the library raises bare Exception for every malformed file
            raise _RefusedError(f"The tokenizers library cannot read tokenizer.json: {exc}") from exc
        # The file may ask for truncation or padding. We need all tokens, and no others.
        self._loaded.no_truncation()
        self._loaded.no_padding()
        # Such a tokenizer puts a space before a text, but not after its special tokens.
        self._prefixed = getattr(self._loaded.pre_tokenizer, "prepend_scheme", None) == "first"
        ids = [self._loaded.token_to_id(token) for token in tokens]
        added = self._loaded.get_added_tokens_decoder()
        ends = {number for number in (*ids, *stops) if number is not None}
        for number in ends & added.keys():
            added[number].special = True
            self._loaded.add_special_tokens([added[number]])
        self._special = [token.content for token in added.values() if token.special and token.content]
        self._user_defined = {n: token.content for n, token in added.items() if not token.special}
        return {"ids": ids, "begins": self._begins()}

    def _begins(self) -> list[int]:
        """Return the tokens before a text. Only a text of some token tells them from those after it."""
        for text in ("a", " ", *islice(self._tokenizer.get_vocab(), MOST_PROBES)):
            try:
                bare = self._tokenizer.encode(text, add_special_tokens=False)
                probe = self._tokenizer.encode(text, add_special_tokens=True)
            except Exception:  # noqa: BLE001, S112 - the library raises bare Exception for an unknown word
                continue
            if bare.ids:
                marked = zip(probe.ids, probe.special_tokens_mask, strict=True)
                return [number for number, _ in takewhile(itemgetter(1), marked)]
        return []

    def encode(self, text: str, literal: bool, ends: bool, limit: int, mark: str = "") -> Answer:
        """Return the ids of a text, and the start and end of each token in it.

        Args:
            text: the text.
            literal: treat special tokens in the text as plain text.
            ends: add the tokenizer's own tokens at the start and the end of the text.
            limit: the largest number of tokens.
            mark: the mark that `mark` has put into the text. Positions do not count it.
        """
        found = self._marked_tokens(text, mark) if mark else self._tokens(text, literal, ends)
        if len(found) > limit:
            raise _RefusedError(f"{len(text)} characters make {len(found)} tokens, more than {limit}.")
        return {name: _packed([t[i] for t in found]) for i, name in enumerate(("ids", "starts", "ends"))}

    def _tokens(
        self, text: str, literal: bool, ends: bool = False, *, inside: bool = False
    ) -> list[tuple[int, int, int]]:
        """Return (id, start, end) for each token. `inside`: other text comes before this one."""
        if self._prefixed:
            rule: Any = self._tokenizer.pre_tokenizer
            rule.prepend_scheme = "never" if inside else "first"
        self._tokenizer.encode_special_tokens = literal
        found = self._tokenizer.encode(text, add_special_tokens=ends)
        return [(number, *place) for number, place in zip(found.ids, found.offsets, strict=True)]

    def _marked_tokens(self, text: str, mark: str) -> list[tuple[int, int, int]]:
        """Return the tokens of a chat. Tokens with a mark in them are text.

        As in llama.cpp, the text is cut at its special tokens, and each piece is tokenized alone.
        """
        # For each place in the marked text, the marks before it.
        marks = list(accumulate((character == mark for character in text), initial=0))
        added = self._tokenizer.get_added_tokens_decoder()
        cuts = [token for token in self._tokens(text, literal=False) if token[0] in added]
        tokens, first = [], 0
        for number, start, end in [*cuts, (None, len(text), len(text))]:
            before = first - marks[first]
            pieces = [text[first:start].replace(mark, "")]
            places = [i - marks[i] - before for i in range(first, start) if text[i] == mark]
            found = self._tokens(pieces[0], literal=True, inside=first > 0)
            # User-defined tokens are recognised in any text, except in one that is cut there.
            if any(n in added and any(s < place < e for place in places) for n, s, e in found):
                pieces = text[first:start].split(mark)
            for piece in filter(None, pieces):
                found = self._tokens(piece, literal=True, inside=before > 0)
                tokens += [(n, before + s, before + e) for n, s, e in found]
                before += len(piece)
            if number is not None:
                tokens.append((number, start - marks[start], end - marks[end]))
            first = end
        return tokens

    def decode(self, ids: list[int], limit: int) -> Answer:
        """Return the text of ids, without special tokens."""
        return {"text": _bounded(self._tokenizer.decode(ids, skip_special_tokens=True), limit)}

    def step(self, stream: int, ids: list[int], limit: int) -> Answer:
        """Return the text that the next ids add to a stream. An empty list of ids ends the stream."""
        from tokenizers.decoders import DecodeStream

        if not ids:
            self._streams.pop(stream, None)
            return {"text": ""}
        if stream not in self._streams and len(self._streams) >= MAX_STREAMS:
            raise _RefusedError(f"There are {MAX_STREAMS} streams already.")
        decoder = self._streams.setdefault(stream, DecodeStream(skip_special_tokens=True))
        pieces = (decoder.step(self._tokenizer, number) or "" for number in ids)
        return {"text": _bounded("".join(pieces), limit)}

    def mark(self, texts: list[str], mark: str, written: str) -> Answer:
        """Put a mark after the first character of each special token in messages, so that it is text.

        Args:
            texts: the contents of the messages.
            mark: a character that is in none of the texts.
            written: a template. User-defined tokens that it contains also get a mark.

        Return the texts, and one of the tokens that were found, or None.
        """
        known = [*self._special, *(token for token in self._user_defined.values() if token in written)]
        found = sorted({token for token in known if any(token in text for text in texts)})
        if short := [token for token in found if len(token) == 1]:
            raise _RefusedError(f"a message contains {short[0]!r}, a special token of one character")
        if found:
            # Tokens may overlap, so look ahead and take one character.
            place = re.compile(f"(?={'|'.join(map(re.escape, found))})(.)", re.DOTALL)
            texts = [place.sub(rf"\1{mark}", text) for text in texts]
        return {"texts": texts, "found": found[0] if found else None}

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
        """Render messages, and measure prefixes of the text.

        Args:
            prompt: add the start of an answer.
            prefixes: pairs of a number of messages and a value of `prompt`. For each pair, the first
                messages, as many as the number says, are rendered alone. The answer has the length of that
                text, or None if the whole text does not begin with it.
            limit: the largest number of characters of a text.
            today: an ISO date, with or without a time, which templates may print.
        """
        from jinja2 import TemplateError, TemplateSyntaxError

        if self._templates is None:
            self._templates = _environment()
        try:
            # A conversation renders the same template many times, and compiling is slow.
            if self._compiled is None or self._compiled[0] != template:
                self._compiled = (template, self._templates.from_string(template))
            generate, day = self._compiled[1].generate, datetime.fromisoformat(today)

            def text_of(part: list[dict[str, Any]], with_prompt: bool) -> str:
                pieces, room = [], limit
                given = {**variables, "messages": part, "add_generation_prompt": with_prompt}
                # transformers always passes these variables, and templates test whether they are None.
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
        except TemplateSyntaxError as exc:
            raise _RefusedError(f"The chat template is wrong in line {exc.lineno}: {exc.message}") from exc
        except _MessagesRefusedError as exc:
            raise _RefusedError(f"The chat template refuses these messages: {exc}") from exc
        except (*FAULTS, TemplateError) as exc:
            raise _RefusedError(f"The chat template fails: {exc}") from exc
        return {"text": whole, "prefixes": lengths}

    def extract(self, kind: str, size: int, limit: int) -> Answer:
        """Return the texts of a document of `size` bytes, which follow the request.

        Each text comes with its charset and, if it was skipped, the reason. Mail gives one text per message.
        """
        from permille.sandbox.decoding import UnreadableError
        from permille.sandbox.documents import texts_of

        data = sys.stdin.buffer.read(size)
        try:
            texts = texts_of(kind, data)
        except MemoryError:
            raise
        except UnreadableError as exc:
            raise _RefusedError(str(exc)) from exc
        except ModuleNotFoundError as exc:
            raise _RefusedError(f"reading {kind} needs {exc.name}: run {install_line('documents')}") from exc
        except Exception as exc:  # a library may raise anything for a damaged document
            raise _RefusedError(f"damaged, or no {kind} file") from exc
        if sum(len(one.text) for one in texts) > limit:
            raise _RefusedError(f"more than {limit} characters")
        return {"texts": [astuple(one) for one in texts]}

    @property
    def _tokenizer(self) -> "Tokenizer":
        if self._loaded is None:
            raise _RefusedError("No tokenizer is loaded.")
        return self._loaded


def _environment() -> "ImmutableSandboxedEnvironment":
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(Extension):
        """The tag `{% generation %}...{% endgeneration %}`, which marks answers. It renders its body."""

        tags = {"generation"}  # noqa: RUF012 - the name and type are jinja2's

        def parse(self, parser: Parser) -> list[nodes.Node]:
            """Return the body."""
            next(parser.stream)
            return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))

    def refuse(message: str) -> None:
        raise _MessagesRefusedError(message)

    # Use the options of transformers, because published templates rely on them.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = refuse
    return environment


def main() -> int:
    """Answer requests from standard input until it ends."""
    confine(memory_bytes=MEMORY_BYTES)
    child = Child()
    while line := sys.stdin.buffer.readline():
        # The child answers many requests, so set a new limit for each request.
        allow_cpu(ORPHAN_CPU_S)
        sys.stdout.buffer.write(json.dumps(child.answer(json.loads(line))).encode() + b"\n")
        sys.stdout.buffer.flush()
    return 0


def _packed(numbers: list[int]) -> str:
    # JSON lists of numbers would take several times the space and time.
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
    """Return a value as JSON, with the arguments of transformers' filter `tojson`, in the same order.

    It replaces jinja2's own filter `tojson`, which would also escape HTML characters.
    """
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


if __name__ == "__main__":
    raise SystemExit(main())

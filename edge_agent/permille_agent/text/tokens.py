"""Conversion between text and tokens by the package's `tokenizer.json`, without transformers.

The tokenizer is foreign data. It runs in a child process with limits (`permille.sandbox`), together with the
chat template. Special tokens in the user's text are treated as plain text, also in the messages of a chat.
Only a chat template can write special tokens.
"""

from base64 import b64decode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date, datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from permille.beginnings import beginning, begun
from permille.errors import InputError, PackageError
from permille.package.reader import Package
from permille.sandbox.process import MAX_TOKENS_A_CHARACTER, Sandbox
from permille.token_bytes import token_bytes
from permille.tokenizer_files import ReadFile, TokenizerFiles, ends_of_turn
from permille_agent.text.chat_template import ChatTemplate, Messages, answered
from permille_agent.text.documents import Completion, Content, Conversation, Learn, PlainText, encodable

MAX_DECODED_CHARACTERS = 8 << 20
PRIVATE = (0xE000, 0x10FFFE)
"""The code points from the first private one, among which a mark is found that is in no text."""

Spans = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class TokenizedDocument:
    """The tokens of a document.

    Attributes:
        ids_T: token ids, int64, without `bos`.
        target_T: whether the token counts in the loss, bool. The first token counts only after `bos`, because
            nothing else predicts it.
        bytes_T: number of bytes of the text that the token encodes, for the loss in bits per byte, int64.
        bos: the tokens that the model reads before every text, often none (`permille.beginnings`).
    """

    ids_T: NDArray[np.int64]
    target_T: NDArray[np.bool_]
    bytes_T: NDArray[np.int64]
    bos: tuple[int, ...] = ()

    @property
    def targets(self) -> int:
        """Number of target tokens."""
        return int(self.target_T.sum())

    def between(self, first: int, last: int | None) -> "TokenizedDocument":
        """Return the tokens `first:last`. A first token from inside the document is not a target."""
        target_T = self.target_T[first:last].copy()
        target_T[: 1 if first else 0] = False
        return replace(
            self, ids_T=self.ids_T[first:last], target_T=target_T, bytes_T=self.bytes_T[first:last]
        )


class TextTokenizer:
    """The tokenizer of a package, with its special tokens and chat template.

    For example, `package_tokenizer(package)` opens one, and `decode` reverses `prompt`:

        ids_T = tokenizer.prompt("Once upon a time")
        text = tokenizer.decode(ids_T.tolist())

    Attributes:
        template: chat template of the package, or the default one.
        begins: the tokens that the model reads before every text, often none.
        stop_ids: EOS, every `eos_token_id` in the package's files, and the template's ends of a turn.
    """

    def __init__(self, read_file: ReadFile, *, learn: Learn = Learn.ASSISTANT) -> None:
        """Read `tokenizer.json` and the configuration files beside it.

        Args:
            read_file: returns the content of a file of the package, or None if there is no such file.
            learn: roles whose turns of a conversation count in the loss.

        Raises:
            PackageError: there is no tokenizer, or it cannot be read.
        """

        def load() -> bytes:
            if (data := read_file("tokenizer.json")) is None:
                raise PackageError("tokenizer", "The package has no tokenizer.json.")
            return data

        self._files = files = TokenizerFiles.read(read_file)
        self.bos, self.eos = files.special.get("bos"), files.special.get("eos")
        self._learn = learn
        ends = ends_of_turn(files.template)
        tokens = (self.bos or "", self.eos or "", *ends)
        self._sandbox = Sandbox(load, tokens=tokens, stops=files.stop_ids)
        self.template = ChatTemplate(files.template, files.variables, self._sandbox)
        known = answered(self._sandbox.start, "tokenizer")
        self._bos_id: int | None = known["ids"][0] if self.bos else None
        try:
            self.begins = beginning(files, known)
        except InputError as exc:
            raise PackageError("tokenizer", str(exc)) from exc
        self._eos_id: int | None = known["ids"][1] if self.eos else None
        # The answer has the ids of BOS, EOS and the ends of turns, in this order.
        found = known["ids"][1:] if self.eos else known["ids"][2:]
        self.stop_ids = tuple(sorted({*files.stop_ids, *(number for number in found if number is not None)}))

    def close(self) -> None:
        """End the child process now. Otherwise it ends with this object."""
        self._sandbox.close()

    @property
    def can_chat(self) -> bool:
        """True if the package has a chat template of its own."""
        return self._files.template is not None

    def require_chat(self) -> None:
        """Check that the model can chat.

        Raises:
            InputError: the package has no chat template.
        """
        if not self.can_chat:
            raise InputError(
                "This model has no chat template, so it cannot chat. It can continue a text: with "
                "`permille-agent generate` without --chat, or with /v1/completions of `serve`. "
                "To chat, install a package that was made from an instruct model."
            )

    def prompt(self, text: str) -> NDArray[np.int64]:
        """Return the ids of a prompt to continue. Special tokens in it are treated as text.

        Raises:
            InputError: the prompt gives no token.
        """
        ids_T = self._encode(text, rendered=False).ids_T
        if not len(ids_T) and self._bos_id is not None:
            ids_T = np.array([self._bos_id], dtype=np.int64)
        if not len(ids_T):
            raise InputError("The prompt is empty. Write at least one word.")
        return ids_T

    def separator(self) -> tuple[int, ...]:
        """Return the ids of an empty line, without BOS."""
        return tuple(self._encode("\n\n", rendered=False).ids_T[len(self.begins) :].tolist())

    def chat_prompt(
        self, messages: Sequence[tuple[str, str]], *, today: date | None = None
    ) -> NDArray[np.int64]:
        """Return the ids of a conversation up to the start of the assistant's next turn.

        Args:
            messages: roles and contents.
            today: date, or date and time, for templates that print one. None is the present.

        Raises:
            InputError: the package has no chat template, or as for `tokenize`.
            PackageError: the template fails.
        """
        self.require_chat()
        now = today or datetime.now().astimezone()

        def render(turns: Messages) -> tuple[str, Spans]:
            return self.template.render(turns, add_generation_prompt=True, today=now), ()

        return self._chat(messages, render)[0].ids_T

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, without special tokens."""
        request = {"do": "decode", "ids": list(ids), "limit": MAX_DECODED_CHARACTERS}
        return str(self._ask(request, len(ids))["text"])

    def stream(self, ids: Iterable[int]) -> Iterator[str]:
        """Decode ids one by one, and yield pieces of whole characters."""
        request = {"do": "step", "stream": self._sandbox.new_stream(), "limit": MAX_DECODED_CHARACTERS}
        try:
            for token in ids:
                if piece := self._ask({**request, "ids": [token]}, 1)["text"]:
                    yield str(piece)
        finally:
            with suppress(PackageError):
                # An empty list ends the stream in the child, also when the caller stops reading early.
                self._ask({**request, "ids": []}, 0)

    def tokenize(self, content: Content, *, row_tokens: int) -> TokenizedDocument:
        """Convert a document to tokens, and mark the tokens that count in the loss.

        Args:
            content: content of the document.
            row_tokens: length of a row. If prompt and completion are longer, the beginning of the prompt is
                dropped.

        Raises:
            InputError: a turn is missing in the rendered text, or the template changes a turn that contains a
                special token.
            PackageError: the template fails.
        """
        match content:
            case PlainText(text):
                return self._document(self._encode(text, rendered=False), text, ((0, len(text)),))
            case Completion(prompt, completion):
                return self._completion(prompt, completion, row_tokens)
            case Conversation(messages):
                return self._conversation(messages)

    def _completion(self, prompt: str, completion: str, row_tokens: int) -> TokenizedDocument:
        text = prompt + completion
        whole = self._document(self._encode(text, rendered=False), text, ((len(prompt), len(text)),))
        if self._eos_id is not None and whole.ids_T[-1:].tolist() == [self._eos_id]:
            whole.target_T[-1] = True  # the tokenizer ends a text itself
        elif self._eos_id is not None:
            whole = replace(
                whole,
                ids_T=np.append(whole.ids_T, np.int64(self._eos_id)),
                target_T=np.append(whole.target_T, True),
                bytes_T=np.append(whole.bytes_T, np.int64(0)),  # EOS encodes no bytes of the text
            )
        room = row_tokens - len(whole.bos)
        if len(whole.ids_T) <= room:
            return whole
        # The completion depends most on the end of the prompt. So keep the last tokens of the prompt, at
        # least a quarter of a row.
        first = int(np.argmax(whole.target_T))
        kept = max(room // 4, room - (len(whole.ids_T) - first))
        return whole.between(max(0, first - kept), None)

    def _conversation(self, messages: Sequence[tuple[str, str]]) -> TokenizedDocument:
        def render(turns: Messages) -> tuple[str, Spans]:
            return self.template.render_with_targets(turns, self._learn.roles)

        return self._document(*self._chat(messages, render))

    def _chat(
        self, messages: Messages, render: Callable[[Messages], tuple[str, "Spans"]]
    ) -> tuple["_Encoding", str, "Spans"]:
        """Render messages and tokenize the text. Special tokens in their contents are text.

        The contents are found in the rendered text by marks inside of their special tokens. A template may
        cut a content or add to it, but must write the same text with the marks as without.
        """
        text, spans = render(messages)
        contents = [said for _, said in messages]
        mark = next(
            one for one in map(chr, range(*PRIVATE)) if not any(one in part for part in (text, *contents))
        )
        token = None
        # Templates take some user-defined tokens out of the messages, such as those around a thought. If the
        # marks are in their way, only special tokens are text.
        for written in (self.template.source, ""):
            request = {"do": "mark", "texts": contents, "mark": mark, "written": written}
            found = self._ask(request, sum(map(len, contents)), "chat-template")
            if (token := found["found"]) is None:
                return self._encode(text, rendered=True), text, spans
            turns = [(role, str(said)) for (role, _), said in zip(messages, found["texts"], strict=True)]
            marked, _ = render(turns)
            if marked.replace(mark, "") == text:
                return self._encode(marked, rendered=True, mark=mark), text, spans
        raise InputError(
            f"a message contains the special token {token}, and the chat template changes this message"
        )

    def _document(self, encoding: "_Encoding", text: str, spans: "Spans") -> TokenizedDocument:
        begins = len(self.begins)
        ids_T, starts_T, ends_T = encoding.ids_T, encoding.starts_T, encoding.ends_T
        target_T = np.zeros(len(ids_T), dtype=np.bool_)
        for start, end in spans:
            # A token counts if it overlaps a span. Tokens without characters, such as special ones, never do.
            target_T |= (ends_T > start) & (starts_T < end) & (ends_T > starts_T)
        target_T[:1] = False
        bytes_T = token_bytes(text, ends_T)
        return TokenizedDocument(ids_T[begins:], target_T[begins:], bytes_T[begins:], self.begins)

    def _encode(self, text: str, *, rendered: bool, mark: str = "") -> "_Encoding":
        """Tokenize a text, and begin it as the model reads it in use.

        Special tokens are recognised only in text that a chat template rendered, and not if they contain
        `mark`. Elsewhere they are text. Positions in the text do not count the marks.
        """
        limit = MAX_TOKENS_A_CHARACTER * (len(text) + 16)
        own = not rendered
        request = {
            "do": "encode",
            "text": encodable(text),
            "literal": own,
            "ends": own,
            "limit": limit,
            "mark": mark,
        }
        answer = self._ask(request, len(text))
        packed = (b64decode(answer[name]) for name in ("ids", "starts", "ends"))
        found = _Encoding(*(np.frombuffer(data, np.uint32).astype(np.int64) for data in packed))
        same = len(found.ids_T) == len(found.starts_T) == len(found.ends_T)
        # The child runs foreign data, so its answer is checked like any input.
        length = len(text.replace(mark, "") if mark else text)
        if not same or (len(found.ends_T) and found.ends_T.max() > length):
            raise PackageError("tokenizer", "The tokenizer returned positions outside of the text")
        added = len(begun(found.ids_T.tolist(), self.begins)) - len(found.ids_T)
        nowhere = np.zeros(added, dtype=np.int64)
        return _Encoding(
            np.concatenate([np.array(self.begins[:added], np.int64), found.ids_T]),
            np.concatenate([nowhere, found.starts_T]),
            np.concatenate([nowhere, found.ends_T]),
        )

    def _ask(
        self, request: Mapping[str, object], characters: int, code: str = "tokenizer"
    ) -> Mapping[str, Any]:
        return answered(lambda: self._sandbox.ask(request, characters=characters), code)


@dataclass(frozen=True, slots=True)
class _Encoding:
    """Token ids, each with the character span `start:end` that it encodes."""

    ids_T: NDArray[np.int64]
    starts_T: NDArray[np.int64]
    ends_T: NDArray[np.int64]


def package_tokenizer(package: Package, learn: Learn = Learn.ASSISTANT) -> TextTokenizer:
    """Open the tokenizer of a package. `learn` names the roles that count in a conversation."""
    names = package.manifest.files()
    return TextTokenizer(lambda name: package.file(name) if name in names else None, learn=learn)

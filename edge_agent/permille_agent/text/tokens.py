"""Text to tokens and back, by the package's own `tokenizer.json`; transformers is not needed.

The tokenizer is foreign data and works in a child process with limits (`permille.sandbox`), which renders the
chat template, too. Special tokens written in the user's text are text. Only what a chat template writes may
be special, and a message that contains a special token is refused there.
"""

from base64 import b64decode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from permille.errors import InputError, PackageError
from permille.package.reader import Package
from permille.sandbox.process import MAX_TOKENS_A_CHARACTER, Sandbox
from permille.token_bytes import token_bytes
from permille.tokenizer_files import ReadFile, TokenizerFiles, ends_of_turn
from permille_agent.text.chat_template import ChatTemplate, answered
from permille_agent.text.documents import Completion, Content, Conversation, Learn, PlainText, encodable

MAX_DECODED_CHARACTERS = 8 << 20


@dataclass(frozen=True, slots=True)
class TokenizedDocument:
    """The tokens of a document.

    Attributes:
        ids_T: int64, the token ids.
        target_T: bool, whether the loss counts the prediction of the token; never the first.
        bytes_T: int64, how many bytes of the text the token stands for; their sum over targets makes bits per
            byte.
    """

    ids_T: NDArray[np.int64]
    target_T: NDArray[np.bool_]
    bytes_T: NDArray[np.int64]

    @property
    def targets(self) -> int:
        """Number of target tokens."""
        return int(self.target_T.sum())

    def between(self, first: int, last: int | None) -> "TokenizedDocument":
        """Return the tokens from `first` to before `last`. The first of them is not a target."""
        target_T = self.target_T[first:last].copy()
        target_T[:1] = False
        return TokenizedDocument(self.ids_T[first:last], target_T, self.bytes_T[first:last])


class TextTokenizer:
    """The tokenizer of one package, with its special tokens and chat template.

    Attributes:
        template: the package's chat template, or the plain one for packages without a template.
        stop_ids: all `eos_token_id` of the package's files, and the template's end of a turn.
    """

    def __init__(self, read_file: ReadFile, *, learn: Learn = Learn.ASSISTANT) -> None:
        """Read `tokenizer.json` and, where there are any, the configurations beside it.

        Args:
            read_file: content of a file of the package by its name; None where the package has none.
            learn: whose turns of a conversation count in the loss.

        Raises:
            PackageError: no tokenizer, or one that cannot be read.
        """

        def load() -> bytes:
            if (data := read_file("tokenizer.json")) is None:
                raise PackageError("tokenizer", "The package has no tokenizer.json.")
            return data

        self._files = files = TokenizerFiles.read(read_file)
        self.bos, self.eos = files.special.get("bos"), files.special.get("eos")
        self._learn = learn
        ends = ends_of_turn(files.template)
        self._sandbox = Sandbox(load, tokens=(self.bos or "", self.eos or "", *ends))
        self.template = ChatTemplate(files.template, files.variables, self._sandbox)
        known = answered(self._sandbox.start, "tokenizer")
        self._bos_id: int | None = known["ids"][0] if self.bos else None
        self._eos_id: int | None = known["ids"][1] if self.eos else None
        found = known["ids"][1:] if self.eos else known["ids"][2:]
        self.stop_ids = tuple(sorted({*files.stop_ids, *(number for number in found if number is not None)}))

    def close(self) -> None:
        """End the child now; it ends with this object anyway."""
        self._sandbox.close()

    @property
    def can_chat(self) -> bool:
        """Say whether the package has a chat template of its own."""
        return self._files.template is not None

    def require_chat(self) -> None:
        """Refuse to chat without a template.

        Raises:
            InputError: the package has no chat template.
        """
        if not self.can_chat:
            raise InputError(
                "this model has no chat template, so it cannot chat: let it continue a text with "
                "`permille-agent generate`, or install a package made from an instruct model"
            )

    def prompt(self, text: str) -> NDArray[np.int64]:
        """Return the ids of a prompt to continue. Special tokens in it are treated as text.

        Raises:
            InputError: no token at all comes out.
        """
        ids_T = self._encode_literal(text).ids_T
        if not len(ids_T) and self._bos_id is not None:
            ids_T = np.array([self._bos_id], dtype=np.int64)
        if not len(ids_T):
            raise InputError("The prompt is empty. Write at least one word.")
        return ids_T

    def chat_prompt(self, messages: Sequence[tuple[str, str]]) -> NDArray[np.int64]:
        """Return the ids of a conversation up to the start of the assistant's next turn.

        Raises:
            InputError: the package has no chat template, or a message contains a special token.
            PackageError: the template fails.
        """
        self.require_chat()
        self._refuse_special(messages)
        today = datetime.now().astimezone().date()
        text = self.template.render(messages, add_generation_prompt=True, today=today)
        return self._encode(text, rendered=True).ids_T

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, without special tokens."""
        request = {"do": "decode", "ids": list(ids), "limit": MAX_DECODED_CHARACTERS}
        return str(self._ask(request, len(ids))["text"])

    def stream(self, ids: Iterable[int]) -> Iterator[str]:
        """Decode `ids` as they come, piece by piece; a piece never ends inside a character."""
        request = {"do": "step", "stream": self._sandbox.new_stream(), "limit": MAX_DECODED_CHARACTERS}
        try:
            for token in ids:
                if piece := self._ask({**request, "ids": [token]}, 1)["text"]:
                    yield str(piece)
        finally:
            with suppress(PackageError):
                self._ask({**request, "ids": []}, 0)

    def tokenize(self, content: Content, *, row_tokens: int) -> TokenizedDocument:
        """Convert a document to tokens, and mark the tokens that count in the loss.

        Args:
            content: the document.
            row_tokens: a prompt is shortened from its start so that its completion fits into a row of so many
                tokens.

        Raises:
            InputError: a conversation contains a special token or does not survive its template.
            PackageError: the template fails.
        """
        match content:
            case PlainText(text):
                encoding = self._encode_literal(text)
                return _document(encoding, text, ((0, len(text)),))
            case Completion(prompt, completion):
                return self._completion(prompt, completion, row_tokens)
            case Conversation(messages):
                return self._conversation(messages)

    def _completion(self, prompt: str, completion: str, row_tokens: int) -> TokenizedDocument:
        text = prompt + completion
        whole = _document(self._encode_literal(text), text, ((len(prompt), len(text)),))
        if self._eos_id is not None:
            whole = TokenizedDocument(
                np.append(whole.ids_T, np.int64(self._eos_id)),
                np.append(whole.target_T, True),
                np.append(whole.bytes_T, np.int64(0)),
            )
        if len(whole.ids_T) <= row_tokens:
            return whole
        # The end of the prompt is what the completion hangs on: keep at least a quarter of a row of it.
        first = int(np.argmax(whole.target_T))
        kept = max(row_tokens // 4, row_tokens - (len(whole.ids_T) - first))
        start = max(0, first - kept)
        return TokenizedDocument(whole.ids_T[start:], whole.target_T[start:], whole.bytes_T[start:])

    def _conversation(self, messages: Sequence[tuple[str, str]]) -> TokenizedDocument:
        self._refuse_special(messages)
        text, spans = self.template.render_with_targets(messages, self._learn.roles)
        return _document(self._encode(text, rendered=True), text, spans)

    def _encode_literal(self, text: str) -> "_Encoding":
        """Tokenize a user's text. Special tokens in it are treated as text.

        The result has the tokenizer's own beginning.
        """
        found = self._encode(text, rendered=False)
        if not self._files.add_bos or self._bos_id is None or found.ids_T[:1].tolist() == [self._bos_id]:
            return found
        first = np.array([self._bos_id], dtype=np.int64)
        nowhere = np.zeros(1, dtype=np.int64)
        return _Encoding(
            np.concatenate([first, found.ids_T]),
            np.concatenate([nowhere, found.starts_T]),
            np.concatenate([nowhere, found.ends_T]),
        )

    def _encode(self, text: str, *, rendered: bool) -> "_Encoding":
        """Tokenize a text. Special tokens are special only in text that a chat template rendered."""
        limit = MAX_TOKENS_A_CHARACTER * (len(text) + 16)
        own = not rendered
        request = {"do": "encode", "text": encodable(text), "literal": own, "ends": own, "limit": limit}
        answer = self._ask(request, len(text))
        found = _Encoding(*(_numbers(answer[name]) for name in ("ids", "starts", "ends")))
        same = len(found.ids_T) == len(found.starts_T) == len(found.ends_T)
        if not same or (len(found.ends_T) and found.ends_T.max() > len(text)):
            raise PackageError("tokenizer", "expected places within the text, got others")
        return found

    def _ask(self, request: Mapping[str, object], characters: int) -> Mapping[str, Any]:
        return answered(lambda: self._sandbox.ask(request, characters=characters), "tokenizer")

    def _refuse_special(self, messages: Sequence[tuple[str, str]]) -> None:
        texts = [content for _, content in messages]
        if self._ask({"do": "has_special", "texts": texts}, sum(map(len, texts)))["found"]:
            raise InputError("a message contains a special token of the model")


@dataclass(frozen=True, slots=True)
class _Encoding:
    """Tokens, and the characters that each stands for: from its start to before its end."""

    ids_T: NDArray[np.int64]
    starts_T: NDArray[np.int64]
    ends_T: NDArray[np.int64]


def _document(encoding: _Encoding, text: str, spans: Sequence[tuple[int, int]]) -> TokenizedDocument:
    ids_T, starts_T, ends_T = encoding.ids_T, encoding.starts_T, encoding.ends_T
    target_T = np.zeros(len(ids_T), dtype=np.bool_)
    for start, end in spans:
        target_T |= (ends_T > start) & (starts_T < end) & (ends_T > starts_T)
    target_T[:1] = False
    return TokenizedDocument(ids_T, target_T, token_bytes(text, ends_T))


def _numbers(packed: str) -> NDArray[np.int64]:
    return np.frombuffer(b64decode(packed), np.uint32).astype(np.int64)


def package_tokenizer(package: Package, learn: Learn = Learn.ASSISTANT) -> TextTokenizer:
    """Open the tokenizer in a package; of a conversation the turns count that `learn` names."""
    names = package.manifest.files()
    return TextTokenizer(lambda name: package.file(name) if name in names else None, learn=learn)

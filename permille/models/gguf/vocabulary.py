"""Translation of a `tokenizer.json` to llama.cpp's two kinds of byte pair encoding.

- `gpt2` first cuts a text into words by patterns that llama.cpp knows by name. It writes bytes as letters,
  and merges pairs in the order of a list.
- `llama` is the encoding of sentencepiece. Spaces become `▁`, and unknown characters become bytes. llama.cpp
  uses no list of merges for it. It merges any two adjacent pieces that form a token, and starts with the pair
  whose token has the best score. If the tokenizer's list of merges would give other tokens, the tokenizer is
  refused.

Normalization (NFC) is dropped. llama.cpp has no such step, and most text is NFC already.
"""

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from gguf import GGUFWriter, TokenType

from permille.errors import InputError, PackageError
from permille.models.gguf.tokenizer import DIGITS, GPT2, MOST_LETTERS, SPACE, SPLITS
from permille.tokenizer_files import ReadFile, TokenizerFiles, ends_of_turn, read_object


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRules:
    """The rules of a prompt, for programs that prompt the model themselves.

    Attributes:
        special: texts of special tokens by llama.cpp's names: bos, eos, eot.
        add_bos: whether llama.cpp adds the token bos to every text.
        chat_template: the Jinja template, or None if the model has none.
    """

    special: Mapping[str, str]
    add_bos: bool
    chat_template: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The tokens of a model, and the rules that turn a text into tokens.

    Attributes:
        tokens: the text of each token, by id.
        types: the type of each token, by id.
        cut: for `gpt2`, llama.cpp's name of the patterns that cut a text into words. None for `llama`.
        merges: for `gpt2`, the pairs to merge, in order.
        scores: for `llama`, the score of each token. The pair with the best score is merged first.
        space_first: for `llama`, whether a space is added before a text.
        special: ids of special tokens by llama.cpp's names: bos, eos, unk, pad, eot.
        add_bos, add_eos: whether the token bos or eos is added to every text.
        chat_template: the Jinja template, or None if the package has none.
    """

    tokens: list[str]
    types: list[TokenType]
    cut: str | None
    merges: list[str]
    scores: list[float]
    space_first: bool
    special: Mapping[str, int]
    add_bos: bool
    add_eos: bool
    chat_template: str | None

    @property
    def prompt(self) -> PromptRules:
        """Return the rules of a prompt."""
        special = {name: self.tokens[token] for name, token in self.special.items()}
        return PromptRules(special=special, add_bos=self.add_bos, chat_template=self.chat_template)

    def write(self, writer: GGUFWriter) -> None:
        """Write the keys of the tokenizer."""
        writer.add_tokenizer_model("llama" if self.cut is None else "gpt2")
        writer.add_tokenizer_pre(self.cut or "default")
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        if self.cut is None:
            writer.add_token_scores(self.scores)
            writer.add_add_space_prefix(self.space_first)
        else:
            writer.add_token_merges(self.merges)
        for name, token in self.special.items():
            getattr(writer, f"add_{name}_token_id")(token)
        writer.add_add_bos_token(self.add_bos)
        writer.add_add_eos_token(self.add_eos)
        if self.chat_template is not None:
            writer.add_chat_template(self.chat_template)


def vocabulary_of(read: ReadFile, rows: int) -> Vocabulary:
    """Translate the tokenizer of a package or a model folder.

    Args:
        read: reads a file by its name.
        rows: the number of rows of the embedding. If a row has no token, it gets a placeholder.

    Raises:
        InputError: the tokenizer is malformed, or llama.cpp would give other tokens.
    """
    with _known_form():
        return _read(read, rows)


def token_ids(read: ReadFile) -> dict[str, int]:
    """Return the id of each token of a `tokenizer.json`.

    Raises:
        InputError: the file is malformed.
    """
    with _known_form():
        return _ids(read_object(read("tokenizer.json")))


def reading_rules(read: ReadFile, *, with_merges: bool) -> dict[str, object]:
    """Return by names for messages whether BOS begins a text, and the merges of a tokenizer.

    Raises:
        InputError: a file is malformed.
    """
    with _known_form():
        files, document = TokenizerFiles.read(read), read_object(read("tokenizer.json"))
        merges = (document["model"].get("merges") or []) if with_merges else []
        pairs = (pair if isinstance(pair, str) else " ".join(pair) for pair in merges)
        begins = bool(_around(document)[0]) or files.add_bos
        return {"bos at the begin of a text": begins, **{f"merge {n}": pair for n, pair in enumerate(pairs)}}


@contextmanager
def _known_form() -> Iterator[None]:
    try:
        yield
    except (PackageError, KeyError, TypeError, AttributeError, IndexError) as exc:
        raise InputError(f"The tokenizer.json is of an unknown form: {exc!r:.200}") from exc


def _ids(document: Mapping[str, Any]) -> dict[str, int]:
    added = document.get("added_tokens") or []
    return {**document["model"]["vocab"], **{token["content"]: token["id"] for token in added}}


def _read(read: ReadFile, rows: int) -> Vocabulary:
    files = TokenizerFiles.read(read)
    document = read_object(read("tokenizer.json"))
    model, added = document["model"], document.get("added_tokens") or []
    if model.get("type", "BPE") != "BPE" or model.get("dropout") or model.get("end_of_word_suffix"):
        raise InputError(
            f"GGUF needs a tokenizer of byte pair encoding, and this one is {model.get('type')!r:.60}. "
            "Export the package for transformers."
        )
    ids = _ids(document)
    if not ids or max(ids.values()) >= rows:
        raise InputError(
            f"The tokenizer needs ids from 0 to {rows - 1}, the rows of the embedding, and its largest is "
            f"{max(ids.values(), default=None)}. Use the model's own tokenizer."
        )
    pairs = [tuple(pair.split(" ", 1) if isinstance(pair, str) else pair) for pair in model["merges"]]
    cut = None if model.get("byte_fallback") else _cut(document)  # sentencepiece has no patterns
    # llama.cpp needs a token for each row of the embedding.
    tokens = [f"[PAD{number}]" for number in range(rows)]
    types = [TokenType.UNUSED] * rows
    for token, number in ids.items():
        tokens[number], types[number] = token, TokenType.NORMAL
    bytes_at = {f"<0x{byte:02X}>" for byte in range(256)} if cut is None else set()
    for token in bytes_at:
        types[ids[token]] = TokenType.BYTE
    for entry in added:
        special = entry.get("special", False)
        types[entry["id"]] = TokenType.CONTROL if special else TokenType.USER_DEFINED
    special = {name: ids[token] for name, token in files.special.items() if token in ids}
    if cut is None and "unk" in special:
        types[special["unk"]] = TokenType.UNKNOWN
    known = [ids[end] for end in ends_of_turn(files.template) if end in ids]
    special |= _end_of_turn(read_object(read("generation_config.json")), special.get("eos"), known, rows)
    before, last = _around(document)
    if len(before) > 1:
        raise InputError(
            f"The tokenizer puts the tokens {before!r:.80} before a text, and llama.cpp puts at most one. "
            "Export the package for transformers."
        )
    # llama.cpp puts `bos` before a text, whatever the configuration calls BOS.
    if before and before[0] in ids:
        special["bos"] = ids[before[0]]
    return Vocabulary(
        tokens=tokens,
        types=types,
        cut=cut,
        merges=[" ".join(pair) for pair in pairs],
        scores=_scores(pairs, ids, rows) if cut is None else [],
        space_first=cut is None and _space_first(document),
        special=special,
        add_bos="bos" in special and (bool(before) or files.add_bos),
        add_eos="eos" in special and last,
        chat_template=files.template,
    )


def _space_first(document: Mapping[str, Any]) -> bool:
    """Return whether the tokenizer adds a space before a text.

    Raises:
        InputError: the tokenizer has a step that `llama` lacks.
    """
    before = [*_steps(document.get("normalizer"), "normalizers"), *_pre(document)]
    first = False
    for step in before:
        kind = step["type"]
        if kind == "Prepend" and step["prepend"] == SPACE:
            first = True
        elif kind == "Metaspace" and step.get("replacement") == SPACE and not step.get("split", True):
            first = first or step.get("prepend_scheme", "always") != "never"
        elif not (
            (kind == "Replace" and step["pattern"] == {"String": " "} and step["content"] == SPACE)
            # After `Replace`, the text has no spaces to split at.
            or (kind == "Split" and step["pattern"] == {"String": " "})
        ):
            raise InputError(
                f"llama.cpp lacks the tokenizer's step {kind!r:.60}. With bytes for unknown characters, it "
                f"has Prepend, Replace, Metaspace. Export the package for transformers."
            )
    return first


def _cut(document: Mapping[str, Any]) -> str:
    """Return llama.cpp's name of the patterns that cut a text.

    Raises:
        InputError: llama.cpp does not know the patterns.
    """
    steps, found = _pre(document), []
    for step in steps:
        kind = step["type"]
        if kind == "Split" and step.get("behavior") == "Isolated" and not step.get("invert"):
            found.append(step["pattern"].get("Regex"))
        elif kind == "Digits" and step.get("individual_digits"):
            found.append(DIGITS)
        elif kind == "ByteLevel" and not step.get("add_prefix_space"):
            found += [GPT2] if step.get("use_regex", True) else []
        else:
            found.append(kind)
    words = bool(document["model"].get("ignore_merges"))
    normalized = {step["type"] for step in _steps(document.get("normalizer"), "normalizers")}
    if any(step["type"] == "ByteLevel" for step in steps) and not normalized - {"NFC"}:
        for name, (patterns, whole_words) in SPLITS.items():
            if tuple(found) == patterns and words == whole_words:
                return name
    raise InputError(
        f"llama.cpp cannot cut a text as this tokenizer does ({found!r:.200}), only as {', '.join(SPLITS)} "
        "do. Export the package for transformers."
    )


def _scores(pairs: list[tuple[str, ...]], ids: Mapping[str, int], rows: int) -> list[float]:
    """Return the score of each token: minus the rank of the first merge that makes it.

    Raises:
        InputError: these scores would not give the same tokens as the list of merges.
    """
    ranks: dict[str, int] = {}
    last = ""
    for rank, (left, right) in enumerate(pairs):
        token = left + right
        # In a list that is ordered by scores, all pairs that make the same token are adjacent.
        if token != last and token in ranks:
            raise _not_by_scores(token)
        ranks.setdefault(token, rank)
        last = token
    known = set(pairs)
    for token in ids:
        if len(token) > MOST_LETTERS:
            raise InputError(
                f"The tokenizer has a token of {len(token)} letters. A GGUF export takes at most "
                f"{MOST_LETTERS}. Export the package for transformers."
            )
        for place in range(1, len(token)):
            left, right = token[:place], token[place:]
            # A single character is always a piece. If it is no token, it becomes bytes.
            both = (left in ids or place == 1) and (right in ids or len(right) == 1)
            if both and (left, right) not in known:
                raise _not_by_scores(token)
    scores = [0.0] * rows
    for token, rank in ranks.items():
        scores[ids[token]] = -float(rank)
    return scores


def _not_by_scores(token: str) -> InputError:
    return InputError(
        f"llama.cpp would cut a text into other tokens: it merges by sentencepiece's scores, and the list of "
        f"merges differs from them at {token!r:.60}. If the model came as a GGUF file, name that file with "
        "--like. Otherwise, export the package for transformers."
    )


def _around(document: Mapping[str, Any]) -> tuple[list[str], bool]:
    """Return the special tokens that are added before every text, and whether one is added after it."""
    for step in _steps(document.get("post_processor"), "processors"):
        if step["type"] == "TemplateProcessing" and step["single"]:
            named = itertools.takewhile(lambda piece: "SpecialToken" in piece, step["single"])
            before = [piece["SpecialToken"]["id"] for piece in named]
            return before, "SpecialToken" in step["single"][-1]
        if step["type"] in ("RobertaProcessing", "BertProcessing"):
            return [step["cls"][0]], True
    return [], False


def _end_of_turn(
    generation: Mapping[str, Any], eos: int | None, known: list[int], rows: int
) -> dict[str, int]:
    """Return the token `eot`, which ends an answer and is not `eos`, if there is one.

    The candidates are the ids below `rows` that `generation_config.json` lists under `eos_token_id`. If there
    are none, they are `known`: the tokens in the chat template that are known to end a turn. The last
    candidate other than `eos` is taken.
    """
    value = generation.get("eos_token_id")
    listed = value if isinstance(value, list) else []
    named = [one for one in listed if isinstance(one, int) and 0 <= one < rows]
    others = [one for one in named or known if one != eos]
    return {"eot": others[-1]} if others else {}


def _pre(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return list(_steps(document.get("pre_tokenizer"), "pretokenizers"))


def _steps(step: Mapping[str, Any] | None, parts: str) -> Iterator[Mapping[str, Any]]:
    """Yield a step, or the steps of a sequence."""
    if step is None:
        return
    if step["type"] == "Sequence":
        for part in step[parts]:
            yield from _steps(part, parts)
    else:
        yield step

"""A `tokenizer.json` in llama.cpp's terms: the two kinds of byte pair encoding that both know.

`gpt2`: bytes as letters, merges by rank, and a name for how a text is cut before. `llama`: sentencepiece's,
spaces as `▁`, unknown characters as bytes. There llama.cpp merges any two neighbours that make a token, the
best token first, and knows no list of merges; a tokenizer whose merges say otherwise is refused. What
normalizes a text (NFC) is left out: llama.cpp has no such step, and most text is NFC already.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gguf import GGUFWriter, TokenType

from permille.errors import InputError, PackageError
from permille.models.gguf.tokenizer import DIGITS, GPT2, SPACE, SPLITS
from permille.package.reader import Package
from permille.tokenizer_files import TokenizerFiles, ends_of_turn, read_object

_LONGEST = 256
"""Letters of a token of sentencepiece's: they are looked at pair by pair, and the file is a stranger's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Tokens by id, and how a text becomes them.

    Attributes:
        cut: the name of the patterns that cut a text (`gpt2`); None: `llama`.
        scores: of `llama`: what is merged first.
        special: ids of special tokens by llama.cpp's names: bos, eos, unk, pad, eot.
        chat_template: None: the package has none.
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

    def write(self, writer: GGUFWriter) -> None:
        """Add the keys of the tokenizer."""
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


def vocabulary_of(package: Package, rows: int) -> Vocabulary:
    """The tokenizer of a package that has one.

    Args:
        rows: of the embedding; ids that no token has are filled.

    Raises:
        InputError: it is malformed, or of another kind than those that llama.cpp computes alike.
    """
    try:
        return _read(package, rows)
    except (PackageError, KeyError, TypeError, AttributeError, IndexError) as exc:
        raise InputError(f"The tokenizer.json is of an unknown form: {exc!r:.200}") from exc


def _read(package: Package, rows: int) -> Vocabulary:
    named = package.manifest.files()

    def read(name: str) -> bytes | None:
        return package.file(name) if name in named else None

    files = TokenizerFiles.read(read)
    document = read_object(package.file("tokenizer.json"))
    model, added = document["model"], document.get("added_tokens") or []
    if model.get("type", "BPE") != "BPE" or model.get("dropout") or model.get("end_of_word_suffix"):
        raise InputError(f"expected byte pair encoding for GGUF, got {model.get('type')!r:.60}")
    ids: dict[str, int] = {**model["vocab"], **{token["content"]: token["id"] for token in added}}
    if not ids or max(ids.values()) >= rows:
        raise InputError(
            f"expected token ids below {rows}, the rows of the embedding; got {max(ids.values())}"
        )
    pairs = [tuple(pair.split(" ", 1) if isinstance(pair, str) else pair) for pair in model["merges"]]
    cut = None if model.get("byte_fallback") else _cut(document)  # sentencepiece cuts by scores
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
    special |= _end_of_turn(read_object(read("generation_config.json")), special.get("eos"), known)
    first, last = _around(document)
    return Vocabulary(
        tokens=tokens,
        types=types,
        cut=cut,
        merges=[" ".join(pair) for pair in pairs],
        scores=_scores(pairs, ids, rows) if cut is None else [],
        space_first=cut is None and _space_first(document),
        special=special,
        add_bos="bos" in special and (first or files.add_bos),
        add_eos="eos" in special and last,
        chat_template=files.template,
    )


def _space_first(document: Mapping[str, Any]) -> bool:
    """Return whether the tokenizer adds a space before a text.

    Raises:
        InputError: a text is changed or cut otherwise than by `▁` for spaces.
    """
    kinds = {"Prepend": False, "Replace": False, "Metaspace": False}
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
            or (kind == "Split" and step["pattern"] == {"String": " "})  # none is left after Replace
        ):
            raise InputError(f"expected sentencepiece's steps {', '.join(kinds)}, got {kind!r:.60}")
    return first


def _cut(document: Mapping[str, Any]) -> str:
    """The name that llama.cpp has for how a text is cut.

    Raises:
        InputError: none.
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
    raise InputError(f"expected a tokenizer that cuts text as {', '.join(SPLITS)} do, got {found!r:.200}")


def _scores(pairs: list[tuple[str, ...]], ids: Mapping[str, int], rows: int) -> list[float]:
    """Minus the rank of the first merge that makes a token.

    Raises:
        InputError: to merge by scores is not to merge by the list.
    """
    ranks: dict[str, int] = {}
    last = ""
    for rank, (left, right) in enumerate(pairs):
        token = left + right
        if token != last and token in ranks:
            raise _not_by_scores(token)
        ranks.setdefault(token, rank)
        last = token
    known = set(pairs)
    for token in ids:
        if len(token) > _LONGEST:
            raise InputError(f"expected tokens of at most {_LONGEST} letters, got {len(token)}")
        for place in range(1, len(token)):
            left, right = token[:place], token[place:]
            both = (left in ids or place == 1) and (right in ids or len(right) == 1)
            if both and (left, right) not in known:
                raise _not_by_scores(token)
    scores = [0.0] * rows
    for token, rank in ranks.items():
        scores[ids[token]] = -float(rank)
    return scores


def _not_by_scores(token: str) -> InputError:
    return InputError(
        f"expected merges as sentencepiece's scores give them, got others for {token!r:.60}: llama.cpp would"
        " read a text otherwise"
    )


def _around(document: Mapping[str, Any]) -> tuple[bool, bool]:
    """Return whether a special token is added before, and after, every text."""
    for step in _steps(document.get("post_processor"), "processors"):
        if step["type"] == "TemplateProcessing" and step["single"]:
            return "SpecialToken" in step["single"][0], "SpecialToken" in step["single"][-1]
    return False, False


def _end_of_turn(generation: Mapping[str, Any], eos: int | None, known: list[int]) -> dict[str, int]:
    """The other token at which generation ends, if there is one: named by the files, or known by its name."""
    value = generation.get("eos_token_id")
    named = [one for one in value if isinstance(one, int)] if isinstance(value, list) else []
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

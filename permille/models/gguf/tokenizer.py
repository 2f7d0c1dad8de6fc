"""Translation of a GGUF file's tokenizer to `tokenizer.json`, for two kinds of byte pair encoding.

This is the inverse of `permille.models.gguf.vocabulary`. A `gpt2` tokenizer writes bytes as letters. Its file
has a list of merges and the name of the rule that splits a text into words. A `llama` tokenizer is that of
sentencepiece, which first merges the pair that makes the token with the best score. Its file has only the
scores, so the list of merges is made from them, in the same way as in transformers. Other kinds and unknown
split rules are refused, because wrong token ids would give nonsense without an error.
"""

import math
from collections.abc import Mapping
from typing import Any

from gguf import TokenType

from permille.models.gguf.file import OTHERWISE, GgufFile
from permille.tokenizer_files import END_OF_TURN

SPACE = "▁"
DIGITS = "digits"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {
    "gpt-2": ((GPT2,), False),
    "smollm": ((DIGITS, GPT2), False),
    "qwen2": (
        (
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
            r"|\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
        False,
    ),
    "llama-bpe": ((_GPT4,), True),
    "dbrx": ((_GPT4,), False),
    # Granite 3: the same rule as `smollm`.
    "refact": ((DIGITS, GPT2), False),
    # SmolLM3: the same rule as `dbrx`.
    "smaug-bpe": ((_GPT4,), False),
}
"""Split rules by llama.cpp's names. Each has patterns and the flag `ignore_merges`. If the flag is set, a
word that is itself a token is taken without merging."""

# Rules of tokenizers that normalize the text (to NFC) before they split it.
_NORMALIZED = frozenset({"qwen2"})
_MOST_MERGES = 1 << 20  # Gemma has some 580,000
MOST_LETTERS = 256
"""The largest number of letters of a token of a `llama` tokenizer. A token is split at every place to find
its merges, and the file is untrusted, so huge tokens would take too long."""


def tokenizer_files(file: GgufFile) -> dict[str, Any]:
    """Make `tokenizer.json`, `tokenizer_config.json` and others, as JSON values by file name.

    Raises:
        InputError: the file has no tokenizer of kind `gpt2` or `llama`, or the tokenizer is malformed.
    """
    kind = file.text("tokenizer.ggml.model", "none")
    if kind not in ("gpt2", "llama"):
        raise file.refused(
            f"holds a tokenizer of kind {kind!r:.60}, and only gpt2 and llama are supported. {OTHERWISE}"
        )
    tokens = token_texts(file)
    rows = file.tensors["token_embd.weight"].shape[0] if "token_embd.weight" in file.tensors else 0
    # More rows than tokens are fine: many embeddings are padded.
    if len(tokens) > rows:
        raise file.refused(f"has {len(tokens)} tokens for an embedding of {rows} rows")
    types = file.metadata.get("tokenizer.ggml.token_type", [TokenType.NORMAL.value] * len(tokens))
    if not isinstance(types, list) or len(types) != len(tokens):
        raise file.refused("has another number of token types than of tokens")
    # In `tokenizer.json`, the text of a token is the key of its id.
    if len(set(tokens)) != len(tokens):
        raise file.refused("has a token twice in its vocabulary")
    special = special_texts(file, tokens)
    add_bos, add_eos = adds_bos(file), bool(file.metadata.get("tokenizer.ggml.add_eos_token"))
    first = special.get("bos") if add_bos else None
    last = special.get("eos") if add_eos else None
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(tokens, types),
        "post_processor": _framed(first, last, tokens),
    }
    unknown = special.get("unk")
    document |= _byte_level(file, tokens) if kind == "gpt2" else _sentencepiece(file, tokens, unknown)
    named = {f"{name}_token": token for name, token in special.items()}
    found: dict[str, Any] = {
        "tokenizer.json": document,
        "tokenizer_config.json": {
            **named,
            "add_bos_token": add_bos,
            "tokenizer_class": "PreTrainedTokenizerFast",
            # llama.cpp keeps spaces before punctuation when it writes token by token.
            "clean_up_tokenization_spaces": False,
        },
    }
    # Chat models end a turn by one token and a document by another. An answer ends at either.
    ends = [file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    ids = list(dict.fromkeys(end for end in ends if isinstance(end, int) and 0 <= end < len(tokens)))
    generation = _sampling(file) | ({"eos_token_id": ids} if ids else {})
    return found | ({"generation_config.json": generation} if generation else {})


def token_texts(file: GgufFile) -> list[str]:
    """Return the text of each token, by id. Raises InputError if the file has no such list."""
    return _texts(file, "tokens")


def adds_bos(file: GgufFile) -> bool:
    """Return whether llama.cpp adds the `bos` token to every text."""
    # A file that does not say so means the default of its kind of tokenizer.
    kinds = (file.metadata.get("tokenizer.ggml.model"), file.metadata.get("tokenizer.ggml.pre"))
    return bool(file.metadata.get("tokenizer.ggml.add_bos_token", "llama" in kinds or "llama-bpe" in kinds))


def special_texts(file: GgufFile, tokens: list[str]) -> dict[str, str]:
    """Return the texts of special tokens by the names that transformers uses, without unknown ones."""
    defaults, found = _DEFAULTS.get(file.text("tokenizer.ggml.model", "none"), {}), {}
    for name, key in _SPECIAL.items():
        known = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        for number in (known, defaults.get(name)):
            if isinstance(number, int) and 0 <= number < len(tokens):
                found[name] = tokens[number]
                break
    return found


def chat_template(file: GgufFile) -> str | None:
    """Return the chat template of a file, or None if there is none or it is empty.

    Raises:
        InputError: the template is no text, or not UTF-8.
    """
    if "tokenizer.chat_template" not in file.metadata:
        return None
    found = file.text("tokenizer.chat_template")
    try:
        found.encode()
    except UnicodeEncodeError as exc:
        raise file.refused("has a chat template that is not UTF-8") from exc
    return found if found.strip() else None


# The names of transformers, the keys of llama.cpp, and the range that a package may have.
_SAMPLING = {
    "temperature": ("general.sampling.temp", 0.0, 100.0),
    "top_p": ("general.sampling.top_p", 1e-6, 1.0),
    "top_k": ("general.sampling.top_k", 0, 1 << 31),
    "repetition_penalty": ("general.sampling.penalty_repeat", 1e-6, 10.0),
}
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_DEFAULTS = {"llama": {"bos": 1, "eos": 2, "unk": 0}, "gpt2": {"bos": 11, "eos": 11}}
"""The special tokens that llama.cpp takes if a file names none, or one outside of its vocabulary."""
_ENDS = frozenset(END_OF_TURN) | {
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|return|>",
    "<EOT>",
    "[EOT]",
    "[EOS]",
    "<end_of_utterance>",
}
"""Tokens that llama.cpp takes for control tokens by their text, because they end an answer."""


def _sampling(file: GgufFile) -> dict[str, Any]:
    """Return the settings of sampling. llama.cpp takes a number out of range for the end of its range."""
    found = {}
    for name, (key, least, most) in _SAMPLING.items():
        value = file.metadata.get(key)
        if isinstance(value, int | float) and math.isfinite(value):
            found[name] = min(max(value, least), most)
    return found


def _texts(file: GgufFile, key: str) -> list[str]:
    found = file.metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(found, list) or not found or not all(isinstance(text, str) for text in found):
        raise file.refused(f"has no list of texts tokenizer.ggml.{key}")
    try:
        for text in found:
            text.encode()
    except UnicodeEncodeError as exc:
        raise file.refused(f"has texts in tokenizer.ggml.{key} that are not UTF-8") from exc
    return found


def _added(tokens: list[str], types: list[Any]) -> list[dict[str, Any]]:
    kept = (TokenType.CONTROL.value, TokenType.USER_DEFINED.value, TokenType.UNKNOWN.value)
    control = TokenType.CONTROL.value
    types = [control if token in _ENDS else type_ for token, type_ in zip(tokens, types, strict=True)]
    return [
        {
            "id": number,
            "content": tokens[number],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            # Find the token in the text as it came, before it is normalized.
            "normalized": False,
            # User-defined tokens are text that is never split. An answer shows them.
            "special": type_ != TokenType.USER_DEFINED.value,
        }
        for number, type_ in enumerate(types)
        if type_ in kept
    ]


def _framed(bos: str | None, eos: str | None, tokens: list[str]) -> Mapping[str, Any] | None:
    """Return the post-processor that puts these special tokens before and after a text, or None."""

    def framed(name: str, type_id: int) -> list[dict[str, Any]]:
        pieces = (("SpecialToken", bos), ("Sequence", name), ("SpecialToken", eos))
        return [{piece: {"id": text, "type_id": type_id}} for piece, text in pieces if text is not None]

    special = [token for token in (bos, eos) if token is not None]
    known = {token: {"id": token, "ids": [tokens.index(token)], "tokens": [token]} for token in special}
    return (
        {
            "type": "TemplateProcessing",
            "single": framed("A", 0),
            "pair": framed("A", 0) + framed("B", 1),
            "special_tokens": known,
        }
        if special
        else None
    )


def _byte_level(file: GgufFile, tokens: list[str]) -> dict[str, Any]:
    name = file.text("tokenizer.ggml.pre", "default")
    if name not in SPLITS:
        raise file.refused(
            f"cuts text by the rules {name!r:.60}, and only {', '.join(SPLITS)} are supported. {OTHERWISE}"
        )
    patterns, whole_words = SPLITS[name]
    # Of a repeated merge, llama.cpp takes the first place and the tokenizers library the last.
    merges = [pair.split(" ") for pair in dict.fromkeys(_texts(file, "merges"))]
    if any(len(pair) != 2 for pair in merges):
        raise file.refused("has a merge that is not of two tokens")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    # The tokenizers library refuses a file with a merge of unknown tokens, so name the merge here.
    for left, right in merges:
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise file.refused(f"merges {left!r:.40} and {right!r:.40}, which make no token")
    steps: list[dict[str, Any]] = []
    for pattern in patterns:
        if pattern == DIGITS:
            steps.append({"type": "Digits", "individual_digits": True})
        elif pattern != GPT2:
            split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
            steps.append(split | {"invert": False})
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    # ByteLevel has GPT-2's pattern built in, so that pattern is no step of its own.
    steps.append({**byte_level, "use_regex": GPT2 in patterns})
    return {
        "normalizer": {"type": "NFC"} if name in _NORMALIZED else None,
        "pre_tokenizer": steps[0] if len(steps) == 1 else {"type": "Sequence", "pretokenizers": steps},
        "decoder": {**byte_level, "add_prefix_space": True, "use_regex": True},
        "model": _bpe(vocabulary, merges) | {"ignore_merges": whole_words},
    }


def _sentencepiece(file: GgufFile, tokens: list[str], unknown: str | None) -> dict[str, Any]:
    scores = file.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise file.refused("has another number of scores than of tokens")
    if not all(isinstance(score, float) and math.isfinite(score) for score in scores):
        raise file.refused("has scores of tokens that are no numbers")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    ranked: list[tuple[float, int, int, list[str]]] = []
    for token, score in zip(tokens, scores, strict=True):
        if len(token) > MOST_LETTERS:
            raise file.refused(f"has a token of {len(token)} letters, more than {MOST_LETTERS}")
        pairs = ([token[:place], token[place:]] for place in range(1, len(token)))
        known = [pair for pair in pairs if pair[0] in vocabulary and pair[1] in vocabulary]
        ranked += [
            (-float(score), vocabulary[left], vocabulary[right], [left, right]) for left, right in known
        ]
        if len(ranked) > _MOST_MERGES:
            raise file.refused(f"has a vocabulary of more than {_MOST_MERGES} merges")
    # Put the best score first. Order equal scores by the ids of the two parts.
    merges = [pair for *_, pair in sorted(ranked, key=lambda item: item[:3])]
    spaces: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]
    after: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if file.metadata.get("tokenizer.ggml.add_space_prefix", True):
        spaces.insert(0, {"type": "Prepend", "prepend": SPACE})
        after.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {"type": "Sequence", "normalizers": spaces},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": after},
        "model": _bpe(vocabulary, merges) | {"unk_token": unknown, "fuse_unk": True, "byte_fallback": True},
    }


def _bpe(vocabulary: Mapping[str, int], merges: list[list[str]]) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "vocab": vocabulary,
        "merges": merges,
    }

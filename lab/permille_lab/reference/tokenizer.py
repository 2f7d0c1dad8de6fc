"""The reference model's tokenizer: byte-level BPE, so that every byte can be written and none is unknown."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from permille.errors import InputError

SPECIAL = ("<s>", "</s>", "<pad>")
BOS = 0
# Words with their leading space, digits one by one, runs of marks: as GPT-4 divides, but for its numbers.
_DIVIDE = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """A tokenizer of `vocabulary` entries, the three special ones first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_DIVIDE), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write it so that `AutoTokenizer.from_pretrained` reads it."""
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=SPECIAL[0], eos_token=SPECIAL[1], pad_token=SPECIAL[2]
    )
    fast.save_pretrained(str(folder))


def read_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a model's folder.

    Raises:
        InputError: there is none, or one that was not trained here.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise InputError(f"expected a model with {path.name} in {folder}, found none")
    tokenizer = Tokenizer.from_file(str(path))
    special = tuple(tokenizer.id_to_token(number) for number in range(len(SPECIAL)))
    if special != SPECIAL or tokenizer.get_vocab_size() > 2**16:
        raise InputError(
            f"expected {SPECIAL} first of at most {2**16} tokens in {path}, got {special} of "
            f"{tokenizer.get_vocab_size()}"
        )
    return tokenizer


def token_stream(tokenizer: Tokenizer, texts: list[str]) -> NDArray[np.uint16]:
    """All texts as one stream of ids, each behind `<s>`."""
    parts: list[NDArray[np.uint16]] = []
    for first in range(0, len(texts), 1000):
        encoded = tokenizer.encode_batch(texts[first : first + 1000], add_special_tokens=False)
        parts.extend(np.asarray([BOS, *row.ids], dtype=np.uint16) for row in encoded)
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.uint16)

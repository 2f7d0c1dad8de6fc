"""The first step: draw token sequences from public text.

corpus = Corpus(texts=partial(file_texts, path), provenance={"kind": "file"})
drawn = corpus.draw(FileTokenizer(folder), Sampling(number=32, length=256, seed=0))
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from permille.corpora.sequences import POOL, Tokenizer, token_sequences
from permille.corpora.sources import ReadReport
from permille.digests import JSON
from permille.errors import InputError
from permille.models.checkpoint import Checkpoint
from permille.models.settings import within_positions
from permille.package.blobs import BlobFolder

_DESCRIPTION_BYTES = 1 << 20
_LONGEST_EVALUATION, _EVALUATION_SEED = 512, 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Choice of sequences from a corpus: their number, length and seed, and how many to skip first."""

    number: int
    length: int
    seed: int
    skip: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """Sequences [N, T] from a corpus, its origin, and a report on reading it: counts of rows and bad rows."""

    tokens_NT: NDArray[np.int64]
    provenance: dict[str, JSON]
    read: Mapping[str, object]

    def put(self, blobs: BlobFolder) -> str:
        """Store the tokens as little-endian uint32, and a description of them. Return its digest."""
        described = {
            "shape": list(self.tokens_NT.shape),
            "tokens": blobs.put_bytes(self.tokens_NT.astype("<u4").tobytes()),
            "provenance": self.provenance,
            "read": self.read,
        }
        return blobs.put_bytes(json.dumps(described, sort_keys=True).encode())

    @classmethod
    def stored(cls, blobs: BlobFolder, digest: str) -> "Drawn":
        """Read what `put` stored. Raises PackageError if a blob is missing or damaged."""
        described = json.loads(blobs.read(digest, limit=_DESCRIPTION_BYTES))
        number, length = described["shape"]
        tokens = np.frombuffer(blobs.read(described["tokens"], limit=4 * number * length), "<u4")
        return cls(
            tokens_NT=tokens.reshape(number, length).astype(np.int64),
            provenance=described["provenance"],
            read=described["read"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Public text. `texts` reads it, and counts rows and bad rows in the report that it gets."""

    texts: Callable[[ReadReport], Iterable[str]]
    provenance: dict[str, JSON] = field(default_factory=dict)

    def draw(self, tokenizer: Tokenizer, sampling: Sampling) -> Drawn:
        """Draw sequences from the usable texts.

        Raises:
            InputError: there is too little text, too many rows are unusable, or the file is truncated.
            RetryableError: the data set cannot be reached.
        """
        report = ReadReport()
        asked = (sampling.number, sampling.length, sampling.seed)
        tokens_NT = token_sequences(tokenizer, self.texts(report), *asked, skip=sampling.skip)
        return Drawn(tokens_NT=tokens_NT, provenance=self.provenance, read=report.as_json())

    def draw_held_out(self, tokenizer: Tokenizer, wanted: Sampling, *, least: int = 1) -> tuple[Drawn, bool]:
        """Return sequences for evaluation, and whether they are held out.

        They are held out if they come after the first `wanted.skip` sequences of the corpus, which earlier
        steps may have used. If the corpus is too small, halve the number of sequences, down to `least`. As a
        last resort, skip no sequences.

        Raises:
            InputError: the corpus has fewer than `least` sequences.
        """
        for skip in dict.fromkeys((wanted.skip, 0)):
            number = wanted.number
            while number >= least:
                try:
                    return self.draw(
                        tokenizer, replace(wanted, number=number, skip=skip)
                    ), skip >= wanted.skip
                except InputError as exc:
                    shortest, number = exc, max(number // 2, least) if number > least else 0
        raise InputError(
            f"The corpus is too small. It must have at least {least * wanted.length} tokens: {shortest}"
        ) from shortest


def evaluation_text(checkpoint: Checkpoint, corpus: Corpus, tokens: int, used: int) -> tuple[Drawn, bool]:
    """Draw the sequences of an evaluation, and return whether the calibration does not use them.

    Call this before a long calibration or quantization, because too little text is an error.

    Args:
        tokens: the number of tokens to measure on.
        used: the number of the corpus's tokens that the calibration uses. They are passed over if possible.

    Raises:
        InputError: the text is too short.
        RetryableError: the data set cannot be reached.
    """
    from permille.models.loading import FileTokenizer

    length = within_positions(checkpoint.config, _LONGEST_EVALUATION)
    # To choose n sequences, calibration reads up to POOL * n sequences of the corpus. Skip all tokens that it
    # may have read. The number of sequences to skip is rounded up.
    skipped = -(-POOL * used // length)
    wanted = Sampling(number=max(1, tokens // length), length=length, seed=_EVALUATION_SEED, skip=skipped)
    return corpus.draw_held_out(FileTokenizer(checkpoint.folder), wanted)

"""Tests of sequences that steps draw and keep."""

from pathlib import Path

import numpy as np
import pytest

from permille.corpora.sources import ReadReport
from permille.errors import InputError, PackageError
from permille.package.blobs import BlobFolder
from permille.pipeline.draw import Corpus, Drawn, Sampling


class Letters:
    """A tokenizer whose tokens are the code points of a text."""

    bos: tuple[int, ...] = ()

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]


def corpus_of(text: str) -> Corpus:
    def texts(report: ReadReport) -> list[str]:
        report.rows += 1
        return [text]

    return Corpus(texts=texts, provenance={"kind": "letters"})


def test_stored_sequences_are_read_as_they_were_drawn(tmp_path: Path) -> None:
    blobs = BlobFolder(tmp_path)
    drawn = corpus_of("abcdefgh" * 9).draw(Letters(), Sampling(number=3, length=5, seed=1))
    digest = drawn.put(blobs)
    found = Drawn.stored(blobs, digest)
    assert np.array_equal(found.tokens_NT, drawn.tokens_NT) and found.tokens_NT.dtype == np.int64
    assert (found.provenance, found.read) == ({"kind": "letters"}, {"rows": 1, "bad": {}})
    assert digest == drawn.put(BlobFolder(tmp_path))
    path = blobs.path(digest)
    path.chmod(0o600)
    path.write_bytes(b"{}")
    with pytest.raises(PackageError):
        Drawn.stored(blobs, digest)


@pytest.mark.parametrize(
    ("letters", "rows", "held_out"), [(40, 4, True), (36, 2, True), (18, 4, False), (5, 1, False)]
)
def test_sequences_are_held_out_if_the_text_suffices(letters: int, rows: int, held_out: bool) -> None:
    text = "".join(map(chr, range(97, 97 + letters)))
    wanted = Sampling(number=4, length=4, seed=0, skip=6)
    drawn, is_held_out = corpus_of(text).draw_held_out(Letters(), wanted)
    assert (len(drawn.tokens_NT), is_held_out) == (rows, held_out)
    assert (drawn.tokens_NT.min() >= 97 + 24) == held_out


def test_a_text_of_less_than_one_sequence_is_refused() -> None:
    with pytest.raises(InputError, match=r"must have at least 4 tokens: .* Add text to the corpus"):
        corpus_of("abc").draw_held_out(Letters(), Sampling(number=4, length=4, seed=0, skip=6))


def test_no_fewer_sequences_than_the_least_are_drawn() -> None:
    wanted = Sampling(number=8, length=4, seed=0)
    drawn, _ = corpus_of("abcdefghijklmn").draw_held_out(Letters(), wanted, least=3)
    assert len(drawn.tokens_NT) == 3
    with pytest.raises(InputError, match="must have at least 16 tokens: The corpus has 3 sequences"):
        corpus_of("abcdefghijklmn").draw_held_out(Letters(), wanted, least=4)

"""Texts of a corpus: `.jsonl`, `.jsonl.gz` (field `text`) and `.txt` below a root, or C4 by streaming.

Rows that cannot be used are counted by reason in the caller's `ReadReport`; none is dropped in silence. A
file that ends in the middle of a row is refused, and so is one of which more than a tenth is broken: a mask
or a calibration of what happens to be left would be another one than was asked for.
Reading is lazy: nothing is read beyond what is asked for.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from permille.choices import StreamedDataset
from permille.corpora.files import BadRow, ReadReport, checked_text, file_texts
from permille.errors import InputError, RetryableError
from permille.models.sources import resolve_inside

# repository, configuration, commit: a dataset that moves would change a mask.
_STREAMS = {StreamedDataset.C4: ("allenai/c4", "en", "1588ec454efa1a09f29cd18ddd04fe05fc8653a2")}


@dataclass(frozen=True, slots=True, kw_only=True)
class FileCorpus:
    """`path` is relative to the root, with "/" between parts."""

    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedCorpus:
    """A dataset of the allow-list; `split` is "train" or "validation"."""

    dataset: StreamedDataset
    split: str = "train"


CorpusRef = FileCorpus | StreamedCorpus


def read_texts(ref: CorpusRef, root: Path, report: ReadReport) -> Iterator[str]:
    """The usable texts of a corpus, in their order, read as they are asked for.

    Raises:
        InputError: a path outside the root or with another ending, a damaged .gz, a last row that is cut,
            too many broken rows, or a dataset not on the list.
        RetryableError: the dataset's host cannot be reached.
    """
    if isinstance(ref, StreamedCorpus):
        return _checked_to_the_end(_streamed_texts(ref, report), report)
    path = resolve_inside(root, ref.path, what="file")
    return _checked_to_the_end(file_texts(path, report), report)


def _checked_to_the_end(texts: Iterator[str], report: ReadReport) -> Iterator[str]:
    yield from texts
    report.check()


def _streamed_texts(ref: StreamedCorpus, report: ReadReport) -> Iterator[str]:
    if ref.dataset not in _STREAMS or ref.split not in ("train", "validation"):
        raise InputError(
            f"Only c4 can be streamed, its split train or validation; got {ref.dataset!r}, {ref.split!r}."
        )
    for row in _open_stream(ref):
        report.rows += 1
        text = checked_text(row.get("text"))
        if isinstance(text, BadRow):
            report.refuse(text)
        else:
            yield text


def _open_stream(ref: StreamedCorpus) -> Iterable[dict[str, object]]:
    import datasets

    repository, configuration, commit = _STREAMS[ref.dataset]
    try:
        yield from datasets.load_dataset(
            repository, configuration, split=ref.split, streaming=True, revision=commit
        )
    except OSError as exc:
        raise RetryableError(f"Cannot reach the host of {ref.dataset}: {exc}") from exc

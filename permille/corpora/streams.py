"""Texts of a streamed dataset.

This module is separate from `sources`, because the API imports `sources`, and an import contract keeps
`datasets` out of the API.
"""

from collections.abc import Iterable, Iterator
from typing import Literal

from permille.choices import StreamedDataset
from permille.corpora.sources import BadRow, ReadReport, checked_text
from permille.errors import RetryableError

# Repository, configuration and commit. The commit is fixed, because a changed dataset would give another
# mask.
_STREAMS = {StreamedDataset.C4: ("allenai/c4", "en", "1588ec454efa1a09f29cd18ddd04fe05fc8653a2")}


def streamed_texts(
    dataset: StreamedDataset, split: Literal["train", "validation"], report: ReadReport
) -> Iterator[str]:
    """Yield the usable texts of an allowed dataset, in the order in which its host sends them.

    Raises:
        InputError: too many rows are broken.
        RetryableError: the host cannot be reached.
    """
    for row in _open_stream(dataset, split):
        report.rows += 1
        text = checked_text(row.get("text"))
        if isinstance(text, BadRow):
            report.refuse(text)
        else:
            yield text
    report.check()


def _open_stream(dataset: StreamedDataset, split: str) -> Iterable[dict[str, object]]:
    import datasets

    repository, configuration, commit = _STREAMS[dataset]
    try:
        yield from datasets.load_dataset(
            repository, configuration, split=split, streaming=True, revision=commit
        )
    except OSError as exc:
        raise RetryableError(
            f"Cannot reach the host of {dataset}: {exc}. Check the network, or register a file: "
            "`permille corpora add NAME --file FILE`."
        ) from exc

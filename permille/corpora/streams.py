"""Texts of a streamed dataset.

This module is separate from `sources`, because the API imports `sources`, and an import contract keeps
`datasets` out of the API.
"""

from collections.abc import Iterable, Iterator
from typing import Literal

from permille.choices import StreamedDataset
from permille.corpora.sources import BadRow, ReadReport, checked_text
from permille.errors import RetryableError
from permille.hub import hub_failure

# URLs of the files of each dataset. The commit is fixed, because a changed dataset would give another mask.
_STREAMS = {
    StreamedDataset.C4: "hf://datasets/allenai/c4@1588ec454efa1a09f29cd18ddd04fe05fc8653a2/en/c4-{split}.*.json.gz"
}


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

    try:
        # A name such as `allenai/c4` would also match a folder of this name here, or a copy of any commit in
        # the cache of `datasets`. A URL names the hub alone.
        yield from datasets.load_dataset(
            "json", data_files={split: _STREAMS[dataset].format(split=split)}, split=split, streaming=True
        )
    except Exception as exc:  # of `datasets`, or of one of the libraries for HTTP, gzip and JSON below it
        failure = hub_failure(exc, dataset)
        raise RetryableError(
            f"{failure} Or register a file: `permille corpora add NAME --file FILE`.",
            retry_after_s=failure.retry_after_s,
        ) from exc

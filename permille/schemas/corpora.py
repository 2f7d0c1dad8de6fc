"""Corpora: text to measure sensitivity and perplexity on."""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from permille.schemas.fields import Closed, Count, Id, Name, Timestamp
from permille.schemas.models import RelativePath


class StreamedDataset(StrEnum):
    """The streamed datasets that may be used; nothing else is fetched."""

    C4 = "c4"


class StreamedCorpus(Closed):
    """A public dataset, streamed by the worker."""

    kind: Literal["streamed"]
    dataset: StreamedDataset
    split: Literal["train", "validation"] = "train"


class FileCorpus(Closed):
    """A `.jsonl`, `.jsonl.gz` or `.txt` file below the service's corpus root."""

    kind: Literal["file"]
    path: RelativePath


CorpusSource = Annotated[StreamedCorpus | FileCorpus, Field(discriminator="kind")]


class CorpusCreate(Closed):
    """Register a corpus."""

    name: Name = Field(examples=["c4"])
    source: CorpusSource


class Corpus(Closed):
    """A registered corpus. The size is null for a streamed one."""

    id: Id
    name: Name
    source: CorpusSource
    size_bytes: Count | None
    created_at: Timestamp

"""Inputs that operators register: base models, and corpora for sensitivity and perplexity.

A model is a folder or a GGUF file below the configured root, or a hub repository pinned to a
commit.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, StringConstraints

from permille.choices import StreamedDataset
from permille.schemas.fields import PATH_PATTERN, Closed, Count, Examples, Id, Name, Timestamp

RelativePath = Annotated[
    str,
    StringConstraints(
        min_length=1,
        max_length=400,
        pattern=PATH_PATTERN,
    ),
    Field(description="path below the configured root, with `/` between parts", examples=["stories260K"]),
]

# `permille.models.sources` checks the name again before it becomes the name of a folder.
REPOSITORY_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}$"
# Only a full SHA-1 hash is accepted, since a branch or a tag could move.
COMMIT_PATTERN = r"^[0-9a-f]{40}$"


class FolderModel(Closed):
    """A folder below the service's model root, in the form that `transformers` saves."""

    kind: Literal["folder"]
    path: RelativePath


class HubModel(Closed):
    """A hub repository at one commit. The worker downloads it, and never executes anything in it."""

    kind: Literal["hub"]
    repository: Annotated[
        str,
        StringConstraints(pattern=REPOSITORY_PATTERN),
        Field(examples=["TinyLlama/TinyLlama-1.1B-Chat-v1.0"]),
    ]
    commit: Annotated[
        str,
        StringConstraints(pattern=COMMIT_PATTERN),
        Field(
            description="full commit hash, which pins the model",
            examples=["0123456789abcdef" * 2 + "01234567"],
        ),
    ]


class GgufModel(Closed):
    """A GGUF file below the service's model root. The first job converts it."""

    # The file itself is not changed. Its conversion lies below the model root.
    kind: Literal["gguf"]
    path: RelativePath


class SparsifiedModel(Closed):
    """The model of a sparsification. Its folder is below the model root, and has the digest as its name."""

    kind: Literal["sparsified"]
    sparsification_id: Id


ModelSource = Annotated[FolderModel | HubModel | GgufModel, Field(discriminator="kind")]


class ModelCreate(Closed):
    """Register a base model."""

    examples: ClassVar[Examples] = {
        "a folder": {"name": "tiny", "source": {"kind": "folder", "path": "stories260K"}},
        "a GGUF file": {"name": "tiny", "source": {"kind": "gguf", "path": "stories260K.gguf"}},
        "a hub repository at a commit": {
            "name": "tiny-llama",
            "source": {
                "kind": "hub",
                "repository": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
                "commit": "0123456789abcdef0123456789abcdef01234567",
            },
        },
    }

    name: Name
    source: ModelSource


class Model(Closed):
    """A registered base model. Family and sizes of a hub model are null until a worker has read it."""

    id: Id
    name: Name
    source: Annotated[FolderModel | HubModel | GgufModel | SparsifiedModel, Field(discriminator="kind")]
    # The API does not open files of the hub. The first job reads them and fills in these fields.
    family: str | None = Field(examples=["llama"])
    parameters: Count | None
    scoped_parameters: Count | None = Field(
        description="weights of the linear layers inside the decoder layers"
    )
    size_bytes: Count | None = Field(description="bytes of the weights in the folder, or of the GGUF file")
    created_at: Timestamp


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

    examples: ClassVar[Examples] = {
        "C4, streamed by the workers": {"name": "c4", "source": {"kind": "streamed", "dataset": "c4"}},
        "a file": {"name": "stories", "source": {"kind": "file", "path": "stories.jsonl"}},
    }

    name: Name = Field(examples=["c4"])
    source: CorpusSource


class Corpus(Closed):
    """A registered corpus. The size of a streamed corpus is null."""

    id: Id
    name: Name
    source: CorpusSource
    size_bytes: Count | None
    created_at: Timestamp

"""From a model to a package: `load_model`, `sensitivity_mask`, `build_package`.

They compose the library as the service's jobs do, for a program or a notebook of one person. Their names are
at the top level: `permille.load_model`.
"""

import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from permille.choices import Embeddings, MaskMethod, choice_of
from permille.errors import InputError
from permille.models.checkpoint import Checkpoint
from permille.models.gguf.folder import model_folder
from permille.models.sources import HubRef, resolve_model
from permille.package.blobs import BlobFolder
from permille.package.build import ChosenAdapter, ChosenMask, pack_model, write_manifest
from permille.package.reader import Package
from permille.quantization.types import Scheme

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CACHE = Path("~/.cache/permille")
"""Where GGUF files are converted to, and models of the hub are downloaded to."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model on this machine, as a folder of transformers.

    Attributes:
        folder: holds `config.json`, safetensors, `tokenizer.json`. Nothing in it is executed.
    """

    folder: Path
    _kept: Any = field(default=None, repr=False)  # a temporary folder lives as long as its model

    def to_transformers(self) -> "PreTrainedModel":
        """Open the model in transformers, in float32 and eval mode.

        Raises:
            InputError: the tensors do not fit the model that `config.json` describes.
        """
        from permille.models import loading

        return loading.load_model(self.folder)


def load_model(
    source: "str | Path | PreTrainedModel",
    tokenizer: Any = None,
    *,
    commit: str | None = None,
    cache: str | Path = CACHE,
) -> Model:
    """Open a model: a folder, a GGUF file, a repository of the hub, or a model of transformers in memory.

        load_model("model.gguf")
        load_model("~/models/SmolLM2-135M-Instruct")
        load_model("HuggingFaceTB/SmolLM2-135M-Instruct", commit="<40 hex digits>")
        load_model(AutoModelForCausalLM.from_pretrained(...), AutoTokenizer.from_pretrained(...))

    Args:
        source: the model.
        tokenizer: of a model in memory, as transformers has it. The other sources bring their own.
        commit: of a repository, in full: neither code nor a moved branch can come in.
        cache: a folder for what is converted or downloaded.

    Raises:
        InputError: no such model, or one that cannot be read; the message says why.
        RetryableError: the hub cannot be reached.
    """
    root = Path(cache).expanduser()
    if not isinstance(source, str | Path):
        return _saved(source, tokenizer)
    if tokenizer is not None:
        raise InputError("A folder or file brings its own tokenizer. Leave `tokenizer` out.")
    if commit is not None:
        return Model(resolve_model(HubRef(repository=str(source), commit=commit), root))
    path = Path(source).expanduser()
    if path.is_dir():
        Checkpoint(path)
        return Model(path)
    if path.is_file():
        return Model(model_folder(path, root))
    raise InputError(
        f"There is no folder or file {path}. To load a repository of the hub, name its `commit`, too."
    )


def sensitivity_mask(
    model: Model,
    texts: Iterable[str],
    *,
    density: float = 0.001,
    sequences: int = 32,
    tokens: int = 256,
    seed: int = 0,
) -> ChosenMask:
    """Choose the weights to train: the largest of the empirical Fisher diagonal on public text.

        mask = sensitivity_mask(model, texts, density=0.001)
        sum(len(indices) for indices in mask.indices.values())   # weights that training may change

    The score of a weight is the mean of its squared gradient over sequences ("Zeroth-order fine-tuning of
    LLMs with extreme sparsity", section 3). Only linear layers are scored.

    Args:
        model: as `load_model` opens it.
        texts: public text, not the user's: at least `sequences * tokens` tokens.
        density: share of the weights of each linear layer, above 0 and at most 1.
        sequences: how many are scored.
        tokens: of each sequence.
        seed: decides which sequences of the text are taken.

    Raises:
        InputError: too little text, or a number out of range.
    """
    from permille.corpora.sequences import token_sequences
    from permille.models import loading
    from permille.sensitivity.fisher import fisher_scores
    from permille.sensitivity.masks import select_mask

    sequences_NT = token_sequences(
        loading.FileTokenizer(model.folder), _checked(texts), sequences, tokens, seed
    )
    scores = fisher_scores(loading.load_model(model.folder), sequences_NT)
    return ChosenMask(
        indices=select_mask(scores, MaskMethod.FISHER, density), method=MaskMethod.FISHER, density=density
    )


def build_package(
    model: Model,
    trained: ChosenMask | ChosenAdapter,
    folder: str | Path,
    *,
    texts: Iterable[str] | None = None,
    scheme: Scheme | str = Scheme.NF4,
    embeddings: Embeddings | str = Embeddings.Q8_0,
) -> Package:
    """Quantize a model and write what a device needs: a package, below a folder.

        package = build_package(model, mask, "packages", texts=public_texts)
        package.digest, package.k, package.size_bytes

    The same inputs give the same digest. A package can be opened again by
    `Package.open(BlobFolder(folder), digest)`.

    Args:
        model: as `load_model` opens it.
        trained: what training changes, a mask or an adapter.
        folder: of packages; made where it is missing.
        texts: public text for the reference, which keeps a personal model close to the base on general text.
            A chat model has a reference without it, of questions alone.
        scheme: how linear weights are stored: "nf4", "int4", "int8", ...
        embeddings: how the embedding and the head are stored: "q8_0" or "source".

    Raises:
        InputError: the model is of a family that is not known, or the scheme does not fit it.
        OSError: as the file system reports it.
    """
    blobs = BlobFolder(Path(folder).expanduser())
    blobs.root.mkdir(parents=True, exist_ok=True)
    digest = pack_model(
        blobs,
        Checkpoint(model.folder),
        trained,
        choice_of(Scheme, scheme, "a scheme"),
        embeddings=choice_of(Embeddings, embeddings, "embeddings"),
    )
    return _with_reference(Package.open(blobs, digest), model, texts)


def _with_reference(package: Package, model: Model, texts: Iterable[str] | None) -> Package:
    import numpy as np

    from permille.corpora.sequences import token_sequences
    from permille.models.loading import FileChat, FileTokenizer
    from permille.training.reference import REFERENCE_SEED, TEXT_ROWS, TEXT_TOKENS, make_reference

    chat = FileChat.find(model.folder)
    text_NT = np.empty((0, TEXT_TOKENS), np.int64)
    if texts is not None:
        length = min(TEXT_TOKENS, int(package.config.get("max_position_embeddings") or TEXT_TOKENS))
        tokenizer = FileTokenizer(model.folder)
        text_NT = token_sequences(tokenizer, _checked(texts), TEXT_ROWS, length, REFERENCE_SEED)
    if chat is None and texts is None:
        return package
    manifest = make_reference(package, text_NT=text_NT, chat=chat, made={})
    return Package.open(package.blobs, write_manifest(package.blobs, manifest))


def _saved(model: Any, tokenizer: Any) -> Model:
    if not hasattr(model, "save_pretrained"):
        raise InputError(f"Give a path or a model of transformers, not {type(model).__name__}.")
    if not hasattr(tokenizer, "save_pretrained"):
        raise InputError("A model in memory needs its tokenizer: load_model(model, tokenizer).")
    kept = tempfile.TemporaryDirectory(prefix="permille-model-")
    for part in (model, tokenizer):
        part.save_pretrained(kept.name)
    Checkpoint(Path(kept.name))
    return Model(Path(kept.name), kept)


def _checked(texts: Iterable[str]) -> Iterator[str]:
    """Refuse what a list of texts is often mistaken for."""
    if isinstance(texts, str):
        raise InputError("Give a list of texts, not one text: [text].")
    for text in texts:
        if not isinstance(text, str):
            raise InputError(f"A text must be a string, not {type(text).__name__}.")
        yield text

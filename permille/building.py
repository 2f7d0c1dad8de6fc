"""Three calls from a model to a package: `load_model`, `sensitivity_mask`, `build_package`.

    model = permille.load_model("model.gguf")
    mask = permille.sensitivity_mask(model, public_texts)
    package = permille.build_package(model, mask, "packages", texts=public_texts)

The calls take the steps of `permille.pipeline`, as the service's jobs do, but in one process. Import
them from `permille`.
"""

import tempfile
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from permille.choices import Embeddings, choice_of
from permille.errors import InputError
from permille.models.checkpoint import Checkpoint
from permille.models.conversion import modern_folder
from permille.models.gguf.folder import model_folder
from permille.models.settings import within_positions
from permille.models.sources import download_model
from permille.package.blobs import BlobFolder
from permille.package.build import ChosenAdapter, ChosenMask, coded_tensors, write_weights
from permille.package.manifest import Quantization
from permille.package.reader import Package
from permille.pipeline.draw import Corpus, Sampling
from permille.pipeline.pack import pack, reference_sampling
from permille.quantization import default_group_size
from permille.quantization.types import Scheme

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CACHE = Path("~/.cache/permille")
"""The default folder for converted GGUF files and for downloads from the hub."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model on this machine, in a transformers folder.

    Attributes:
        folder: a folder with `config.json`, safetensors and `tokenizer.json`. Its code is never
            executed.
    """

    folder: Path
    _kept: Any = field(default=None, repr=False)  # keeps a temporary folder as long as this object exists

    def __post_init__(self) -> None:
        """Try the chat template, whose faults would show only after minutes of work.

        Raises:
            InputError: the template does not work.
        """
        from permille.models.loading import FileChat

        FileChat.find(self.folder)

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
    """Open a model from a folder, a GGUF file, a hub repository, or a transformers model in memory.

        load_model("model.gguf")
        load_model("~/models/SmolLM2-135M-Instruct")
        load_model("HuggingFaceTB/SmolLM2-135M-Instruct", commit="<40 hex digits>")
        load_model(AutoModelForCausalLM.from_pretrained(...), AutoTokenizer.from_pretrained(...))

    Args:
        source: the model.
        tokenizer: the transformers tokenizer of a model in memory. Other sources contain theirs.
        commit: the full commit hash of a hub repository. It fixes the files that are loaded.
        cache: the folder for converted and downloaded models.

    Raises:
        InputError: the model does not exist or cannot be read. The message says why.
        RetryableError: the hub cannot be reached.
    """
    root = Path(cache).expanduser()
    if not isinstance(source, str | Path):
        return _saved(source, tokenizer)
    if tokenizer is not None:
        raise InputError("A folder or file brings its own tokenizer. Leave `tokenizer` out.")
    if commit is not None:
        return Model(modern_folder(download_model(str(source), commit, root), root))
    path = Path(source).expanduser()
    if path.is_dir():
        found = modern_folder(path, root)
        Checkpoint(found)  # raises if the folder holds no valid model
        return Model(found)
    if path.is_file():
        return Model(model_folder(path, root))
    raise InputError(
        f"There is no folder or file {path}. To load a repository of the hub, give its `commit`, too."
    )


def sensitivity_mask(
    model: Model,
    texts: Iterable[str],
    *,
    density: float = 0.001,
    sequences: int = 32,
    length: int = 256,
    seed: int = 0,
) -> ChosenMask:
    """Choose the weights to train: those with the largest empirical Fisher scores on public text.

        mask = sensitivity_mask(model, texts, density=0.001)
        sum(len(indices) for indices in mask.indices.values())   # weights that training may change

    The score of a weight is the mean of its squared gradient over sequences ("Zeroth-order
    fine-tuning of LLMs with extreme sparsity", section 3). Only linear layers are scored. Weights
    that are 0 are not chosen. A warning says when the model reads the text unusually badly.

    Args:
        model: a model from `load_model`.
        texts: public text, not the user's, with at least `sequences * length` tokens.
        density: the share of weights to choose in each linear layer, above 0 and at most 1.
        sequences: the number of sequences to score.
        length: the tokens of each sequence, but at most as many as the model has positions.
        seed: the seed of the choice of sequences.

    Raises:
        InputError: the text is too short, or a number is out of range.
    """
    _check_model(model)
    from permille.models.loading import FileTokenizer
    from permille.pipeline.score import Scoring
    from permille.pipeline.select import MaskChoice, select
    from permille.sensitivity.masks import count

    count(density, 1)  # refuses a wrong density before scoring, which takes minutes
    checkpoint = Checkpoint(model.folder)
    length = within_positions(checkpoint.config, length)
    sampling = Sampling(number=sequences, length=length, seed=seed)
    drawn = _corpus(texts).draw(FileTokenizer(model.folder), sampling)
    scoring = Scoring(checkpoint=checkpoint, drawn=drawn)
    for remark in scoring.base()["remarks"]:
        warnings.warn(remark, stacklevel=2)
    return select(checkpoint, MaskChoice(density=density), scoring.scores())


def build_package(
    model: Model,
    trained: ChosenMask | ChosenAdapter,
    folder: str | Path,
    *,
    texts: Iterable[str] | None = None,
    scheme: Scheme | str = Scheme.NF4,
    embeddings: Embeddings | str = Embeddings.Q8_0,
) -> Package:
    """Quantize a model and write it with its mask as a package.

        package = build_package(model, mask, "packages", texts=public_texts)
        package.digest, package.k, package.size_bytes

    The same inputs give the same digest. Use `Package.open(BlobFolder(folder), digest)` to open a
    package again.

    Args:
        model: a model from `load_model`.
        trained: the mask or adapter that training changes.
        folder: the folder of packages. It is created if it is missing.
        texts: public text for the reference, which keeps a personal model close to the base on
            general text. Without it, a chat model gets a reference of questions only, and other
            models get none.
        scheme: the storage of linear weights: "nf4", "int4" or "int8".
        embeddings: the storage of the embedding and the head: "q8_0" or "source".

    Raises:
        InputError: the model's family is not supported, the scheme does not fit the model, or the
            text is too short.
        OSError: a file cannot be written.
    """
    _check_model(model)
    if not isinstance(trained, ChosenMask | ChosenAdapter):
        raise InputError(f"Pass a mask from `permille.sensitivity_mask`, not {type(trained).__name__}.")
    if Path(folder).expanduser().is_file():
        raise InputError(f"{folder} is a file. Name a folder.")
    scheme = choice_of(Scheme, scheme, "a scheme")
    embeddings = choice_of(Embeddings, embeddings, "embeddings")
    checkpoint = Checkpoint(model.folder)
    # Read the texts first, because quantizing a large model takes minutes.
    text = None
    if texts is not None:
        from permille.models.loading import FileTokenizer

        text = _corpus(texts).draw(FileTokenizer(model.folder), reference_sampling(checkpoint.config))
    blobs = BlobFolder(Path(folder).expanduser())
    blobs.root.mkdir(parents=True, exist_ok=True)
    how = Quantization(name=scheme, group_size=default_group_size(scheme))
    layers = write_weights(blobs, checkpoint, coded_tensors(checkpoint, how), how, embeddings)
    return pack(blobs, checkpoint, trained, layers, how, text=text)


def _saved(model: Any, tokenizer: Any) -> Model:
    if not hasattr(model, "save_pretrained"):
        raise InputError(f"Pass a path or a model of transformers, not {type(model).__name__}.")
    if not hasattr(tokenizer, "save_pretrained"):
        raise InputError("A model in memory needs its tokenizer: load_model(model, tokenizer).")
    # The folder is removed together with the returned model.
    kept = tempfile.TemporaryDirectory(prefix="permille-model-")
    for part in (model, tokenizer):
        part.save_pretrained(kept.name)
    # Refuse an unsupported model now, not after minutes of scoring.
    Checkpoint(Path(kept.name))
    return Model(Path(kept.name), kept)


def _check_model(model: Model) -> None:
    if not isinstance(model, Model):
        raise InputError(f"Pass a model from `permille.load_model`, not {type(model).__name__}.")


def _corpus(texts: Iterable[str]) -> Corpus:
    return Corpus(texts=lambda _: _checked(texts))


def _checked(texts: Iterable[str]) -> Iterator[str]:
    """Refuse a single string in place of a list, and items that are not strings."""
    # A string is iterable, too, and would be read letter by letter.
    if isinstance(texts, str):
        raise InputError("Give a list of texts, not one text: [text].")
    for text in texts:
        if not isinstance(text, str):
            raise InputError(f"A text must be a string, not {type(text).__name__}.")
        yield text

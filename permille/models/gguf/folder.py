"""Conversion of a GGUF file to a transformers model folder, named by the file's digest.

    folder = model_folder(Path("model.gguf"), Path("models"))

Tensors are converted one at a time, so the model need not fit into memory. A failed conversion
leaves no folder.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from permille.digests import digest_of_file
from permille.errors import InputError
from permille.files import made_once
from permille.models.checkpoint import CONFIG_FILE, WEIGHTS_FILE, Checkpoint
from permille.models.gguf.config import GgufModel, read_model
from permille.models.gguf.file import GgufFile
from permille.models.gguf.tokenizer import chat_template, tokenizer_files
from permille.tensors import write_float32

FOLDERS = "gguf"
"""The folder below the model root that holds converted files."""


def model_folder(path: Path, root: Path) -> Path:
    """Convert a file to a folder below `root`, or return the folder of an earlier conversion.

    Raises:
        InputError: the file is malformed, has an unsupported family or type, or holds numbers that
            are not finite.
        OSError: a file cannot be read or written. No folder is left.
    """
    digest = digest_of_file(path).removeprefix("sha256:")
    return made_once(root / FOLDERS / digest, lambda temporary: convert(path, temporary))


def convert(path: Path, folder: Path) -> None:
    """Write the files of a model folder.

    Args:
        path: the GGUF file.
        folder: an existing, empty folder.

    Raises:
        InputError, OSError: as for `model_folder`.
    """
    model = read_model(GgufFile(path))
    write_texts(model, folder)
    write_float32(folder / WEIGHTS_FILE, shapes_of(model), (finite(model, name) for name in model.names))
    # Refuse an invalid folder now, before it gets its final name.
    Checkpoint(folder)


def write_texts(model: GgufModel, folder: Path) -> None:
    """Write the config, the tokenizer and the chat template of a model. Errors are those of `convert`."""
    documents: dict[str, Any] = {CONFIG_FILE: model.config, **tokenizer_files(model.file)}
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document, ensure_ascii=False), encoding="utf-8")
    if (template := chat_template(model.file)) is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def shapes_of(model: GgufModel) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's tensors by canonical name."""
    return {name: tuple(model.file.tensors[stored].shape) for name, stored in model.names.items()}


def finite(model: GgufModel, name: str) -> NDArray[np.float32]:
    """Return a tensor by its canonical name. Raises InputError if a number is not finite."""
    found = np.ascontiguousarray(model.float32(name), dtype="<f4")
    # Damage in a scale turns a whole block into NaN or infinity.
    if not np.isfinite(found).all():
        raise InputError(f"{model.file.name} has numbers in {model.names[name]!r} that are not finite.")
    return found

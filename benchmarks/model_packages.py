"""Packages of real models for benchmarks: a transformers folder, scored on public text, written by the
library."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from permille.models.loading import load_model
from permille.package.limits import FILE_NAMES
from permille.package.reader import Package
from permille.quantization import Scheme
from permille.sensitivity.fisher import fisher_scores
from permille.sensitivity.masks import MaskMethod, select_mask
from tests.packages import write_package


def package_of_model(
    folder: Path, blobs: Path, corpus: Path, *, density: float, sequences: int = 64, length: int = 128
) -> Package:
    """The NF4 package of the model in `folder`, with the mask that Fisher scores on `corpus` select.

    Args:
        folder: a transformers folder with safetensors.
        blobs: the blob folder to write into.
        corpus: JSON lines with `text`.
        density: share of the weights that is masked.
        sequences: how many sequences are scored.
        length: their tokens.
    """
    model = load_model(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    scores = fisher_scores(model, _sequences(tokenizer, corpus, sequences, length))
    mask = select_mask(scores, MaskMethod.FISHER, density)
    config = json.loads((folder / "config.json").read_text())
    weights = {
        name: np.array(weight.detach().numpy(), dtype=np.float32) for name, weight in model.named_parameters()
    }
    names = sorted(FILE_NAMES - {"config.json"})
    files = {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}
    return write_package(blobs, config, weights, mask, files, scheme=Scheme.NF4, method="fisher")


def _sequences(tokenizer: Tokenizer, corpus: Path, count: int, length: int) -> NDArray[np.int64]:
    found = []
    for text in _texts(corpus):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        found += [ids[start : start + length] for start in range(0, len(ids) - length + 1, length)]
        if len(found) >= count:
            break
    return np.array(found[:count], dtype=np.int64)


def _texts(corpus: Path) -> Iterator[str]:
    with corpus.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)["text"]

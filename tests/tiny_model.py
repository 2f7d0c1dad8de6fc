"""A model folder as `transformers` saves it, and a corpus file: tiny, random, made on the spot."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from safetensors.torch import load_file as load_tensors
from safetensors.torch import save_file as save_tensors

from permille.models.families import expected_tensors
from tests.packages import TINY_LLAMA, sentences, tiny_tokenizer


def write_model(folder: Path, *, config: Mapping[str, Any] | None = None, seed: int = 0) -> Path:
    """A random model of `config` (default `TINY_LLAMA`) with its tokenizer."""
    chosen = dict(config or TINY_LLAMA)
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.Generator(np.random.PCG64(seed))
    tensors = {
        name: (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)
        for name, shape in expected_tensors(chosen).items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(chosen))
    tiny_tokenizer(chosen["vocab_size"]).save(str(folder / "tokenizer.json"))
    tokenizer_config = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return folder


def write_corpus(path: Path, *, rows: int = 600) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in sentences(rows)))
    return path


def spoil_weights(folder: Path) -> None:
    """Put a weight that is no number into a model, of whatever type its weights are."""
    weights = load_tensors(folder / "model.safetensors")
    next(iter(weights.values())).view(-1)[0] = math.nan
    save_tensors(weights, folder / "model.safetensors", {"format": "pt"})

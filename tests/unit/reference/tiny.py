"""A corpus of random words for training tests: learnable in a few steps, prepared in no time."""

import json
from pathlib import Path

import numpy as np

from permille_lab.reference.model import Shape
from permille_lab.reference.train import Recipe

SHAPE = Shape(vocabulary=64, hidden=16, intermediate=24, layers=2, heads=2, kv_heads=1)
RECIPE = Recipe(context=12, batch=4, micro=2, warmup=2)


def write_corpus(folder: Path) -> Path:
    """Streams of a chain in which each token has two likely successors."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name, size in (("first", 900), ("second", 500), ("validation", 300)):
        tokens = np.zeros(size, dtype=np.uint16)
        for place in range(1, size):
            tokens[place] = (tokens[place - 1] * 5 + rng.integers(1, 3)) % 64
        np.save(folder / f"{name}.npy", tokens)
    manifest = {"mixture": {"first": 0.7, "second": 0.3}, "tokens": {}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer/tokenizer.json").write_text("{}")
    return folder

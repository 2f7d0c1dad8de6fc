"""Measure the bytes, loss and time of a model in each base: `make bench-quantizers`.

    PERMILLE_MODELS=DIR PERMILLE_DATA=DIR python -m permille_lab.quantization

    perplexity = exp(loss)        bits per byte = loss / ln 2 * tokens / bytes

`loss` is the mean over all predictions, in nats per token. Tokens and bytes are those of the whole text, so
that models with different vocabularies can be compared. auto-round calibrates on windows of C4, or of
TinyStories for the model that was trained on these. If the same text is also measured, its measured windows
begin after the calibration text. `speed` measures the bytes and the speed of packages. Finished cells are not
measured again.
"""

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from permille.corpora.sequences import POOL, token_sequences
from permille.models.loading import FileTokenizer
from permille.quantization.perplexity import perplexity
from permille.quantization.rounding import ITERATIONS
from permille_lab.evaluate.specification import Base
from permille_lab.measuring.cells import Cells, Result, Settings, settings_parser
from permille_lab.measuring.machine import machine
from permille_lab.measuring.model_packages import Sources, sources_from_environment
from permille_lab.models import storage
from permille_lab.quantization import speed

FIGURE = "quantizers"
SEQUENCES, LENGTH = 64, 128
"""Number and length of the calibration sequences."""
WINDOW = 256
"""Number of tokens of a held-out window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, its calibration text, and the texts that measure it."""

    model: str
    windows: int
    calibration: str
    held_out: tuple[str, ...]


CASES = (
    Case(
        model="stories260K-hf",
        windows=64,
        calibration="tinystories",
        held_out=("tinystories", "wikitext-2"),
    ),
    Case(model="reference-7M", windows=32, calibration="c4", held_out=("wikitext-2", "boolq", "shakespeare")),
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeldOut:
    """Windows of a held-out text for one tokenizer.

    Attributes:
        windows_NT: token ids of the windows.
        tokens_per_byte: tokens per byte of the whole text.
    """

    windows_NT: NDArray[np.int64]
    tokens_per_byte: float


def texts(data: Path, name: str) -> Iterator[str]:
    """Yield the documents of a public text. WikiText-2's test part is one document."""
    files = {
        "wikitext-2": "text/wikitext-2/wiki.test.raw",
        "tinystories": "text/tinystories_2MiB/tinystories_sample.txt",
        "c4": "text/c4_en/c4_sample.jsonl",
        "boolq": "tasks/BoolQ/val.jsonl",
        "shakespeare": "users/shakespeare/tinyshakespeare_by_speaker.jsonl",
    }
    whole = (data / files[name]).read_text(encoding="utf-8")
    if name == "wikitext-2":
        yield whole
    elif name == "tinystories":
        yield from whole.split("<|endoftext|>")
    else:
        for row in map(json.loads, whole.splitlines()):
            yield (
                row["passage"]
                if name == "boolq"
                else row["text"]
                if name == "c4"
                else "\n\n".join(row["text"])
            )


def measure(
    folder: Path,
    base: Base,
    calibration_NT: NDArray[np.int64],
    held_out: Mapping[str, HeldOut],
    *,
    iterations: int = ITERATIONS,
) -> Result:
    """Return the bytes of a model's linears in a base, and the loss of each window of each text.

    Args:
        calibration_NT: token ids for the bases that need calibration text.
        held_out: held-out texts by name.
        iterations: number of auto-round's steps for each decoder layer.

    Raises:
        InputError: `storage.calibrated` refuses, or a loss is not finite.
    """
    decoded = (
        storage.calibrated(folder, base, calibration_NT, iterations=iterations)
        if base in storage.CALIBRATED
        else None
    )
    model: Any = storage.stored(folder, base, None, decoded)
    shapes = [model.get_parameter(name).shape for name in storage.linear_weights(model)]
    size = storage.stored_bytes(base, [(int(rows), int(columns)) for rows, columns in shapes])
    weights = sum(map(prod, shapes))
    return {
        "weights": weights,
        "bytes": size,
        "bits_per_weight": round(8 * size / weights, 4),
        "texts": {
            name: {
                "tokens_per_byte": text.tokens_per_byte,
                "losses": [round(perplexity(model, row_T[None])["loss"], 6) for row_T in text.windows_NT],
            }
            for name, text in held_out.items()
        },
    }


def measured(sources: Sources, case: Case, base: Base) -> Result:
    """Measure one base of a case's model on all its texts."""
    folder = sources.models / case.model
    tokenizer = FileTokenizer(folder)
    begun = time.process_time()
    calibration_NT = token_sequences(
        tokenizer, texts(sources.data, case.calibration), SEQUENCES, LENGTH, seed=0
    )
    past = POOL * SEQUENCES * LENGTH // WINDOW + 1
    found = {}
    for name in case.held_out:
        whole = list(texts(sources.data, name))
        skip = past if name == case.calibration else 0
        tokens = sum(len(tokenizer.encode(text)) for text in whole)
        found[name] = HeldOut(
            windows_NT=token_sequences(tokenizer, whole, case.windows, WINDOW, 1, skip=skip),
            tokens_per_byte=tokens / sum(len(text.encode()) for text in whole),
        )
    result = measure(folder, base, calibration_NT, found)
    return result | {"cpu_seconds": round(time.process_time() - begun, 1), "machine": machine()}


def settings_of(case: Case, base: Base) -> Settings:
    """Return the settings that identify a cell."""
    return {
        "model": case.model,
        "base": base.value,
        "calibration": [case.calibration, SEQUENCES, LENGTH],
        "held_out": [sorted(case.held_out), case.windows, WINDOW],
        "iterations": ITERATIONS if base is Base.AUTO_ROUND_INT4 else None,
    }


def main() -> None:
    """Measure the missing cells."""
    parser = settings_parser(__doc__, FIGURE)
    parser.add_argument("--models", nargs="+", default=[case.model for case in CASES])
    parser.add_argument("--bases", nargs="+", type=Base, default=list(Base))
    options = parser.parse_args()
    sources = sources_from_environment()
    cells = Cells(options.cells)
    for case in CASES:
        for base in options.bases if case.model in options.models else []:
            cells.once(FIGURE, settings_of(case, base), partial(measured, sources, case, base))
        if case.model in options.models:
            settings = {"model": case.model, "step": [speed.SEQUENCES, speed.TOKENS], "rounds": speed.ROUNDS}
            cells.once(
                speed.FIGURE, settings, partial(speed.measure, sources, case.model, options.folder / "models")
            )


if __name__ == "__main__":
    main()

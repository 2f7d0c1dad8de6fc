"""Perplexity of quantized models with the overlay in place: scales made with knowledge of the mask, and
without.

    PERMILLE_MODELS=<folder of model folders> PERMILLE_DATA=<folder of texts> \
        python -m permille_lab.benchmarks.quantization_quality --out docs/results/quantization.md

Every row keeps the masked weights in full precision; what differs is whether they counted for the group's
scale. The difference is paired by sequence, and given with its standard error: below two of them it is
nothing that we know.
"""

import argparse
import json
import math
import os
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from permille.corpora.sequences import token_sequences
from permille.models.checkpoint import Checkpoint
from permille.models.loading import FileTokenizer, load_model
from permille.quantization import Scheme, quantize
from permille.quantization.perplexity import apply_quantized, perplexity
from permille.quantization.report import keep_of
from permille.sensitivity.fisher import fisher_scores
from permille.sensitivity.masks import Mask, MaskMethod, select_mask

SCHEMES = [(Scheme.NF4, 64), (Scheme.INT4, 32), (Scheme.INT4, 128)]
MASKS = [
    (MaskMethod.FISHER, "0.001"),
    (MaskMethod.FISHER, "0.005"),
    (MaskMethod.MAGNITUDE, "0.001"),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, the text that its masks come from, and the text that it is measured on."""

    model: str
    mask_text: str
    held_out: str


CASES = [
    Case(model="stories260K-hf", mask_text="tinystories", held_out="tinystories"),
    Case(model="TinyStories-656K-hf", mask_text="tinystories", held_out="tinystories"),
    Case(model="reference-7M", mask_text="c4", held_out="boolq"),
    Case(model="reference-7M", mask_text="c4", held_out="shakespeare"),
]


def texts(data: Path, name: str) -> Iterator[str]:
    """One of the public texts, document by document."""
    if name == "c4":
        for line in (data / "text/c4_en/c4_sample.jsonl").read_text().splitlines():
            yield json.loads(line)["text"]
    elif name == "boolq":
        for line in (data / "tasks/BoolQ/val.jsonl").read_text().splitlines():
            yield json.loads(line)["passage"]
    elif name == "shakespeare":
        for line in (data / "users/shakespeare/tinyshakespeare_by_speaker.jsonl").read_text().splitlines():
            yield "\n\n".join(json.loads(line)["text"])
    else:
        whole = (data / "text/tinystories_2MiB/tinystories_sample.txt").read_text()
        yield from whole.split("<|endoftext|>")


def losses(model: Any, sequences_NT: NDArray[np.int64]) -> NDArray[np.float64]:
    """Mean loss of each sequence."""
    return np.array([perplexity(model, tokens_T[None])["loss"] for tokens_T in sequences_NT])


class Bench:
    """One case: the model is loaded once, its weights are put back before each measurement."""

    def __init__(self, case: Case, models: Path, data: Path, *, sequences: int, length: int) -> None:
        self.case = case
        folder = models / case.model
        self.model = load_model(folder)
        self.weights = dict(Checkpoint(folder).weights())
        tokenizer = FileTokenizer(folder)
        scored = token_sequences(tokenizer, texts(data, case.mask_text), 100, 128, seed=0)
        # The stream of the held-out text begins after every window that the scores could have seen.
        skip = 100 * 8 * 128 // length + 1 if case.mask_text == case.held_out else 0
        self.held_out_NT = token_sequences(
            tokenizer, texts(data, case.held_out), sequences, length, seed=1, skip=skip
        )
        self.scores = fisher_scores(self.model, scored)
        self.base = losses(self.model, self.held_out_NT)

    def mask(self, method: MaskMethod, density: str) -> Mask:
        """The mask of one setting."""
        source = self.scores if method is MaskMethod.FISHER else self.weights
        return select_mask(source, method, density)

    def quantized_losses(
        self, scheme: Scheme, group_size: int, mask: Mask, *, aware: bool
    ) -> tuple[NDArray[np.float64], float]:
        """Losses by sequence, and the relative error of all weights together."""
        with torch.no_grad():
            for name, w_NK in self.weights.items():
                self.model.get_parameter(name).copy_(torch.from_numpy(np.array(w_NK)))
        quantized = (
            (name, quantize(w_NK, scheme, group_size, keep_of(mask[name], w_NK.shape) if aware else None))
            for name, w_NK in self.weights.items()
        )
        error = apply_quantized(self.model, quantized, mask)["relative_error"]
        return losses(self.model, self.held_out_NT), error


def rows(bench: Bench) -> Iterator[str]:
    """Lines of the case's table."""
    yield (
        "| scheme | mask | perplexity unaware | perplexity aware | aware - unaware, loss (± s.e.)"
        " | error unaware | error aware |"
    )
    yield "|---|---|---|---|---|---|---|"
    for scheme, group_size in SCHEMES:
        for method, density in MASKS:
            mask = bench.mask(method, density)
            unaware, error_unaware = bench.quantized_losses(scheme, group_size, mask, aware=False)
            aware, error_aware = bench.quantized_losses(scheme, group_size, mask, aware=True)
            difference = aware - unaware
            spread = difference.std(ddof=1) / math.sqrt(difference.size)
            yield (
                f"| {scheme} {group_size} | {method} {density} | {math.exp(unaware.mean()):.3f}"
                f" | {math.exp(aware.mean()):.3f} | {difference.mean():+.5f} ± {spread:.5f}"
                f" | {error_unaware:.4f} | {error_aware:.4f} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequences", type=int, default=48)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--out", type=Path, help="write the tables to this file too")
    arguments = parser.parse_args()
    models, data = Path(os.environ["PERMILLE_MODELS"]), Path(os.environ["PERMILLE_DATA"])
    lines = [
        "# Quantization: what the mask is worth to the scales",
        "",
        f"`python -m permille_lab.benchmarks.quantization_quality --sequences {arguments.sequences}"
        f" --length {arguments.length}`, torch {torch.__version__}, {platform.machine()}, one seed.",
        "",
        "Masked weights keep their full precision in every row. *Aware*: they were left out of the group's"
        " scale. Fisher scores from 100 sequences of 128 tokens. Perplexity on held-out text; the difference"
        " is in nats a token, paired by sequence.",
    ]
    for case in CASES:
        started = time.monotonic()
        bench = Bench(case, models, data, sequences=arguments.sequences, length=arguments.length)
        lines += [
            "",
            f"## {case.model} on {case.held_out} (mask from {case.mask_text})",
            "",
            f"Not quantized: perplexity {math.exp(bench.base.mean()):.3f}.",
            "",
            *rows(bench),
        ]
        print(f"{case.model} on {case.held_out}: {time.monotonic() - started:.0f} s", flush=True)
        text = "\n".join(lines) + "\n"
        if arguments.out:
            arguments.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()

"""Every base of a sweep on held-out text: perplexity, bits per byte and bytes.

    PERMILLE_MODELS=DIR PERMILLE_DATA=DIR python -m permille_lab.benchmarks.quantizers --output docs/results

Calibration (SqueezeLLM's squared gradients, auto-round's blocks): windows of C4, or of TinyStories for a
model that knows nothing else. Windows that are measured begin after all that calibration could have drawn.
Writes quantizers.json and quantizers.md; a cell that is done is not made again.
"""

import argparse
import json
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from permille.corpora.sequences import POOL, token_sequences
from permille.models.loading import FileTokenizer
from permille.quantization.rounding import ITERATIONS
from permille_lab.benchmarks.cells import Cells, Result, Settings
from permille_lab.benchmarks.machine import machine
from permille_lab.benchmarks.model_packages import Sources, sources_from_environment
from permille_lab.benchmarks.quantization_quality import texts as public_texts
from permille_lab.benchmarks.settings import FOLDER
from permille_lab.evaluate.quantizers import HeldOut, held_out, markdown, measure
from permille_lab.evaluate.specification import Base

FIGURE = "quantizer"
SEQUENCES, LENGTH = 64, 128
"""Of calibration."""

WINDOW = 256
"""Tokens of each held-out window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, what calibrates it, and what it is measured on, with what must be said of a text."""

    model: str
    windows: int
    calibration: str
    held_out: dict[str, str | None]


CASES = (
    Case(
        model="stories260K-hf",
        windows=64,
        calibration="tinystories",
        held_out={"tinystories": "of the kind it was trained on", "wikitext-2": None},
    ),
    Case(
        model="reference-7M",
        windows=32,
        calibration="c4",
        held_out={
            "wikitext-2": "it was trained on this text",
            "boolq": "held out",
            "shakespeare": "held out",
        },
    ),
)


def texts_of(data: Path, name: str) -> list[str]:
    """A public text, document by document; WikiText-2's test part as one."""
    if name == "wikitext-2":
        return [(data / "text/wikitext-2/wiki.test.raw").read_text(encoding="utf-8")]
    return list(public_texts(data, name))


def measured(sources: Sources, case: Case, base: Base) -> Result:
    """One base of one model on all texts of its case."""
    folder = sources.models / case.model
    tokenizer = FileTokenizer(folder)
    begun = time.process_time()
    calibration_NT = token_sequences(
        tokenizer, texts_of(sources.data, case.calibration), SEQUENCES, LENGTH, seed=0
    )
    past = POOL * SEQUENCES * LENGTH // WINDOW + 1
    found: dict[str, HeldOut] = {
        name: held_out(
            tokenizer,
            texts_of(sources.data, name),
            case.windows,
            WINDOW,
            seed=1,
            skip=past if name == case.calibration else 0,
        )
        for name in case.held_out
    }
    result = measure(folder, base, calibration_NT, found)
    return result | {"cpu_seconds": round(time.process_time() - begun, 1), "machine": machine()}


def settings_of(case: Case, base: Base) -> Settings:
    """What names a cell."""
    return {
        "model": case.model,
        "base": base.value,
        "calibration": [case.calibration, SEQUENCES, LENGTH],
        "held_out": [sorted(case.held_out), case.windows, WINDOW],
        "iterations": ITERATIONS if base in (Base.AUTO_ROUND, Base.AUTO_ROUND_INT4) else None,
    }


def page(cells: Cells) -> str:
    """All models whose 16-bit weights were measured."""
    lines = [
        "# Quantizers: bytes and loss of every base",
        "",
        "Made by `python -m permille_lab.benchmarks.quantizers`; the losses of every window are in `quantizers.json`.",
        f"Windows of {WINDOW} tokens, products in float32, no mask; calibration on {SEQUENCES} windows of "
        f"{LENGTH} tokens.",
        "Bytes are those of the stored codes with their scales or centroids: NF4 and int4 as packages hold",
        "them (float32 scales), SqueezeLLM with 16 float16 centroids a row, auto-round with float16 scales",
        "in groups of 128, auto-round-int4 as int4-g128. Embedding, norms and head are the same 16-bit",
        "numbers in every row but `float32`.",
        "What a mask is worth to the scales is another question: [quantization.md](quantization.md).",
    ]
    for case in CASES:
        records = {
            Base(settings["base"]): result
            for settings, result in cells.of(FIGURE)
            if settings == settings_of(case, Base(settings["base"]))
        }
        if Base.BF16 in records:
            ordered = {base: records[base] for base in Base if base in records}
            notes = {name: note for name, note in case.held_out.items() if note}
            heading = (
                f"## {case.model}, calibrated on {case.calibration}, {case.windows} windows of each text"
            )
            lines += ["", heading, "", markdown(ordered, notes).rstrip("\n")]
            if missing := [base.value for base in Base if base not in records]:
                lines += ["", f"Not measured yet: {', '.join(missing)}; the command goes on there."]
    return "\n".join(lines).rstrip("\n") + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=[case.model for case in CASES])
    parser.add_argument("--bases", nargs="+", type=Base, default=list(Base))
    parser.add_argument("--cells", type=Path, default=FOLDER / "quantizers.jsonl", help="finished cells")
    parser.add_argument("--output", type=Path, help="folder for quantizers.md and .json; default: printed")
    arguments = parser.parse_args()
    sources = sources_from_environment()
    cells = Cells(arguments.cells)
    for case in CASES:
        for base in arguments.bases if case.model in arguments.models else []:
            cells.once(FIGURE, settings_of(case, base), partial(measured, sources, case, base))
    if arguments.output is None:
        sys.stdout.write(page(cells))
        return
    rows = [{"settings": settings, "result": result} for settings, result in cells.of(FIGURE)]
    (arguments.output / "quantizers.json").write_text(json.dumps(rows, indent=1) + "\n")
    (arguments.output / "quantizers.md").write_text(page(cells))


if __name__ == "__main__":
    main()

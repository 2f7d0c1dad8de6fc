"""What each base costs in bytes and in loss: every 4-bit scheme of a model on the same held-out windows.

    perplexity = exp(loss)        bits per byte = loss / ln 2 * tokens / bytes

`loss` is the mean over all predictions in nats a token; tokens and bytes are those of the whole text, so that
models with other vocabularies can be compared. Differences to the 16-bit model are paired by window: what two
schemes have in common, the text, is not in them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from permille.corpora.sequences import Tokenizer, token_sequences
from permille.errors import InputError
from permille.quantization.perplexity import perplexity
from permille.quantization.rounding import ITERATIONS
from permille_lab.evaluate import models, schemes
from permille_lab.evaluate.specification import Base

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeldOut:
    """Windows of a text for one tokenizer.

    Attributes:
        windows_NT: token ids.
        tokens_per_byte: of the whole text.
    """

    windows_NT: NDArray[np.int64]
    tokens_per_byte: float


def held_out(
    tokenizer: Tokenizer, texts: Sequence[str], windows: int, length: int, *, seed: int = 0, skip: int = 0
) -> HeldOut:
    """Windows of some texts.

    Args:
        skip: windows to pass over first: those that calibration could have seen.

    Raises:
        InputError: too little text.
    """
    windows_NT = token_sequences(tokenizer, texts, windows, length, seed, skip=skip)
    tokens = sum(len(tokenizer.encode(text)) for text in texts)
    return HeldOut(windows_NT=windows_NT, tokens_per_byte=tokens / sum(len(text.encode()) for text in texts))


def measure(
    folder: Path,
    base: Base,
    calibration_NT: NDArray[np.int64],
    texts: Mapping[str, HeldOut],
    *,
    iterations: int = ITERATIONS,
) -> Json:
    """Bytes of a model's linear weights under a base, and the loss of each window of each text.

    Args:
        calibration_NT: token ids for the bases that need text.
        texts: held-out text by name.
        iterations: steps of auto-round.

    Raises:
        InputError: as `schemes.calibrated`, or a loss that is not finite.
    """
    decoded = (
        schemes.calibrated(folder, base, calibration_NT, iterations=iterations)
        if base in schemes.CALIBRATED
        else None
    )
    model = models.stored(folder, base, None, decoded)
    stored = schemes.stored_bytes(base, (_shape(model, name) for name in models.linear_weights(model)))
    return {
        "weights": stored.weights,
        "bytes": stored.total,
        "bits_per_weight": round(stored.bits_per_weight, 4),
        "texts": {
            name: {
                "tokens_per_byte": text.tokens_per_byte,
                "losses": [round(perplexity(model, row_T[None])["loss"], 6) for row_T in text.windows_NT],
            }
            for name, text in texts.items()
        },
    }


def markdown(records: Mapping[Base, Json], seen: Mapping[str, str] | None = None) -> str:
    """The table of one model.

    Args:
        records: what `measure` gave; 16-bit weights among them, which the others are compared to.
        seen: what to say beside a text's name, such as that the model was trained on it.

    Raises:
        InputError: no 16-bit record, or one on other texts.
    """
    reference = records.get(Base.BF16)
    if reference is None or any(
        record["texts"].keys() != reference["texts"].keys() for record in records.values()
    ):
        raise InputError("expected the same texts of every base, 16-bit weights among them, got others")
    lines = [
        "| base | bits a weight | MB of linear weights | text | perplexity | bits per byte "
        "| more than 16 bits, nats a token (± s.e.) |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in reference["texts"]:
        note = (seen or {}).get(name)
        label = name if note is None else f"{name} ({note})"
        for base, record in records.items():
            lines.append(
                f"| {base.value} | {record['bits_per_weight']:.2f} | {record['bytes'] / 1e6:.3f} | {label} "
                f"| {_figures(record['texts'][name], reference['texts'][name], base)} |"
            )
    return "\n".join(lines) + "\n"


def _figures(text: Json, reference: Json, base: Base) -> str:
    loss_N = np.array(text["losses"])
    loss = float(loss_N.mean())
    bits = loss / math.log(2) * text["tokens_per_byte"]
    figures = f"{math.exp(loss):.3f} | {bits:.4f}"
    if base is Base.BF16:
        return f"{figures} |"
    difference_N = loss_N - np.array(reference["losses"])
    error = difference_N.std(ddof=1) / math.sqrt(len(difference_N))
    return f"{figures} | {difference_N.mean():+.4f} ± {error:.4f}"


def _shape(model: Any, name: str) -> tuple[int, int]:
    rows, columns = model.get_parameter(name).shape
    return int(rows), int(columns)

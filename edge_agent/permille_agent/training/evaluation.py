"""Losses by document, and whether one model is better than another on the same documents.

Decisions rest on a paired bootstrap (Efron and Tibshirani 1993, chapter 13) over documents: tokens of one
document are not independent, documents nearly are, and pairing removes what the two models share. Losses are
sums of nats per document, so two packages with different tokenizers are compared on the same text in nats (or
bits) per byte.

Shapes: D documents, N targets, K masked weights.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from permille.engines.interface import Engine
from permille.errors import InputError
from permille_agent.text.rows import Row, evaluation_batches

EVALUATION_TOKENS = 2048
RESAMPLES = 10_000
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class DocumentLosses:
    """Of each document: the sum of its targets' losses in nats, its targets, and the bytes they stand for."""

    nats_D: NDArray[np.float64]
    tokens_D: NDArray[np.int64]
    bytes_D: NDArray[np.int64]

    @property
    def per_token(self) -> float:
        """Mean loss of a token, in nats."""
        return float(self.nats_D.sum() / self.tokens_D.sum())

    @property
    def bits_per_byte(self) -> float:
        """Mean loss of a byte, in bits: comparable between tokenizers."""
        return float(self.nats_D.sum() / math.log(2) / self.bytes_D.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """How much lower the second model's loss is, per unit of weight, with its 95% interval.

    Attributes:
        improvement: loss of the first minus loss of the second; positive where the second is better.
        low: lower end of the two-sided 95% interval of the bootstrap.
        high: upper end.
        standard_error: standard deviation of the resampled improvements.
    """

    improvement: float
    low: float
    high: float
    standard_error: float

    def __str__(self) -> str:
        """As the terminal shows it."""
        return f"{self.improvement:.4f} ({self.low:.4f} to {self.high:.4f})"

    @property
    def better(self) -> bool:
        """Whether even the lower end is an improvement. Not finite is not better."""
        return math.isfinite(self.improvement) and self.low > 0.0


def document_losses(
    engine: Engine, values_K: NDArray[np.float32], rows: Sequence[Row], documents: int
) -> DocumentLosses:
    """Losses of `documents` documents, summed in float64 over their rows."""
    nats_D = np.zeros(documents, dtype=np.float64)
    tokens_D = np.zeros(documents, dtype=np.int64)
    bytes_D = np.zeros(documents, dtype=np.int64)
    for part in evaluation_batches(rows, tokens=EVALUATION_TOKENS):
        losses_N = engine.token_losses(values_K, part.batch).astype(np.float64)
        if losses_N.shape != part.document_N.shape:
            raise InputError(f"expected {len(part.document_N)} token losses, got shape {losses_N.shape}")
        np.add.at(nats_D, part.document_N, losses_N)
        np.add.at(tokens_D, part.document_N, 1)
        np.add.at(bytes_D, part.document_N, part.bytes_N)
    return DocumentLosses(nats_D, tokens_D, bytes_D)


def mean_loss(engine: Engine, values_K: NDArray[np.float32], rows: Sequence[Row]) -> float:
    """Mean loss of a target token over all rows; not finite where the forward pass was not."""
    total = 0.0
    tokens = 0
    for part in evaluation_batches(rows, tokens=EVALUATION_TOKENS):
        losses_N = engine.token_losses(values_K, part.batch)
        total += float(losses_N.sum(dtype=np.float64))
        tokens += len(losses_N)
    return total / tokens


def by_group(losses: DocumentLosses, groups: Sequence[str]) -> DocumentLosses:
    """The sums of documents of one group together: documents of one group are not independent."""
    places = {group: place for place, group in enumerate(dict.fromkeys(groups))}
    place_D = np.array([places[group] for group in groups], dtype=np.int64)
    nats_G = np.zeros(len(places), dtype=np.float64)
    tokens_G, bytes_G = np.zeros(len(places), dtype=np.int64), np.zeros(len(places), dtype=np.int64)
    np.add.at(nats_G, place_D, losses.nats_D)
    np.add.at(tokens_G, place_D, losses.tokens_D)
    np.add.at(bytes_G, place_D, losses.bytes_D)
    return DocumentLosses(nats_G, tokens_G, bytes_G)


def paired_bootstrap(
    first_D: NDArray[np.float64],
    second_D: NDArray[np.float64],
    weight_D: NDArray[np.int64],
    *,
    seed: int,
    second_weight_D: NDArray[np.int64] | None = None,
    resamples: int = RESAMPLES,
) -> Comparison:
    """Compare two models by their loss sums over the same documents.

    `improvement = sum_D first / sum_D weight - sum_D second / sum_D second_weight`, and the same for each
    resample of D documents with replacement; the interval is the resamples' 2.5% and 97.5% quantiles, moved
    outwards where documents are few (`_tail`).

    Args:
        first_D: nats of each document under the first model.
        second_D: nats of each document under the second model.
        weight_D: tokens or bytes of each document.
        second_weight_D: those of the second model, where they are others: under another tokenizer, other
            bytes of a document count (the first token of a row is no target).
        seed: of the resampling (PCG64): the same arguments give the same bits with one numpy version.
        resamples: how many.

    Raises:
        InputError: fewer than two documents, or lengths that differ.
    """
    second_weight_D = weight_D if second_weight_D is None else second_weight_D
    if not len(first_D) == len(second_D) == len(weight_D) == len(second_weight_D) >= 2:
        raise InputError(
            "expected the losses of the same two or more documents, "
            f"got {len(first_D)}, {len(second_D)} and {len(weight_D)}"
        )
    improvement = float(first_D.sum() / weight_D.sum() - second_D.sum() / second_weight_D.sum())
    if not math.isfinite(improvement):
        return Comparison(improvement=-math.inf, low=-math.inf, high=math.inf, standard_error=math.inf)
    rng = np.random.Generator(np.random.PCG64(seed))
    count = len(first_D)
    resampled = np.empty(resamples, dtype=np.float64)
    block = max(1, 1_000_000 // count)
    for start in range(0, resamples, block):
        stop = min(start + block, resamples)
        chosen_RD = rng.integers(0, count, size=(stop - start, count))
        resampled[start:stop] = _rates(first_D, weight_D, chosen_RD)
        resampled[start:stop] -= _rates(second_D, second_weight_D, chosen_RD)
    tail = _tail(count)
    low, high = np.quantile(resampled, [tail, 1 - tail])
    return Comparison(
        improvement=improvement, low=float(low), high=float(high), standard_error=float(resampled.std(ddof=1))
    )


def _tail(count: int) -> float:
    """Which quantile of the resamples ends a two-sided 95% interval of `count` documents.

    Plain quantiles of few documents lie too close together: of 8 documents without any difference, they call
    6% better instead of 2.5%. The expanded percentile interval (Hesterberg 2015, "What teachers should know
    about the bootstrap", section 5.3) has the width of Student's t; its quantile is Cornish and Fisher's.
    """
    z, freedom = NormalDist().inv_cdf((1 + CONFIDENCE) / 2), count - 1
    t = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    t += (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    return NormalDist().cdf(-t * math.sqrt(count / freedom))


def _rates(
    nats_D: NDArray[np.float64], weight_D: NDArray[np.int64], chosen_RD: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Loss per unit of weight of each resample, [R]."""
    rates_R: NDArray[np.float64] = nats_D[chosen_RD].sum(axis=1) / np.maximum(
        weight_D[chosen_RD].sum(axis=1), 1
    )
    return rates_R

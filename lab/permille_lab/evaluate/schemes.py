"""Every way in which a base stores its linear weights: what text calibrates, and how many bytes each takes.

Bases that need nothing but the weights are decoded in `models.stored`; those that need text come from
`calibrated`: squared gradients weigh SqueezeLLM's k-means, outputs of blocks judge auto-round's rounding.

Bytes are those of the stored form, not of the simulation: codes, and the tables that decode them. NF4 and
int4 as our packages write them (float32 scales), SqueezeLLM with 16 float16 centroids a row, auto-round with
a float16 scale a group of 128 (its zero point is always 8 and stored nowhere); auto-round-int4 is int4 in
groups of 128 as packages hold it, rounded by auto-round.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from permille.errors import InputError
from permille.quantization import dequantize, rounding
from permille.quantization.types import Scheme, packed_size, scales_shape
from permille.sensitivity.fisher import fisher_scores
from permille_lab.evaluate import codebooks
from permille_lab.evaluate.models import ROUNDED, Decoded, linear_weights, stored
from permille_lab.evaluate.specification import Base

CALIBRATED = frozenset({Base.SQUEEZELLM, Base.AUTO_ROUND, Base.AUTO_ROUND_INT4})
"""Bases that need text."""

_UNQUANTIZED = {Base.FLOAT32: 4, Base.BF16: 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBytes:
    """Bytes of the linear weights in their stored form.

    Attributes:
        codes: the weights themselves.
        tables: scales or centroids.
        weights: how many there are.
    """

    codes: int
    tables: int
    weights: int

    @property
    def total(self) -> int:
        """Codes and tables."""
        return self.codes + self.tables

    @property
    def bits_per_weight(self) -> float:
        """Of codes and tables."""
        return 8 * self.total / self.weights


def calibrated(
    folder: Path, base: Base, sequences_NT: NDArray[np.int64], *, iterations: int = rounding.ITERATIONS
) -> Decoded:
    """What the linear weights of a model decode to under a base that needs text, for `models.stored`.

    Args:
        folder: the model.
        sequences_NT: calibration text, [N, T] token ids.
        iterations: steps for each block; auto-round only.

    Raises:
        InputError: the base needs no text, or its library is not installed.
    """
    model = stored(folder, Base.FLOAT32)
    names = linear_weights(model)
    if base is Base.AUTO_ROUND:
        return rounding.rounded(model, names, sequences_NT, iterations=iterations)
    if base is Base.AUTO_ROUND_INT4:
        layers = rounding.rounded_int4(model, names, sequences_NT, iterations=iterations)
        return {name: dequantize(layer) for name, layer in layers.items()}
    if base is Base.SQUEEZELLM:
        scores = fisher_scores(model, sequences_NT)
        return {
            name: codebooks.row_codebooks(
                model.get_parameter(name).detach().numpy(), scores[name], name=name
            ).decoded()
            for name in names
        }
    raise InputError(f"expected one of {', '.join(sorted(CALIBRATED))}, got {base.value}")


def stored_bytes(base: Base, shapes: Iterable[tuple[int, int]]) -> StoredBytes:
    """Bytes of weights of these shapes under a base."""
    codes = tables = weights = 0
    for shape in shapes:
        weights += prod(shape)
        codes += _UNQUANTIZED[base] * prod(shape) if base in _UNQUANTIZED else packed_size(shape)
        tables += _table_bytes(base, shape)
    return StoredBytes(codes=codes, tables=tables, weights=weights)


def _table_bytes(base: Base, shape: tuple[int, int]) -> int:
    rows, columns = shape
    if base in ROUNDED:
        return 4 * prod(scales_shape(ROUNDED[base][0], shape, ROUNDED[base][1]))
    if base is Base.SQUEEZELLM:
        return 2 * codebooks.CENTROIDS * rows
    if base is Base.AUTO_ROUND_INT4:
        return 4 * prod(scales_shape(Scheme.INT4, shape, rounding.GROUP_SIZE))
    if base is Base.AUTO_ROUND:
        return 2 * rows * -(-columns // rounding.GROUP_SIZE)
    return 0

"""The directions of a step as the header defines them: plain, scaled or learned, of one block or of two.

This is the one definition that estimators, `apply_record`, replay and kernels share (FORMAT 6.3 to 6.7).

Shapes: K = masked weights, Q = queries of a step.
"""

import numpy as np
from numpy.typing import NDArray

from permille.zo.directions import direction
from permille.zo.header import LogHeader
from permille.zo.layers import NO_LAYERS, Basis, DirectionLayers, Exponents
from permille.zo.learned import product, signs

Integers = NDArray[np.signedinteger]
_WEIGHTS = 1 << 14


def directions_of(header: LogHeader, step: int, layers: DirectionLayers = NO_LAYERS) -> Integers:
    """All directions of a step, integers [q, k]: int8 where they are plain, else int32.

    Divided by `header.sigma_at(step)` they have unit variance; none is larger than `header.bound_at(step)`.

    Raises:
        PackageError: `log-binding`: the header needs a layer that is absent or another one.
        InputError: a number does not fit its counter word.
    """
    basis = layers.basis_of(header)
    if basis is not None and step < header.basis_steps:
        z_QK = _learned(header, step, basis)
    else:
        z_QK = _plain(header, step, layers.exponents_of(header))
    for queries, tensors in header.blocks():
        weights = header.weights_of(tensors)
        z_QK[queries, : weights.start] = 0
        z_QK[queries, weights.stop :] = 0
    return z_QK


def _learned(header: LogHeader, step: int, basis: Basis) -> Integers:
    queries = range(header.queries)
    b_QR = signs(seed=header.seed, steps=[step] * header.queries, queries=queries, rank=basis.rank)
    b_RQ = b_QR.T.astype(np.int64)
    z_QK = np.empty((header.queries, header.k), dtype=np.int32)
    for first in range(0, header.k, _WEIGHTS):  # the product is int64: never more than a block of it
        weights = slice(first, first + _WEIGHTS)
        z_QK[:, weights] = product(basis, b_RQ, weights).T
    return z_QK


def _plain(header: LogHeader, step: int, exponents: Exponents | None) -> Integers:
    z_QK = np.empty((header.queries, header.k), dtype=np.int8 if exponents is None else np.int32)
    for query in range(header.queries):
        z_QK[query] = direction(
            seed=header.seed,
            step=step,
            query=query,
            counts=header.counts,
            distribution=header.distribution,
        )
    if exponents is not None:
        z_QK <<= exponents.e_K
    return z_QK

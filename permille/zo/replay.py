"""Replay: from a log's integers to the state, exactly, on every machine and in every order.

`s = sum_t sum_i c[t, i] * z[t, i]` is a sum of integers, so any split of the steps or of the weights gives
the same bits. `z` of n bits is `sum of bits - n/2` (for one bit: twice that), so sums of bits suffice. Scaled
directions share one shift at the end, learned ones one product with the basis; the blocks of a split are
summed apart.

Shapes: T = steps, Q = queries, K = masked weights, D = directions whose coefficient is not 0,
B = generator blocks, P = values with the padding of each tensor's last block.
"""

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from permille.errors import InputError
from permille.zo.bit_sums import bit_sums
from permille.zo.directions import bits_per_value, block_layout
from permille.zo.header import MAX_STEPS, LogHeader
from permille.zo.journal import Journal
from permille.zo.layers import NO_LAYERS, Basis, DirectionLayers
from permille.zo.learned import combined_signs, product
from permille.zo.philox import BLOCK_BITS
from permille.zo.records import check_weight, weight_of_rows

_SPAN_BLOCKS = 4096


def replay(
    header: LogHeader,
    coefficients_TQ: NDArray[np.int64],
    layers: DirectionLayers = NO_LAYERS,
    *,
    start: int = 0,
    block: int = _SPAN_BLOCKS,
    threads: int = 1,
) -> NDArray[np.int64]:
    """State that steps `start`, `start + 1`, ... of a log add up to, int64 [k] (FORMAT 7.5).

    States of parts of a log add up to the state of the whole, whatever the parts and their order.

    Args:
        layers: of the log's package, as far as its header needs them.
        block: generator blocks (of 128 bits) that are summed together; bounds the memory, not the result.
        threads: spans of blocks summed at the same time.

    Raises:
        InputError: the coefficients are not [T, queries] or could leave the exact range (FORMAT 7.3).
        PackageError: `log-binding`: the header needs a layer that is absent or another one.
    """
    layers.check(header)
    _check(header, coefficients_TQ, start)
    learned = max(0, min(len(coefficients_TQ), header.basis_steps - start))
    s_K = np.zeros(header.k, dtype=np.int64)
    for queries, tensors in header.blocks():
        weights = header.weights_of(tensors)
        plain_TQ = coefficients_TQ[learned:, queries]
        if plain_TQ.any():
            s_K[weights] = plain_sums(
                header,
                plain_TQ,
                start=start + learned,
                first_query=queries.start,
                tensors=tensors,
                block=block,
                threads=threads,
            )
    if (exponents := layers.exponents_of(header)) is not None:
        s_K <<= exponents.e_K
    if (basis := layers.basis_of(header)) is not None:
        for queries, tensors in header.blocks():
            weights = header.weights_of(tensors)
            learned_TQ = coefficients_TQ[:learned, queries]
            s_K[weights] += _learned_sums(
                header, basis, learned_TQ, start=start, first_query=queries.start, weights=weights
            )
    return s_K


def plain_sums(
    header: LogHeader,
    coefficients_TQ: NDArray[np.int64],
    *,
    start: int,
    first_query: int,
    tensors: slice,
    block: int,
    threads: int,
) -> NDArray[np.int64]:
    """`sum_t sum_i c[t, i] * z[start + t, first_query + i]`, z of FORMAT 6.3, over consecutive tensors."""
    step_D, query_D = np.nonzero(coefficients_TQ)
    bits = bits_per_value(header.distribution)
    layout = block_layout(header.counts, bits)
    first, stop = layout.starts[tensors.start], layout.starts[tensors.stop]
    block_B, tensor_B = layout.block_B[first:stop], layout.tensor_B[first:stop]
    per_block = BLOCK_BITS // bits
    padded_P = np.empty(len(block_B) * per_block, dtype=np.int64)

    def fill(span: slice) -> None:
        sums = bit_sums(
            seed=header.seed,
            block_B=block_B[span],
            tensor_B=tensor_B[span],
            steps=(step_D + start).tolist(),
            queries=(query_D + first_query).tolist(),
            coefficients=coefficients_TQ[step_D, query_D],
        )
        padded_P[span.start * per_block : span.stop * per_block] = sums.reshape(-1, bits).sum(axis=1)

    with ThreadPoolExecutor(max_workers=threads) as pool:
        list(pool.map(fill, _spans(len(block_B), block, threads)))
    total = int(coefficients_TQ.sum())
    if bits == 1:
        padded_P *= 2
        padded_P -= total
    else:
        padded_P -= bits // 2 * total
    return layout.without_padding(padded_P, bits, tensors)


def replay_journal(
    journal: Journal, layers: DirectionLayers = NO_LAYERS, *, threads: int = 1
) -> NDArray[np.int64]:
    """State after the journal's last record, int64 [k]."""
    rows = [record.coefficients for record in journal.records()]
    coefficients_TQ = np.array(rows, dtype=np.int64).reshape(len(rows), journal.header.queries)
    return replay(journal.header, coefficients_TQ, layers, threads=threads)


def _learned_sums(
    header: LogHeader,
    basis: Basis,
    coefficients_TQ: NDArray[np.int64],
    *,
    start: int,
    first_query: int,
    weights: slice,
) -> NDArray[np.int64]:
    step_D, query_D = np.nonzero(coefficients_TQ)
    a_R = combined_signs(
        seed=header.seed,
        rank=basis.rank,
        steps=step_D + start,
        queries=query_D + first_query,
        c_D=coefficients_TQ[step_D, query_D],
    )
    return product(basis, a_R[:, None], weights)[:, 0]


def _spans(blocks: int, block: int, threads: int) -> list[slice]:
    """Spans of equal size, at most `block` each, as many as keep all threads busy to the end."""
    number = -(-blocks // (block * threads)) * threads
    edges = [blocks * index // number for index in range(number + 1)]
    return [slice(first, last) for first, last in pairwise(edges) if first < last]


def _check(header: LogHeader, coefficients_TQ: NDArray[np.int64], start: int) -> None:
    if coefficients_TQ.ndim != 2 or coefficients_TQ.shape[1] != header.queries:
        raise InputError(f"expected coefficients [T, {header.queries}], got {coefficients_TQ.shape}")
    if not 0 <= start <= MAX_STEPS - len(coefficients_TQ):
        raise InputError(f"expected steps below {MAX_STEPS}, got {len(coefficients_TQ)} from {start}")
    check_weight(weight_of_rows(coefficients_TQ, header, start=start))

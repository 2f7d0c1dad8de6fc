"""Replay: from a log's integers to the state, exactly, on every machine and in every order.

`s = sum_t sum_i c[t, i] * z[t, i]` is a sum of integers, so any split of the steps or of the weights gives
the same bits.

Shapes: T = steps, Q = queries, K = masked weights.
"""

import numpy as np
from numpy.typing import NDArray

from permille.errors import InputError
from permille.zo.directions import direction, largest
from permille.zo.journal import Journal
from permille.zo.lattice import STATE_LIMIT
from permille.zo.records import LogHeader


def replay(header: LogHeader, coefficients_TQ: NDArray[np.int64], *, start: int = 0) -> NDArray[np.int64]:
    """State that steps `start`, `start + 1`, ... of a log add up to, int64 [k].

    Raises:
        InputError: the coefficients are not [T, queries] or could leave the exact range (FORMAT 7.3).
    """
    if coefficients_TQ.ndim != 2 or coefficients_TQ.shape[1] != header.queries:
        raise InputError(f"expected coefficients [T, {header.queries}], got {coefficients_TQ.shape}")
    weight = sum(abs(int(c)) for c in coefficients_TQ.reshape(-1)) * largest(header.distribution)
    if weight > STATE_LIMIT:
        raise InputError(f"expected sum |c| * max |z| within 2**53, got {weight}")
    s_K = np.zeros(header.k, dtype=np.int64)
    for row, coefficients_Q in enumerate(coefficients_TQ.tolist()):
        for query, c in enumerate(coefficients_Q):
            z_K = direction(
                seed=header.seed,
                step=start + row,
                query=query,
                counts=header.counts,
                distribution=header.distribution,
            )
            s_K += c * z_K.astype(np.int64)
    return s_K


def replay_journal(journal: Journal) -> NDArray[np.int64]:
    """State after the journal's last record, int64 [k]."""
    rows = [record.coefficients for record in journal.records()]
    return replay(journal.header, np.array(rows, dtype=np.int64).reshape(len(rows), journal.header.queries))

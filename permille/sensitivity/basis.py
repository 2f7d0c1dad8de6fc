"""Learned directions and powers of two: what a device may be told about its masked weights (numpy only).

- `learn_basis`: the r directions that the gradients of a corpus's sequences share, as small integers. A
  device then perturbs along `z = U b` with random signs `b`: r dimensions to search in place of k. What a
  device can reach in the basis is limited: it serves the first steps. Directions in which gradients are long
  are also those in which the loss curves most, where only short steps are safe: so the weights are divided
  by the root of their mean squared gradient, before and after (`whitening`; natural gradient, diagonal).
  Measured: docs/results/learned_directions.md.
- `captured`: the share of a gradient that lies in the basis, the evidence behind one.

The gradients come from `permille.sensitivity.gradients`, one row [k] a sequence, and may be a mapped file:
they are read in blocks of columns, 32 MiB in float64. Sums are float64. The directions of a singular value
decomposition are not the same to the last bit with every linear algebra library; a basis is named by its
bytes.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from permille.errors import InputError
from permille.package.limits import MAX_BASIS_RANK

LARGEST = 127
WHITENING = -0.5
_LEAST, _MOST = 0.1, 1e3
# The largest number becomes 127 times one of these and is then cut: heavy tails must not round the rest to 0.
_FACTORS = (1, 2, 4, 8, 16, 32)
_FLOATS = 1 << 22  # of a block in float64: 32 MiB
_FEWEST_COLUMNS = 256


def learn_basis(
    gradients_NK: NDArray[np.float32], rank: int, *, power: float = WHITENING
) -> NDArray[np.int8]:
    """The directions that the gradients share, as integers.

        D = diag(whitening(G)),  G D = S s V^T,  U = D V

    V: the first `rank` right singular vectors of the scaled gradients, not centred. All columns are rounded
    in one unit: of the candidates the one that keeps most of their directions. Columns come in falling order
    of what they hold; a column's sign is such that the mean gradient's part along it is not negative.

    Args:
        gradients_NK: [N, k], N at least `rank`; may be mapped.
        rank: 1 to 256.
        power: of `whitening`; 0 leaves the gradients as they are.

    Returns:
        [k, rank] from -127 to 127, no column all 0.

    Raises:
        InputError: too few gradients, gradients that are not finite or span fewer than `rank` directions.
    """
    scaling_K = whitening(gradients_NK, power)
    vectors_NR = _row_vectors(gradients_NK, scaling_K, rank)
    largest = max(float(np.abs(part).max()) for _, part in _columns(gradients_NK, scaling_K, vectors_NR))
    scale = _best_scale(gradients_NK, scaling_K, vectors_NR, LARGEST / largest)
    basis_KR = np.empty((gradients_NK.shape[1], rank), np.int8)
    for start, part in _columns(gradients_NK, scaling_K, vectors_NR):
        basis_KR[start : start + len(part)] = _rounded(part, scale)
    if not basis_KR.any(axis=0).all():
        raise InputError(f"expected {rank} directions that survive rounding, got a column of zeros")
    return basis_KR


def whitening(gradients_NK: NDArray[np.float32], power: float = WHITENING) -> NDArray[np.float64]:
    """The scale of each weight, [k]: `clip(F / median F, 0.1, 1000) ** power`, F_i = (1/N) sum_n g_{n,i}^2.

    A weight with hardly a gradient in few sequences is not known to be safe, hence the lower bound.

    Raises:
        InputError: gradients that are not finite, or all 0.
    """
    squares_K = np.empty(gradients_NK.shape[1])
    for columns in _blocks(squares_K.size, len(gradients_NK)):
        block_NB = gradients_NK[:, columns].astype(np.float64)
        np.square(block_NB, out=block_NB)
        squares_K[columns] = block_NB.mean(axis=0)
    if not np.isfinite(squares_K).all() or not (squares_K > 0).any():
        raise InputError("expected finite gradients that are not all 0, got others")
    typical = float(np.median(squares_K[squares_K > 0]))
    scaling_K: NDArray[np.float64] = np.clip(squares_K / typical, _LEAST, _MOST) ** power
    return scaling_K


def captured(
    basis_KR: NDArray[np.int8], gradients_NK: NDArray[np.float32], scaling_K: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Share of each scaled gradient `D g` that its projection onto the columns of `U / D` has, [N], 0 to 1.

    Of the squared length. A gradient of 0 has share 0. Random columns would have r / k. `scaling_K`: as the
    basis was learned with; ones for the gradients as they are.
    """
    gram_RR = np.zeros((basis_KR.shape[1], basis_KR.shape[1]))
    parts_NR = np.zeros((len(gradients_NK), basis_KR.shape[1]))
    lengths_N = np.zeros(len(gradients_NK))
    for columns in _blocks(len(basis_KR), max(gram_RR.shape[0], len(gradients_NK))):
        block_BR = basis_KR[columns] / scaling_K[columns][:, None]
        block_NB = gradients_NK[:, columns].astype(np.float64)
        block_NB *= scaling_K[columns]
        gram_RR += block_BR.T @ block_BR
        parts_NR += block_NB @ block_BR
        lengths_N += np.square(block_NB, out=block_NB).sum(axis=1)
    solved_RN = np.linalg.lstsq(gram_RR, parts_NR.T, rcond=None)[0]
    held_N = (parts_NR * solved_RN.T).sum(axis=1)
    share_N: NDArray[np.float64] = np.zeros_like(held_N)
    np.divide(held_N, lengths_N, out=share_N, where=lengths_N > 0)
    return share_N.clip(0, 1)


def _row_vectors(
    gradients_NK: NDArray[np.float32], scaling_K: NDArray[np.float64], rank: int
) -> NDArray[np.float64]:
    """[N, r] weights of the rows: `scaled gradients.T @ them` are the singular vectors, of length 1."""
    number = len(gradients_NK)
    if not 1 <= rank <= min(MAX_BASIS_RANK, number):
        most = min(MAX_BASIS_RANK, number)
        raise InputError(f"expected a rank from 1 to {most} of {number} gradients, got {rank}")
    gram_NN = np.zeros((number, number))
    for columns in _blocks(gradients_NK.shape[1], number):
        block_NB = gradients_NK[:, columns].astype(np.float64)
        block_NB *= scaling_K[columns]
        gram_NN += block_NB @ block_NB.T
    values_N, vectors_NN = np.linalg.eigh(gram_NN)
    values_R, vectors_NR = values_N[::-1][:rank], vectors_NN[:, ::-1][:, :rank]
    if values_R[-1] <= values_R[0] * 1e-12:
        raise InputError(f"expected gradients that span {rank} directions, got fewer")
    vectors_NR = vectors_NR / np.sqrt(values_R)
    # The mean gradient's part along a column is the mean over rows of (gram @ vectors).
    return np.asarray(vectors_NR * np.where((gram_NN @ vectors_NR).sum(axis=0) < 0, -1.0, 1.0))


def _columns(
    gradients_NK: NDArray[np.float32], scaling_K: NDArray[np.float64], vectors_NR: NDArray[np.float64]
) -> Iterator[tuple[int, NDArray[np.float64]]]:
    """Blocks of rows of the directions `D V`, [block, r], with the number of their first row."""
    for columns in _blocks(gradients_NK.shape[1], len(gradients_NK)):
        block_NB = gradients_NK[:, columns].astype(np.float64)
        block_NB *= scaling_K[columns] ** 2
        part_BR = block_NB.T @ vectors_NR
        del block_NB  # not held while the caller works on the part
        yield columns.start, part_BR


def block_columns(number: int) -> int:
    """How many columns of `number` gradients are taken into float64 at once."""
    return max(_FEWEST_COLUMNS, _FLOATS // number)


def _blocks(columns: int, number: int) -> Iterator[slice]:
    width = block_columns(number)
    for start in range(0, columns, width):
        yield slice(start, start + width)


def _best_scale(
    gradients_NK: NDArray[np.float32],
    scaling_K: NDArray[np.float64],
    vectors_NR: NDArray[np.float64],
    unit: float,
) -> float:
    """The candidate with the largest mean cosine between columns before and after rounding; the first of
    equal ones."""
    dots_FR = np.zeros((len(_FACTORS), vectors_NR.shape[1]))
    squares_FR = np.zeros_like(dots_FR)
    for _, part in _columns(gradients_NK, scaling_K, vectors_NR):
        for index, factor in enumerate(_FACTORS):
            rounded = _rounded(part, unit * factor).astype(np.float64)
            dots_FR[index] += (rounded * part).sum(axis=0)
            squares_FR[index] += (rounded * rounded).sum(axis=0)
    cosines_FR = np.divide(dots_FR, np.sqrt(squares_FR), out=np.zeros_like(dots_FR), where=squares_FR > 0)
    return unit * _FACTORS[int(np.argmax(cosines_FR.mean(axis=1)))]


def _rounded(part: NDArray[np.float64], scale: float) -> NDArray[np.int8]:
    return np.clip(np.rint(part * scale), -LARGEST, LARGEST).astype(np.int8)

"""A change of sparse weights as low-rank matrices, without error.

The changed weights of a linear are the edges of a bipartite graph of rows and columns. A set of rows and
columns that covers all edges gives B A. For a covered row, A has the row's change and B a unit vector. For a
covered column, A has a unit vector and B the column's change. By König's theorem, the smallest cover has as
many members as the largest matching. So the rank is the smallest that such unit vectors allow.

Each entry of B A is one change times 1 plus zeros, so it is exact.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching

from permille.engines.export import adapter_matrices
from permille.errors import InputError
from permille.package.manifest import TensorInfo
from permille.package.reader import Package


def exact_factors(change_NK: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return A float32 [R, K] and B float32 [N, R] with `B @ A == change_NK`. R is 0 without a change.

    Example:
        >>> change_NK = np.array([[0, 2, 3], [0, 0, 0], [0, 5, 0]], np.float32)
        >>> a_RK, b_NR = exact_factors(change_NK)
        >>> len(a_RK), (b_NR @ a_RK == change_NK).all()
        (2, np.True_)
    """
    row_E, column_E = np.nonzero(change_NK)
    edges = csr_array((np.ones(len(row_E), np.int8), (row_E, column_E)), shape=change_NK.shape)
    column_N = maximum_bipartite_matching(edges, perm_type="column")  # -1 for a row without a partner
    covered_K = np.zeros(change_NK.shape[1], np.bool_)
    reached_N = column_N < 0
    # König: follow changes from rows to columns, and the matching from columns to rows. The columns that this
    # reaches, and the rows that it does not reach, are a smallest cover.
    for _ in row_E:
        covered_K[column_E[reached_N[row_E]]] = True
        reachable_N = reached_N | ((column_N >= 0) & covered_K[column_N])
        if (reachable_N == reached_N).all():
            break
        reached_N = reachable_N
    covered_N = ~reached_N
    rest_NK = change_NK * reached_N[:, None]  # a change in a covered row and a covered column counts once
    a_RK = np.concatenate([change_NK[covered_N], _units(covered_K)])
    return a_RK, np.concatenate([_units(covered_N).T, rest_NK[:, covered_K]], axis=1)


def low_rank_changes(
    package: Package, values_K: NDArray[np.float32]
) -> Iterator[tuple[TensorInfo, NDArray[np.float32], NDArray[np.float32]]]:
    """Yield the tensor, A [R, K] and B [N, R] of each linear that a package's adapter or values change.

    For a mask, B A is the difference between `values_K` and the package's values, rounded to float32 once.

    Raises:
        InputError: no masked weight has changed.
    """
    if package.manifest.adapter is not None:
        yield from adapter_matrices(package, values_K)
        return
    change_K, start = values_K - package.values(), 0
    if not change_K.any():
        raise InputError(
            "This model has the package's own values. There is no change to export as an adapter. Train "
            "first, or leave out --base."
        )
    for info in package.manifest.tensors:
        change_k = change_K[start : start + info.count]
        start += info.count
        if change_k.any():
            change_NK = np.zeros(info.shape, np.float32)
            change_NK.reshape(-1)[package.mask(info.name)] = change_k
            yield info, *exact_factors(change_NK)


def _units(chosen_N: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Return a unit vector float32 [N] for each chosen place."""
    units_RN = np.zeros((chosen_N.sum(), len(chosen_N)), np.float32)
    units_RN[:, chosen_N] = np.eye(len(units_RN), dtype=np.float32)
    return units_RN

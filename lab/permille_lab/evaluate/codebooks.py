"""A code book of 16 values for each row, by k-means that weighs each weight by its squared gradient.

    minimise over c, a:  sum_k F_k * (w_k - c[a_k])^2      (SqueezeLLM, Kim et al. 2023, equations 4 and 5)

`F` is the diagonal of the Fisher information on a corpus. Numbers on a line are sorted, so clusters are
ranges, and dynamic programming finds the best ones. A row of more than `CELLS` weights is first cut into so
many cells, finer where the error would be larger; the best ranges of cells are then settled by Lloyd's
algorithm among the weights themselves (docs/adr/0124).

Centroids are rounded to float16, as they are stored, before weights are given their nearest one. A row whose
squared gradients are all zero is weighed evenly.

# Legend: N, K = rows and columns; C = 16 centroids; M = cells; S = K + 1, P = M + 1 places between them.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from permille.errors import InputError

CENTROIDS = 16
CELLS = 96
_ROWS = 64
_ITERATIONS = 100
_LARGEST = float(np.finfo(np.float16).max)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowCodebooks:
    """A matrix in four bits a weight.

    Attributes:
        codes_NK: uint8, 0 to 15.
        centroids_NC: float16, ascending in each row.
    """

    codes_NK: NDArray[np.uint8]
    centroids_NC: NDArray[np.float16]

    def decoded(self) -> NDArray[np.float32]:
        """What the codes stand for, float32 [N, K]."""
        return np.take_along_axis(
            self.centroids_NC.astype(np.float32), self.codes_NK.astype(np.int64), axis=1
        )


def row_codebooks(w_NK: NDArray[np.float32], fisher_NK: NDArray[np.float32], *, name: str) -> RowCodebooks:
    """Fit 16 centroids to each row and give each weight its nearest one.

    Args:
        fisher_NK: squared gradients, finite and not negative.

    Raises:
        InputError: shapes that disagree, a number that is not finite or does not fit float16, or a negative
            squared gradient.
    """
    if w_NK.ndim != 2 or w_NK.size == 0 or fisher_NK.shape != w_NK.shape:
        raise InputError(
            f"{name}: expected a matrix and its squared gradients, got {w_NK.shape} and {fisher_NK.shape}"
        )
    if not (np.abs(w_NK) <= _LARGEST).all():
        raise InputError(f"{name}: expected weights of at most {_LARGEST:.0f}, got others")
    if not (np.isfinite(fisher_NK).all() and (fisher_NK >= 0).all()):
        raise InputError(f"{name}: expected squared gradients that are finite and not negative, got others")
    codes_NK = np.empty(w_NK.shape, np.uint8)
    centroids_NC = np.empty((len(w_NK), CENTROIDS), np.float16)
    for first in range(0, len(w_NK), _ROWS):
        part = slice(first, first + _ROWS)
        w = torch.from_numpy(w_NK[part].astype(np.float64))
        rows = _Rows(w, torch.from_numpy(fisher_NK[part].astype(np.float64)))
        stored_NC = rows.settled(rows.centroids(_best_ends(rows))).to(torch.float16)
        codes_NK[part] = torch.searchsorted(_middles(stored_NC.double()), w.contiguous()).numpy()
        centroids_NC[part] = stored_NC.numpy()
    return RowCodebooks(codes_NK=codes_NK, centroids_NC=centroids_NC)


class _Rows:
    """Sorted rows with running sums of share, share times value, and share times squared value."""

    def __init__(self, w_NK: Tensor, fisher_NK: Tensor) -> None:
        total_N1 = fisher_NK.sum(dim=1, keepdim=True)
        share_NK = torch.where(total_N1 > 0, fisher_NK / total_N1, torch.ones_like(fisher_NK) / w_NK.shape[1])
        sorted_NK, order_NK = w_NK.sort(dim=1, stable=True)
        self.sorted_NK = sorted_NK.contiguous()
        self.share_NK = share_NK.gather(1, order_NK)
        self.sums = tuple(
            torch.nn.functional.pad((self.share_NK * self.sorted_NK**power).cumsum(dim=1), (1, 0))
            for power in range(3)
        )

    def centroids(self, ends_NE: Tensor) -> Tensor:
        """Means of the ranges; one without share holds the weight at its beginning. Ascending, [N, C]."""
        share_NC, first_NC = (sums.gather(1, ends_NE).diff(dim=1) for sums in self.sums[:2])
        at_NC = ends_NE[:, :-1].clamp(max=self.sorted_NK.shape[1] - 1)
        means_NC = torch.where(share_NC > 0, first_NC / share_NC, self.sorted_NK.gather(1, at_NC))
        return means_NC.sort(dim=1).values

    def settled(self, centroids_NC: Tensor) -> Tensor:
        """Lloyd's algorithm to its end."""
        for _ in range(_ITERATIONS):
            inner = torch.searchsorted(self.sorted_NK, _middles(centroids_NC))
            outer = torch.zeros(len(inner), 1, dtype=inner.dtype)
            moved_NC = self.centroids(torch.cat([outer, inner, outer + self.sorted_NK.shape[1]], dim=1))
            if torch.equal(moved_NC, centroids_NC):
                break
            centroids_NC = moved_NC
        return centroids_NC


def _best_ends(rows: _Rows) -> Tensor:
    """Where 16 ranges of cells begin and end whose squared error is the smallest, [N, C + 1] places."""
    cells_NP = _cells(rows)
    share_NPP, first_NPP, second_NPP = (_between(sums.gather(1, cells_NP)) for sums in rows.sums)
    cost_NPP = second_NPP - torch.where(share_NPP > 0, first_NPP**2 / share_NPP, first_NPP * 0)
    places = cells_NP.shape[1]
    backward = torch.ones(places, places, dtype=torch.bool).tril(-1)
    cost_NPP.clamp_(min=0).masked_fill_(backward, torch.inf)
    best_NP = torch.full(cells_NP.shape, torch.inf, dtype=torch.float64)
    best_NP[:, 0] = 0
    before = []
    for _ in range(CENTROIDS):
        best_NP, chosen_NP = (best_NP[:, :, None] + cost_NPP).min(dim=1)
        before.append(chosen_NP)
    at_N1 = torch.full((len(best_NP), 1), places - 1)
    ends = [at_N1]
    for chosen_NP in reversed(before):
        at_N1 = chosen_NP.gather(1, at_N1)
        ends.append(at_N1)
    return cells_NP.gather(1, torch.cat(ends[::-1], dim=1))


def _cells(rows: _Rows) -> Tensor:
    """Places that cut each row into cells, [N, P]: all of them, or `CELLS` of about equal error.

    A fine quantizer's error is even where the density of its values is that of the weights to the power of
    1/3 (Panter and Dite 1951): between neighbours, share^(1/3) * gap^(2/3).
    """
    count = rows.sorted_NK.shape[1]
    if count <= CELLS:
        return torch.arange(count + 1).expand(len(rows.sorted_NK), -1)
    gap_NK = torch.nn.functional.pad(rows.sorted_NK.diff(dim=1), (1, 0))
    density_NK = (rows.share_NK * gap_NK**2) ** (1 / 3)
    # A small even part keeps cells apart in a row whose gradients sit in a few weights.
    density_NK = density_NK + 0.05 * density_NK.mean(dim=1, keepdim=True) + 1e-300
    running_NK = density_NK.cumsum(dim=1)
    wanted = torch.arange(1, CELLS, dtype=torch.float64) / CELLS
    inner = torch.searchsorted(running_NK, (running_NK[:, -1:] * wanted).contiguous())
    outer = torch.zeros(len(inner), 1, dtype=inner.dtype)
    return torch.cat([outer, inner, outer + count], dim=1)


def _between(sums_NP: Tensor) -> Tensor:
    """[N, P, P]: what lies from the first place to the second."""
    return sums_NP[:, None, :] - sums_NP[:, :, None]


def _middles(centroids_NC: Tensor) -> Tensor:
    return ((centroids_NC[:, :-1] + centroids_NC[:, 1:]) / 2).contiguous()

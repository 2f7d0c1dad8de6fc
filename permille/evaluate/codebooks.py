"""A code book of 16 values for each row, by k-means that weighs each weight by its squared gradient.

    minimise over c, a:  sum_k F_k * (w_k - c[a_k])^2      (SqueezeLLM, Kim et al. 2023, equations 4 and 5)

`F` is the diagonal of the Fisher information on a corpus. Numbers on a line are sorted once; then the
clusters of Lloyd's algorithm are ranges, found by bisection, and their means are differences of running sums:
all rows of a matrix move together. Each row is solved from several beginnings, of which the one with the
smallest error counts (docs/adr/0124).

Centroids are rounded to float16, as they are stored, before weights are given their nearest one. A row whose
squared gradients are all zero is weighed evenly.

# Legend: N, K = rows and columns; C = 16 centroids.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from permille.errors import InputError
from permille.quantization.nf4 import NF4_CODES

CENTROIDS = 16
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
    w = torch.from_numpy(w_NK.astype(np.float64))
    rows = _Rows(w, torch.from_numpy(fisher_NK.astype(np.float64)))
    best_NC, best_N = rows.settled(_BEGINNINGS[0](rows))
    for beginning in _BEGINNINGS[1:]:
        centroids_NC, error_N = rows.settled(beginning(rows))
        better_N = error_N < best_N
        best_NC = torch.where(better_N[:, None], centroids_NC, best_NC)
        best_N = torch.where(better_N, error_N, best_N)
    stored_NC = best_NC.to(torch.float16)
    codes_NK = torch.searchsorted(_middles(stored_NC.double()), w)
    return RowCodebooks(codes_NK=codes_NK.to(torch.uint8).numpy(), centroids_NC=stored_NC.numpy())


class _Rows:
    """Sorted rows with running sums of weight, weight times value, and weight times squared value."""

    def __init__(self, w_NK: Tensor, fisher_NK: Tensor) -> None:
        total_N1 = fisher_NK.sum(dim=1, keepdim=True)
        share_NK = torch.where(total_N1 > 0, fisher_NK / total_N1, torch.ones_like(fisher_NK) / w_NK.shape[1])
        self.sorted_NK, order_NK = w_NK.sort(dim=1, stable=True)
        share_NK = share_NK.gather(1, order_NK)
        self.share_NS = _running(share_NK)
        self.first_NS = _running(share_NK * self.sorted_NK)
        self.second_NS = _running(share_NK * self.sorted_NK**2)

    def settled(self, centroids_NC: Tensor) -> tuple[Tensor, Tensor]:
        """Lloyd's algorithm to its end: ascending centroids, and the weighted squared error of each row."""
        centroids_NC = centroids_NC.sort(dim=1).values
        for _ in range(_ITERATIONS):
            ends_NE = self._ends(centroids_NC)
            share_NC, first_NC = (_pieces(sums, ends_NE) for sums in (self.share_NS, self.first_NS))
            # A cluster without weight keeps its centroid.
            moved_NC = torch.where(share_NC > 0, first_NC / share_NC, centroids_NC).sort(dim=1).values
            if torch.equal(moved_NC, centroids_NC):
                break
            centroids_NC = moved_NC
        ends_NE = self._ends(centroids_NC)
        share_NC, first_NC, second_NC = (
            _pieces(sums, ends_NE) for sums in (self.share_NS, self.first_NS, self.second_NS)
        )
        error_NC = second_NC - 2 * centroids_NC * first_NC + centroids_NC**2 * share_NC
        return centroids_NC, error_NC.sum(dim=1)

    def _ends(self, centroids_NC: Tensor) -> Tensor:
        """Where each cluster begins and ends among the sorted weights, [N, C + 1]."""
        inner = torch.searchsorted(self.sorted_NK, _middles(centroids_NC))
        outer = torch.zeros(len(inner), 1, dtype=inner.dtype)
        return torch.cat([outer, inner, outer + self.sorted_NK.shape[1]], dim=1)


def _even_quantiles(rows: _Rows) -> Tensor:
    """Equal shares of the squared gradients."""
    wanted = (torch.arange(CENTROIDS, dtype=torch.float64) + 0.5) / CENTROIDS
    inside = rows.share_NS[:, 1:].contiguous()
    at = torch.searchsorted(inside, wanted.expand(len(inside), -1).contiguous() * inside[:, -1:])
    return rows.sorted_NK.gather(1, at.clamp(max=rows.sorted_NK.shape[1] - 1))


def _even_steps(rows: _Rows) -> Tensor:
    """Equal steps from the smallest to the largest weight."""
    low_N1, high_N1 = rows.sorted_NK[:, :1], rows.sorted_NK[:, -1:]
    return low_N1 + (high_N1 - low_N1) * (torch.arange(CENTROIDS, dtype=torch.float64) + 0.5) / CENTROIDS


def _normal_codes(rows: _Rows) -> Tensor:
    """NF4's sixteen values, stretched to the largest weight."""
    largest_N1 = torch.maximum(-rows.sorted_NK[:, :1], rows.sorted_NK[:, -1:])
    return largest_N1 * torch.from_numpy(NF4_CODES.astype(np.float64))


_BEGINNINGS: tuple[Callable[[_Rows], Tensor], ...] = (_even_quantiles, _even_steps, _normal_codes)


def _running(x_NK: Tensor) -> Tensor:
    return torch.nn.functional.pad(x_NK.cumsum(dim=1), (1, 0))


def _pieces(sums_NS: Tensor, ends_NE: Tensor) -> Tensor:
    return sums_NS.gather(1, ends_NE).diff(dim=1)


def _middles(centroids_NC: Tensor) -> Tensor:
    return ((centroids_NC[:, :-1] + centroids_NC[:, 1:]) / 2).contiguous()

"""Pruning rates of decoder layers, by CKA, with a cubic schedule over the rounds.

    CKA(X, Y) = |Y'X|^2 / (|X'X| |Y'Y|)                 columns centred, Frobenius norms       (equation 20)
    I_l       = exp(-beta * sum over i != l of CKA(X_l, X_i))                                  (equation 21)
    max sum_l I_l n_l (1 - s_l)   with   sum_l n_l s_l = rate * sum_l n_l,   lower <= s <= upper
    rate_t    = rate * (1 - (1 - t / R)^3)              t = 1 ... R                            (equation 24)

For layer l: X_l are its features, I_l its importance, n_l its number of weights, s_l its rate. `rate` is the
final rate of the model, and rate_t that after round t of R.

The equations are those of "Mitigating gradient interference for efficient sparse fine-tuning". docs/adr/0008
says where and why we deviate from the printed ones.

# Legend: T tokens, D and E features, L decoder layers.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from permille.errors import InputError

LARGEST_RATE = 0.99
SPREAD = 0.1
"""Largest difference of a layer's rate from the mean.

The paper's linear programme has no bounds and would remove whole layers.
"""


def cubic_rate(final: float, round_: int, rounds: int) -> float:
    """Return the rate after a round, counted from 1. The last round's rate is `final`.

    For example, the first of five rounds to 0.6 has the rate `cubic_rate(0.6, 1, 5)`, about 0.293.
    """
    return final if round_ == rounds else final * (1 - (1 - round_ / rounds) ** 3)


def linear_cka(x_TD: NDArray[np.float32], y_TE: NDArray[np.float32]) -> float:
    """Return the similarity of two layers' features of the same tokens, from 0 to 1.

    It does not change if the features are rotated or scaled. If all features of a layer are the same for
    all tokens, its similarity is 0.
    """
    x_TD = x_TD - x_TD.mean(axis=0, dtype=np.float64)
    y_TE = y_TE - y_TE.mean(axis=0, dtype=np.float64)
    scale = float(np.linalg.norm(x_TD.T @ x_TD) * np.linalg.norm(y_TE.T @ y_TE))
    return float(np.linalg.norm(y_TE.T @ x_TD) ** 2) / scale if scale else 0.0


def similarities(features: Sequence[NDArray[np.float32]]) -> NDArray[np.float64]:
    """Return the CKA of each pair of layers, float64 [L, L].

    The features must have equal numbers of rows. Their widths may differ.
    """
    found_LL = np.eye(len(features))
    for first in range(len(features)):
        for second in range(first):
            found_LL[first, second] = linear_cka(features[first], features[second])
            found_LL[second, first] = found_LL[first, second]
    return found_LL


def importance(similarity_LL: NDArray[np.float64], beta: float = 1.0) -> NDArray[np.float64]:
    """Return the importance of each layer, float64 [L]. It is 1 if no other layer is similar."""
    others_L = similarity_LL.sum(axis=1) - np.diagonal(similarity_LL)
    found_L: NDArray[np.float64] = np.exp(-beta * others_L)
    return found_L


def layer_rates(
    importance_L: NDArray[np.float64],
    weights_L: NDArray[np.int64],
    rate: float,
    pruned_L: NDArray[np.float64],
    *,
    spread: float = SPREAD,
) -> NDArray[np.float64]:
    """Return the rates that keep the most importance, float64 [L]. Their mean over the weights is `rate`.

    Args:
        weights_L: number of weights of each layer that may be pruned.
        pruned_L: current rate of each layer. Rates never fall below it.
        spread: largest difference of a layer's rate from the mean. With 0, all rates are equal.

    Raises:
        InputError: more weights are pruned already than `rate` allows.
    """
    from scipy.optimize import linprog

    lower_L = np.maximum(pruned_L, max(0.0, rate - spread))
    upper_L = np.maximum(lower_L, min(max(LARGEST_RATE, rate), rate + spread))
    # Scale first: HiGHS treats differences below 1e-7 as 0, and an exponential of many layers is tiny.
    worth_L = importance_L / importance_L.max()
    share_L = weights_L / weights_L.sum()
    found = linprog(
        worth_L * share_L,  # minimise the importance of the pruned weights
        A_eq=share_L[None],
        b_eq=[rate],
        bounds=np.stack([lower_L, upper_L], axis=1),
        method="highs",
    )
    if not found.success:
        raise InputError(
            f"expected rates of mean {rate:.4f} between {lower_L.min():.4f} and {upper_L.max():.4f}, "
            f"got none: {float(pruned_L @ share_L):.4f} is pruned already"
        )
    rates_L: NDArray[np.float64] = np.clip(found.x, lower_L, upper_L)
    return rates_L

"""A basis of directions for zeroth order, learned from public text (FORMAT 4.13, ADR 42).

    basis = learn_basis(engine, package, rows_NT, work=Path("work"))
    manifest = package.manifest.with_part(write_basis(blobs, basis), {})

Pseudo-users are clusters of the text's rows. For each, a few steps of Adam move the masked weights. The
columns of the basis are the singular vectors of these displacements. A person's text moves the weights
partly along the same vectors, so a few forward passes along them already lower its loss.

Shapes: N = rows of the text, T = tokens, U = pseudo-users, K = masked weights, F = features of a row.
"""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from permille.corpora.sequences import row_order
from permille.errors import InputError
from permille.package.basis import Basis
from permille.package.limits import LARGEST_ELEMENT
from permille.package.reader import Package
from permille.training.adam import Moments, adam_step, learning_rate, unit_exponent
from permille.zo.estimators import Batch, Differentiable
from permille.zo.lattice import values

USERS = 8  # with one perturbation of each column, a step then costs half of a step in groups
STEPS, ROWS = 4, 3
LEAST_ROWS = STEPS * ROWS
# Shares of the mean of the displacements' norms. Longer steps cost more in chats (docs/results/basis.md).
REACH, LENGTH = 0.05, 0.06
_FEATURES, _ROUNDS = 4096, 8

Progress = Callable[[int, int], None]


def learn_basis(
    engine: Differentiable,
    package: Package,
    rows_NT: NDArray[np.int64],
    *,
    work: Path | None = None,
    progress: Progress = lambda _done, _total: None,
) -> Basis:
    """Learn a basis from the rows of a public text.

    Args:
        engine: an engine of the package, with a reverse pass.
        package: the package.
        rows_NT: int64 [N, T] token ids, whole rows.
        work: a folder for the trained pseudo-users, with which another call continues. None keeps nothing.
        progress: called after each pseudo-user. An exception stops the work.

    Raises:
        InputError: there are too few rows, or training moves no weight.
        OperatorError: a file in the folder is damaged.
    """
    if len(rows_NT) < LEAST_ROWS:
        raise InputError(f"A basis needs {LEAST_ROWS} rows of public text or more, and has {len(rows_NT)}.")
    exponent, moved_UK = unit_exponent(learning_rate(package)), np.empty((USERS, package.k))
    # The names of kept files depend on what made them, so that a folder can serve several calls.
    made = hashlib.sha256(package.digest.encode() + rows_NT.tobytes()).hexdigest()[:16]
    for user, chosen_NT in enumerate(pseudo_users(rows_NT, USERS, LEAST_ROWS)):
        path = None if work is None else work / f"pseudo-user-{made}-{user}.moments"
        trained = None if path is None else Moments.load(path)
        if trained is None:
            trained = train_user(engine, package, chosen_NT)
            if path is not None:
                trained.store(path)
        moved_UK[user] = np.ldexp(trained.s_K.astype(np.float64), exponent)
        progress(user + 1, USERS)
    return basis_of(moved_UK)


def pseudo_users(rows_NT: NDArray[np.int64], users: int, each: int) -> Iterator[NDArray[np.int64]]:
    """Yield the rows of each pseudo-user: the `each` rows nearest to the centre of a cluster.

    The clusters are those of spherical k-means on the inverse-frequency weights of hashed tokens.
    """
    counts_NF = np.zeros((len(rows_NT), _FEATURES), np.float32)
    np.add.at(counts_NF, (np.arange(len(rows_NT))[:, None], rows_NT % _FEATURES), 1)
    rarity_F = np.log(len(rows_NT) / (1 + (counts_NF > 0).sum(axis=0))).clip(0)
    row_NF = _normal(np.log1p(counts_NF) * rarity_F)
    centre_UF = row_NF[np.random.default_rng(0).permutation(len(row_NF))[np.arange(users) % len(row_NF)]]
    for _ in range(_ROUNDS):
        sums_UF = np.zeros_like(centre_UF)
        np.add.at(sums_UF, (row_NF @ centre_UF.T).argmax(axis=1), row_NF)
        centre_UF = _normal(sums_UF)
    for centre_F in centre_UF:
        yield rows_NT[np.argsort(-(row_NF @ centre_F), kind="stable")[:each]]


def train_user(engine: Differentiable, package: Package, rows_NT: NDArray[np.int64]) -> Moments:
    """Move the masked weights by a few steps of Adam on some rows."""
    rate, base_K = learning_rate(package), package.values()
    exponent = unit_exponent(rate)
    moments = Moments.first(len(base_K), np.zeros(len(base_K), np.int64))
    for step in range(STEPS):
        ids_BT = rows_NT[row_order(len(rows_NT), ROWS, 0, step)]
        target_BT = np.ones(ids_BT.shape, np.bool_)
        target_BT[:, 0] = False  # the first token has no earlier ones to predict it from
        batch = Batch(input_ids_BT=ids_BT, attention_BT=np.ones_like(target_BT), target_BT=target_BT)
        loss, gradient_K = engine.gradient(values(base_K, moments.s_K, exponent), batch)
        step_rate = rate * (1 - step / STEPS)
        moments = adam_step(moments, loss, gradient_K, rate=step_rate, step_unit_exponent=exponent)
    return moments


def basis_of(moved_UK: NDArray[np.float64]) -> Basis:
    """Return the singular vectors of displacements, the largest first, as columns of equal norms.

    Displacements that depend on others add no column.

    Raises:
        InputError: the displacements have fewer than two directions.
    """
    squares_U, turned_UU = np.linalg.eigh(moved_UK @ moved_UK.T)
    kept = squares_U > 1e-9 * squares_U[-1]
    if np.count_nonzero(kept) < 2:
        raise InputError("The public text moves the masked weights along too few directions for a basis.")
    to_RU = (turned_UU[:, kept] / np.sqrt(squares_U[kept])).T[::-1]
    # One column at a time, because all of them in float64 would need as much memory as the displacements.
    scale = LARGEST_ELEMENT / max(float(np.abs(to_U @ moved_UK).max()) for to_U in to_RU)
    norm = float(np.linalg.norm(moved_UK, axis=1).mean())
    return Basis(
        columns_RK=np.stack([np.rint(to_U @ moved_UK * scale).astype(np.int8) for to_U in to_RU]),
        reach=REACH * norm,
        length=LENGTH * norm,
    )


def _normal(rows_NF: NDArray[np.float32]) -> NDArray[np.float32]:
    """Divide each row by its norm. A row of zeros remains."""
    norms_N1 = np.linalg.norm(rows_NF, axis=1, keepdims=True)
    return np.asarray(rows_NF / np.maximum(norms_N1, 1e-9), np.float32)

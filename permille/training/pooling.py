"""Pooled states: the masked weights of a package, trained on a public corpus (FORMAT 4.9).

    rows = token sequences of the corpus
    pooled = pool(engine, package, rows, PoolingPlan(steps=400), checkpoint=folder / "moments")
    manifest = write_pooled(blobs, package.manifest, pooled, {"corpus": "c4"})

The steps are those of a device (`permille.training.adam`). The last tenth of the rows is held out of
training, to measure the result. As on a device, each step adds the gradient on some rows of the package's
reference (general text). Other rows of the reference measure the loss on general text. If that loss rises too
much, the state is scaled down. After a kill, a call with the same arguments and checkpoint continues the
training, and returns the same bits as a call that was not interrupted.

Shapes: N = rows of the corpus, B = rows of a batch, T = tokens, K = masked weights.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from permille.corpora.sequences import row_order
from permille.digests import JSON
from permille.engines.interface import GradientEngine
from permille.errors import InputError, OperatorError
from permille.package.blobs import BlobFolder
from permille.package.build import write_manifest
from permille.package.limits import Role
from permille.package.manifest import Layer, Manifest
from permille.package.reader import Package
from permille.training.adam import Moments, adam_step, learning_rate, unit_exponent
from permille.training.reference import Reference
from permille.training.strength import KEEP_GENERAL, choose_strength, scaled
from permille.zo.estimators import Batch
from permille.zo.lattice import values
from permille.zo.packed_state import StateHeader, StateOrigin, encode_state, pooled_state

HELD_OUT_SHARE = 10  # one in this many rows is held out, but at least two rows altogether
STEPS_A_CHECKPOINT = 20
SURE = 2.0  # a pooled state is better if its gain exceeds this many standard errors

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingPlan:
    """Options for training a pooled state.

    Attributes:
        steps: the number of steps. The rate falls to 0 over them.
        batch_rows: the number of rows in a step.
        seed: the seed of the order of the rows.
    """

    steps: int
    batch_rows: int = 4
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pooled:
    """A trained state and its losses on the held-out rows, in nats per token.

    Attributes:
        gain: how much the state lowers the loss, as the mean over the held-out rows.
        error: the standard error of the gain.
    """

    s_K: NDArray[np.int64]
    step_unit_exponent: int
    loss_base: float
    loss_pooled: float
    gain: float
    error: float

    @property
    def better(self) -> bool:
        """Return whether the state is significantly better than the base on held-out text."""
        return self.gain > SURE * self.error


def pool(
    engine: GradientEngine,
    package: Package,
    rows_NT: NDArray[np.int64],
    plan: PoolingPlan,
    *,
    checkpoint: Path,
    progress: Progress = lambda _done, _total: None,
) -> Pooled:
    """Train on a corpus, and measure the result on the last tenth of its rows.

    Args:
        engine: an engine with a reverse pass.
        package: the package of the engine.
        rows_NT: int64 [N, T] token ids, whole rows, in the order of the corpus.
        plan: the options.
        checkpoint: a file for continuing. An interruption costs at most `STEPS_A_CHECKPOINT` steps.
        progress: called after each step. An exception stops the work.

    Raises:
        InputError: there are too few rows for a batch and for measuring, the masked weights are all 0
            or too large, or even an eighth of the change raises the loss on general text too much.
    """
    # Two rows are the fewest that have a standard error.
    held_out = max(2, len(rows_NT) // HELD_OUT_SHARE)
    train_NT, held_NT = rows_NT[:-held_out], rows_NT[-held_out:]
    if len(train_NT) < plan.batch_rows:
        least = plan.batch_rows + held_out
        raise InputError(
            f"Pooling needs {least} sequences or more, and has {len(rows_NT)}. Give more text, or use fewer "
            "rows in a step."
        )
    rate, w_base_K = learning_rate(package), package.values()
    if not 0 < rate < math.inf:
        raise InputError(f"The masked weights are all 0, or too large: the rate is {rate}.")
    exponent, reference = unit_exponent(rate), Reference.of(package)
    moments = _kept(checkpoint) or Moments.first(len(w_base_K), np.zeros(len(w_base_K), np.int64))
    while moments.step < plan.steps:
        step = moments.step
        batch = _batch(train_NT[row_order(len(train_NT), plan.batch_rows, plan.seed, step)])
        values_K = values(w_base_K, moments.s_K, exponent)
        loss, gradient_K = engine.gradient(values_K, batch)
        if reference is not None:
            gradient_K = gradient_K + engine.gradient(values_K, reference.pull(step))[1]
        step_rate = rate * (1 - step / plan.steps)
        moments = adam_step(moments, loss, gradient_K, rate=step_rate, step_unit_exponent=exponent)
        # Store the moments before `progress`, which may stop the work.
        if moments.step % STEPS_A_CHECKPOINT == 0 or moments.step == plan.steps:
            moments.store(checkpoint)
        progress(moments.step, plan.steps)
    s_K = moments.s_K
    if reference is not None:
        s_K = _kept_general(engine, w_base_K, s_K, exponent, reference)
    base_N = _losses(engine, w_base_K, held_NT, plan.batch_rows)
    pooled_N = _losses(engine, values(w_base_K, s_K, exponent), held_NT, plan.batch_rows)
    # Compare row by row, because the gains of the rows vary less than their losses.
    gain_N = base_N - pooled_N
    return Pooled(
        s_K=s_K,
        step_unit_exponent=exponent,
        loss_base=float(base_N.mean()),
        loss_pooled=float(pooled_N.mean()),
        gain=float(gain_N.mean()),
        error=float(gain_N.std(ddof=1)) / math.sqrt(held_out),
    )


def _kept_general(
    engine: GradientEngine,
    w_base_K: NDArray[np.float32],
    s_K: NDArray[np.int64],
    exponent: int,
    reference: Reference,
) -> NDArray[np.int64]:
    """Scale the state down until the loss on general text rises by at most `KEEP_GENERAL`, as devices do."""
    base = reference.loss(engine, w_base_K)

    def rise_of(eighths: int) -> float:
        return reference.loss(engine, values(w_base_K, scaled(s_K, eighths), exponent)) - base

    strength = choose_strength(rise_of, KEEP_GENERAL)
    if not strength.eighths:
        raise InputError(
            f"The pooled state raises the loss on general text by {strength.rise:.3f} nats per token at an"
            f" eighth of its strength. At most {KEEP_GENERAL} is allowed. Take fewer steps or more general"
            " text."
        )
    return scaled(s_K, strength.eighths)


def write_pooled(
    blobs: BlobFolder, manifest: Manifest, found: Pooled, pooling: Mapping[str, JSON]
) -> Manifest:
    """Store a package with a pooled state: the layers of the old package, the state, and a new manifest.

    Args:
        blobs: the folder of the blobs.
        manifest: the manifest of the package. A pooled state in it is replaced.
        found: the result of `pool`.
        pooling: a description of how the state was made, for people to read.

    Raises:
        PackageError, OSError: as for `write_manifest`.
    """
    parent = manifest.parent()
    header = StateHeader(
        package_digest=parent.digest,
        mask_digest=parent.mask_digest,
        step_unit_exponent=found.step_unit_exponent,
        k=parent.k,
        origin=StateOrigin.POOLED,
    )
    data = encode_state(header, found.s_K)
    layer = Layer(role=Role.POOLED, digest=blobs.put_bytes(data), size_bytes=len(data))
    made = manifest.with_addition(layer, pooling)
    # Read the state back before the manifest is written, so no package names a state that it cannot open.
    pooled_state(Package(blobs, made))
    write_manifest(blobs, made)
    return made


def _kept(checkpoint: Path) -> Moments | None:
    """Return the moments of an earlier call. If their file is missing or damaged, return None."""
    with suppress(OperatorError):
        return Moments.load(checkpoint)
    return None


def _batch(rows_BT: NDArray[np.int64]) -> Batch:
    target_BT = np.ones(rows_BT.shape, np.bool_)
    # The first token has no earlier ones to predict it from.
    target_BT[:, 0] = False
    return Batch(input_ids_BT=rows_BT, attention_BT=np.ones(rows_BT.shape, np.bool_), target_BT=target_BT)


def _losses(
    engine: GradientEngine, values_K: NDArray[np.float32], rows_NT: NDArray[np.int64], batch_rows: int
) -> NDArray[np.float64]:
    """Return the mean loss of each row, float64 [N]."""
    parts = [
        engine.token_losses(values_K, _batch(rows_NT[first : first + batch_rows]))
        for first in range(0, len(rows_NT), batch_rows)
    ]
    losses_N: NDArray[np.float64] = np.concatenate(parts).reshape(len(rows_NT), -1).mean(1, dtype=np.float64)
    return losses_N

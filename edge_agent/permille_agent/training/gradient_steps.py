"""Steps along the gradient of a reverse pass, durable after each of them.

Adam on the lattice is the library's (`permille.training.adam`); here are its batches and its files.

Shapes: K = masked weights.
"""

from typing import cast

import numpy as np
from numpy.typing import NDArray

from permille.engines.interface import GradientEngine
from permille.errors import InputError
from permille.files import write_atomic
from permille.training.adam import Moments, adam_step
from permille.zo.estimators import Descent
from permille.zo.header import LogHeader
from permille.zo.lattice import values
from permille.zo.packed_state import StateHeader, StateOrigin, decode_state, encode_state
from permille_agent.training.run import Run


def take_gradient_step(run: Run, descent: Descent, moments: Moments, s_K: NDArray[np.int64]) -> Moments:
    """Compute one step from state `s_K`, and what is remembered after it; neither is durable yet.

    Args:
        descent: rate, schedule and unit.
        moments: before the step.
    """
    header, step = descent.header, moments.step
    values_K = values(run.w_base_K, s_K, header.step_unit_exponent)
    loss, gradient_K = pulled_gradient(run, values_K, step)
    return adam_step(
        moments,
        loss,
        gradient_K,
        rate=header.learning_rate_at(step),
        step_unit_exponent=header.step_unit_exponent,
    )


def pulled_gradient(run: Run, values_K: NDArray[np.float32], step: int) -> tuple[float, NDArray[np.float32]]:
    """Compute the loss of the step's batch, and its gradient plus that of the pull towards the base.

    The pull is the divergence from the base's answers on two rows of the package's reference. It keeps what
    the base knows: Li and Hoiem, "Learning without Forgetting" (arXiv 1606.09282).
    """
    engine = gradient_engine(run)
    loss, gradient_K = engine.gradient(values_K, run.batches(step))
    if (pull := run.pull(step)) is not None:
        _, pull_K = engine.gradient(values_K, pull)
        gradient_K = gradient_K + pull_K
    gradient_K[: run.trained.start] = 0  # so Adam leaves them where they are
    return loss, gradient_K


def gradient_engine(run: Run) -> GradientEngine:
    """Return the run's engine.

    Raises:
        InputError: it can only infer.
    """
    if not hasattr(run.engine, "gradient"):
        raise InputError(
            f"The engine {run.engine.info()['name']} computes no gradients. Train with --method "
            "zeroth-order, or choose another --engine."
        )
    return cast("GradientEngine", run.engine)


def store_best_state(run: Run, descent: Descent, number: int, s_K: NDArray[np.int64]) -> None:
    """Keep the best state of a descent without a log, as it is shared and backed up; durable on return."""
    write_atomic(run.folder.best_state(number), packed_state(descent.header, s_K), mode=0o600)


def packed_state(header: LogHeader, s_K: NDArray[np.int64]) -> bytes:
    """Encode a personal state that a log of this header leads to, or would (FORMAT 11)."""
    of_state = StateHeader(
        package_digest=header.package_digest,
        mask_digest=header.mask_digest,
        step_unit_exponent=header.step_unit_exponent,
        k=header.k,
        origin=StateOrigin.PERSONAL,
    )
    return encode_state(of_state, s_K)


def load_best_state(run: Run, number: int) -> NDArray[np.int64]:
    """Read the best state of a descent without a log."""
    data = run.folder.best_state(number).read_bytes()
    return decode_state(data, max_bytes=len(data), max_k=run.package.k).s_K

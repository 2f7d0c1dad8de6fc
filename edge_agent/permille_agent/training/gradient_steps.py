"""Steps along the gradient of a reverse pass: Adam, on the lattice, durable after each of them.

    m = b1 m + (1 - b1) g,   v = b2 v + (1 - b2) g^2        g: the batch's gradient of the masked weights
    change = -rate * (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + 1e-8)            (Kingma and Ba, algorithm 1)

The rate begins at 0.3 times the root mean square of the masked weights and falls to 0 over the steps, so
there is nothing to search for. Without a log every weight moves by the nearest integer of the lattice. With
one, the log's groups hold what they can of the change; what a projection on groups of g weights shortens is
made longer again, by `min(g, 2 sqrt(g))`.

What Adam remembers is written before the journal is, so a kill leaves a record to append or nothing to do.

Shapes: K = masked weights.
"""

import io
import math
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from permille.engines.interface import GradientEngine
from permille.errors import InputError, OperatorError
from permille.files import write_atomic
from permille.zo.estimators import Descent
from permille.zo.lattice import STATE_LIMIT, values
from permille.zo.packed_state import StateHeader, StateOrigin, decode_state, encode_state
from permille.zo.records import StepFlag, StepRecord
from permille.zo.steps import sketch_step
from permille_agent.training.run import Run

RATE = 0.3
UNITS = 256  # a step of the largest rate is so many units of the lattice, or a few more
_BETAS = (0.9, 0.99)
_TINY = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Moments:
    """What Adam remembers before a step.

    Attributes:
        step: the next one.
        taken: how many steps before it were not rejected.
        s_K: the state, where there is no log.
        coefficients: of the step before, where there is a log; with `loss` and `flags` its record.
    """

    step: int
    taken: int
    m_K: NDArray[np.float32]
    v_K: NDArray[np.float32]
    s_K: NDArray[np.int64]
    coefficients: NDArray[np.int64]
    loss: float = 0.0
    flags: int = 0

    def record(self) -> StepRecord:
        """The record of the step before."""
        return StepRecord(
            step=self.step - 1,
            coefficients=tuple(self.coefficients.tolist()),
            loss=self.loss,
            flags=StepFlag(self.flags),
        )


def first_moments(k: int, s_K: NDArray[np.int64]) -> Moments:
    """Return what Adam begins with."""
    nothing_K = np.zeros(k, np.float32)
    return Moments(step=0, taken=0, m_K=nothing_K, v_K=nothing_K, s_K=s_K, coefficients=np.zeros(0, np.int64))


def learning_rate(w_base_K: NDArray[np.float32]) -> float:
    """Compute the rate of the first step; 0 where all masked weights are."""
    return RATE * math.sqrt(float(np.mean(np.square(w_base_K, dtype=np.float64))))


def unit_exponent(rate: float) -> int:
    """Return the exponent of the step unit: the largest power of two that is at most `rate / UNITS`."""
    return math.frexp(rate / UNITS)[1] - 1


def take_gradient_step(run: Run, descent: Descent, moments: Moments, s_K: NDArray[np.int64]) -> Moments:
    """Compute one step from state `s_K`, and what is remembered after it; neither is durable yet.

    Args:
        descent: rate, schedule, unit and groups; its log need not exist.
        moments: before the step.
    """
    header, step = descent.header, moments.step
    values_K = values(run.w_base_K, s_K, header.step_unit_exponent)
    loss, gradient_K = gradient_engine(run).gradient(values_K, run.batches(step))
    rejected = replace(
        moments,
        step=step + 1,
        coefficients=np.zeros(run.options.queries, np.int64),
        loss=loss,
        flags=int(StepFlag.REJECTED),
    )
    if not (math.isfinite(loss) and np.isfinite(gradient_K).all()):
        return rejected
    moved, change_K = _adam(moments, gradient_K, header.learning_rate_at(step))
    moved = replace(moved, step=step + 1, loss=loss, flags=0)
    if run.options.has_log:
        stretched_K = change_K * _stretch(header.k / header.queries)
        record = sketch_step(stretched_K, loss, header, step, descent.exponents)
        if StepFlag.REJECTED in record.flags:
            return rejected
        return replace(moved, coefficients=np.array(record.coefficients, np.int64))
    exact_K = np.rint(change_K / math.ldexp(1.0, header.step_unit_exponent)) + s_K
    if np.abs(exact_K).max() > STATE_LIMIT:
        return rejected
    return replace(moved, s_K=exact_K.astype(np.int64))


def gradient_engine(run: Run) -> GradientEngine:
    """Return the run's engine.

    Raises:
        InputError: it can only infer.
    """
    if not hasattr(run.engine, "gradient"):
        raise InputError(
            f"expected an engine with a reverse pass, got {run.engine.info()['name']}: "
            "train with --estimator one-sided"
        )
    return cast("GradientEngine", run.engine)


def store_moments(path: Path, moments: Moments) -> None:
    """Write what Adam remembers, whole or not at all; durable on return."""
    file = io.BytesIO()
    numbers = np.array([moments.step, moments.taken, moments.flags], np.int64)
    np.savez(
        file,
        numbers=numbers,
        loss=np.float64(moments.loss),
        m=moments.m_K,
        v=moments.v_K,
        s=moments.s_K,
        c=moments.coefficients,
    )
    write_atomic(path, file.getvalue(), mode=0o600)


def load_moments(path: Path) -> Moments | None:
    """Read what Adam remembers; None before the first step.

    Raises:
        OperatorError: the file is damaged.
    """
    try:
        with np.load(path, allow_pickle=False) as found:
            step, taken, flags = (int(number) for number in found["numbers"])
            loss = float(found["loss"])
            m_K, v_K, s_K, c_Q = (found[name] for name in "mvsc")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as exc:
        raise OperatorError(
            f"expected the moments of a run in {path}, got {exc}: remove {path.parent} to begin it again"
        ) from exc
    return Moments(
        step=step, taken=taken, m_K=m_K, v_K=v_K, s_K=s_K, coefficients=c_Q, loss=loss, flags=flags
    )


def store_best_state(run: Run, descent: Descent, number: int, s_K: NDArray[np.int64]) -> None:
    """Keep the best state of a descent without a log, as it is shared and backed up; durable on return."""
    header = StateHeader(
        package_digest=run.package.digest,
        mask_digest=run.package.mask_digest,
        step_unit_exponent=descent.header.step_unit_exponent,
        k=run.package.k,
        origin=StateOrigin.PERSONAL,
    )
    write_atomic(run.folder.best_state(number), encode_state(header, s_K), mode=0o600)


def load_best_state(run: Run, number: int) -> NDArray[np.int64]:
    """Read the best state of a descent without a log."""
    data = run.folder.best_state(number).read_bytes()
    return decode_state(data, max_bytes=len(data), max_k=run.package.k).s_K


def _adam(
    moments: Moments, gradient_K: NDArray[np.float32], rate: float
) -> tuple[Moments, NDArray[np.float64]]:
    """Return the moments after a gradient, and the change of the weights, float64 [k]."""
    b1, b2 = (np.float32(beta) for beta in _BETAS)
    taken = moments.taken + 1
    m_K = b1 * moments.m_K + (1 - b1) * gradient_K
    v_K = b2 * moments.v_K + (1 - b2) * gradient_K * gradient_K
    mean_K = m_K.astype(np.float64) / (1 - _BETAS[0] ** taken)
    root_K = np.sqrt(v_K.astype(np.float64) / (1 - _BETAS[1] ** taken))
    return replace(moments, taken=taken, m_K=m_K, v_K=v_K), -rate * mean_K / (root_K + _TINY)


def _stretch(group_weights: float) -> float:
    """How much longer a change is made before it is projected on groups of so many weights."""
    return max(1.0, min(group_weights, 2 * math.sqrt(group_weights)))

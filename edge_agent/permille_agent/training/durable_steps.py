"""Durable steps of a descent: a journal for zeroth order, a file of Adam's state for the gradient.

Each step is durable before the next one, so a resumed descent computes the same bits. Adam itself is in
`permille.training.adam`.

Shapes: K masked weights.
"""

import numpy as np
from numpy.typing import NDArray

from permille.errors import PackageError
from permille.files import write_atomic
from permille.training.adam import Moments, adam_step
from permille.zo.estimators import Descent, differentiable
from permille.zo.header import LogHeader
from permille.zo.journal import Journal
from permille.zo.lattice import STATE_LIMIT, values
from permille.zo.packed_state import StateHeader, StateOrigin, encode_state, read_state
from permille.zo.records import StepFlag
from permille.zo.steps import JournaledSteps
from permille_agent.training.run import Run


class LoggedSteps:
    """Zeroth-order steps. The journal can restore each state.

    Attributes:
        s_K: state before the next step.
        rejected: number of rejected steps.
    """

    def __init__(self, run: Run, descent: Descent, journal: Journal) -> None:
        self._run = run
        self._descent = descent
        self._steps = JournaledSteps(journal, descent)
        self.s_K = self._steps.s_K  # `append` updates this array in place
        records = list(journal.records())
        self._before = records[-1].coefficients if records else ()
        self.rejected = sum(StepFlag.REJECTED in record.flags for record in records)

    @property
    def step(self) -> int:
        """Number of the next step."""
        return self._steps.step

    def take(self) -> float:
        """Make a step, and return its loss. The step is durable on return."""
        record = self._run.take_step(self._descent, self.s_K, self.step, self._before)
        self._steps.append(record)
        self._before = record.coefficients
        self.rejected += StepFlag.REJECTED in record.flags
        return record.loss

    def keep(self) -> None:
        """Do nothing, because the journal can restore each state."""

    def best(self, step: int) -> NDArray[np.int64]:
        """Return the state before `step`."""
        return self._steps.before(step)


class GradientSteps:
    """Gradient steps. A step changes each weight by its own integer, so it has no short log.

    Instead of a log, the current state and the best state are stored.

    Attributes:
        s_K: state before the next step.
    """

    def __init__(self, run: Run, descent: Descent, number: int) -> None:
        self._run = run
        self._descent = descent
        self._number = number
        self._first_K = first_state(run, descent.header.step_unit_exponent)
        self._path = run.folder.moments(number)
        if (known := Moments.load(self._path)) is None:
            known = Moments.first(run.package.k, self._first_K)
            known.store(self._path)
        self._moments = known
        self.s_K = known.s_K

    @property
    def step(self) -> int:
        """Number of the next step."""
        return self._moments.step

    @property
    def rejected(self) -> int:
        """Number of rejected steps."""
        return self._moments.step - self._moments.taken

    def take(self) -> float:
        """Make a step, and return its loss. The step is durable on return."""
        header, step = self._descent.header, self._moments.step
        values_K = values(self._run.w_base_K, self.s_K, header.step_unit_exponent)
        loss, gradient_K = pulled_gradient(self._run, values_K, step)
        self._moments = adam_step(
            self._moments,
            loss,
            gradient_K,
            rate=header.learning_rate_at(step),
            step_unit_exponent=header.step_unit_exponent,
        )
        self._moments.store(self._path)
        self.s_K = self._moments.s_K
        return self._moments.loss

    def keep(self) -> None:
        """Store the current state durably as the best one so far."""
        store_best_state(self._run, self._descent.header, self._number, self.s_K)

    def best(self, step: int) -> NDArray[np.int64]:
        """Return the state before `step`, which must be 0 or the step of the last call of `keep`."""
        if not step:
            return self._first_K
        return read_state(self._run.package, self._run.folder.best_state(self._number).read_bytes()).s_K


Steps = LoggedSteps | GradientSteps


def first_state(run: Run, exponent: int) -> NDArray[np.int64]:
    """Return the state that a run starts from, in units of `2**exponent`.

    Raises:
        PackageError: the state exceeds the exact range in this unit (FORMAT 7.3).
    """
    if run.start is None:
        return np.zeros(run.package.k, np.int64)
    s_K, finer = run.start.s_K, run.start.step_unit_exponent - exponent
    # Python's integers have no limit. In NumPy, the shift could overflow 64 bits.
    if max(int(s_K.max()), -int(s_K.min())) << finer > STATE_LIMIT:
        raise PackageError("state-limit", f"expected a state within 2^53 on a unit of 2^{exponent}")
    return s_K << finer


def pulled_gradient(run: Run, values_K: NDArray[np.float32], step: int) -> tuple[float, NDArray[np.float32]]:
    """Compute the loss and the gradient of a step's batch. The gradient includes a pull towards the base.

    The pull lowers the divergence from the base's answers, on two rows of the package's reference text. It
    reduces forgetting: Li and Hoiem, "Learning without Forgetting" (arXiv 1606.09282).

    Raises:
        InputError: the engine has no reverse pass.
    """
    engine = differentiable(run.engine)
    loss, gradient_K = engine.gradient(values_K, run.batches(step))
    if (pull := run.pull(step)) is not None:
        _, pull_K = engine.gradient(values_K, pull)
        gradient_K = gradient_K + pull_K
    gradient_K[: run.trained.start] = 0  # Adam does not move the layers below --first-layer
    return loss, gradient_K


def store_best_state(run: Run, header: LogHeader, number: int, s_K: NDArray[np.int64]) -> None:
    """Store the best state of a gradient descent durably, in the format of a shared state."""
    write_atomic(run.folder.best_state(number), packed_state(header, s_K), mode=0o600)


def packed_state(header: LogHeader, s_K: NDArray[np.int64]) -> bytes:
    """Encode a personal state with the digests of its package and mask, which `header` names (FORMAT 11)."""
    of_state = StateHeader(
        package_digest=header.package_digest,
        mask_digest=header.mask_digest,
        step_unit_exponent=header.step_unit_exponent,
        k=header.k,
        origin=StateOrigin.PERSONAL,
    )
    return encode_state(of_state, s_K)

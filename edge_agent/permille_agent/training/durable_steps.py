"""Durable steps of a descent: in a journal for zeroth order, as a state for the gradient.

A step is durable before it counts, so a descent that is killed anywhere goes on with the same bits.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from permille.errors import PackageError
from permille.training.adam import Moments
from permille.zo.estimators import Descent
from permille.zo.journal import Journal
from permille.zo.lattice import STATE_LIMIT
from permille.zo.records import StepFlag
from permille.zo.steps import JournaledSteps
from permille_agent.training.gradient_steps import (
    load_best_state,
    store_best_state,
    take_gradient_step,
)
from permille_agent.training.run import Run


class Steps(Protocol):
    """Progress of a descent. A step is durable when `take` returns.

    Attributes:
        s_K: the state before the next step.
    """

    s_K: NDArray[np.int64]

    @property
    def step(self) -> int:
        """Number of the next step."""
        ...

    @property
    def rejected(self) -> int:
        """Return the number of rejected steps."""
        ...

    def take(self) -> float:
        """Make a step; returns its loss."""
        ...

    def keep(self) -> None:
        """Keep the state as the best one so far. It is durable on return."""
        ...

    def best(self, step: int) -> NDArray[np.int64]:
        """Return the state before `step`: the last one that was kept, or the first."""
        ...


class LoggedSteps:
    """Steps of zeroth order; the journal holds every state."""

    def __init__(self, run: Run, descent: Descent, journal: Journal) -> None:
        self._run = run
        self._descent = descent
        self._steps = JournaledSteps(journal, descent)
        self.s_K = self._steps.s_K  # moved in place
        self._rejected = sum(StepFlag.REJECTED in record.flags for record in journal.records())

    @property
    def rejected(self) -> int:
        """See `Steps`."""
        return self._rejected

    @property
    def step(self) -> int:
        """See `Steps`."""
        return self._steps.step

    def take(self) -> float:
        """See `Steps`."""
        record = self._run.take_step(self._descent, self.s_K, self.step)
        self._steps.append(record)
        self._rejected += StepFlag.REJECTED in record.flags
        return record.loss

    def keep(self) -> None:
        """Do nothing, since the journal holds every state."""

    def best(self, step: int) -> NDArray[np.int64]:
        """See `Steps`."""
        return self._steps.before(step)


class GradientSteps:
    """Steps along a gradient by an integer for each weight; there is a state and no log."""

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
        """See `Steps`."""
        return self._moments.step

    @property
    def rejected(self) -> int:
        """See `Steps`."""
        return self._moments.step - self._moments.taken

    def take(self) -> float:
        """See `Steps`."""
        self._moments = take_gradient_step(self._run, self._descent, self._moments, self.s_K)
        self._moments.store(self._path)
        self.s_K = self._moments.s_K
        return self._moments.loss

    def keep(self) -> None:
        """See `Steps`."""
        store_best_state(self._run, self._descent, self._number, self.s_K)

    def best(self, step: int) -> NDArray[np.int64]:
        """See `Steps`."""
        return load_best_state(self._run, self._number) if step else self._first_K


def first_state(run: Run, exponent: int) -> NDArray[np.int64]:
    """Return the state that a run begins from on a unit of `2**exponent`.

    Raises:
        PackageError: on so fine a unit it would leave the exact range (FORMAT 7.3).
    """
    if run.start is None:
        return np.zeros(run.package.k, np.int64)
    s_K, finer = run.start.s_K, run.start.step_unit_exponent - exponent
    if max(int(s_K.max()), -int(s_K.min())) << finer > STATE_LIMIT:
        raise PackageError("state-limit", f"expected a state within 2^53 on a unit of 2^{exponent}")
    return s_K << finer

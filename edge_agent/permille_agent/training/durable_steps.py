"""How the steps of a descent are made durable: in a journal, with moments beside it, or as a state alone.

A step is durable before it counts, so a descent that is killed anywhere goes on with the same bits.
"""

from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from permille.errors import OperatorError, PackageError
from permille.training.adam import Moments
from permille.zo.estimators import Descent
from permille.zo.journal import Journal
from permille.zo.lattice import STATE_LIMIT
from permille.zo.records import StepFlag, StepRecord, coefficients_of
from permille.zo.replay import replay
from permille.zo.steps import apply_record
from permille_agent.training.gradient_steps import (
    load_best_state,
    store_best_state,
    take_gradient_step,
)
from permille_agent.training.run import Run


class Steps(Protocol):
    """Where a descent stands; every step is durable when `take` returns.

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
        """How many steps were rejected."""
        ...

    def take(self) -> float:
        """Make a step; returns its loss."""
        ...

    def keep(self) -> None:
        """The state is the best one so far: durable on return."""
        ...

    def best(self, step: int) -> NDArray[np.int64]:
        """Return the state before `step`: the last one that was kept, or the first."""
        ...


class LoggedSteps:
    """Steps that a journal holds; its replay is the state."""

    def __init__(self, run: Run, descent: Descent, journal: Journal) -> None:
        self._run = run
        self._descent = descent
        self._journal = journal
        self.s_K = self.best(journal.next_step)
        self._rejected = sum(StepFlag.REJECTED in record.flags for record in journal.records())

    @property
    def rejected(self) -> int:
        """See `Steps`."""
        return self._rejected

    @property
    def step(self) -> int:
        """See `Steps`."""
        return self._journal.next_step

    def take(self) -> float:
        """See `Steps`."""
        record = self._run.take_step(self._descent, self.s_K, self.step)
        self._append(record)
        return record.loss

    def keep(self) -> None:
        """Nothing: the journal holds every state."""

    def best(self, step: int) -> NDArray[np.int64]:
        """See `Steps`."""
        header, records = self._descent.header, list(self._journal.records())[:step]
        return replay(header, coefficients_of(records, header))

    def _append(self, record: StepRecord) -> None:
        self._journal.append(record)
        apply_record(self.s_K, record, self._descent.header)
        self._rejected += StepFlag.REJECTED in record.flags


class SketchedSteps(LoggedSteps):
    """Steps along a gradient, as far as the groups of a log hold them."""

    def __init__(self, run: Run, descent: Descent, journal: Journal, moments: Path) -> None:
        super().__init__(run, descent, journal)
        self._path = moments
        known = Moments.load(moments)
        if known is not None and known.step == self.step + 1:  # killed before the journal had it
            self._append(known.record())
        self._moments = known if known is not None and known.step == self.step else self._again()

    def _again(self) -> Moments:
        """Compute what the journal's steps leave behind: of a journal that was cut, the moments are of later
        steps.

        Raises:
            OperatorError: the steps come out otherwise than the journal has them.
        """
        run, descent = self._run, self._descent
        moments, s_K = Moments.first(run.package.k, np.zeros(0, np.int64)), np.zeros(run.package.k, np.int64)
        for record in self._journal.records():
            moments = take_gradient_step(run, descent, moments, s_K)
            if moments.record().coefficients != record.coefficients:
                raise OperatorError(
                    f"The run in {self._path.parent} does not match its journal at step {record.step}. "
                    "Remove the folder to begin the run again."
                )
            apply_record(s_K, record, descent.header)
        return moments

    def take(self) -> float:
        """See `Steps`."""
        self._moments = take_gradient_step(self._run, self._descent, self._moments, self.s_K)
        self._moments.store(self._path)
        self._append(self._moments.record())
        return self._moments.loss


class UnloggedSteps:
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

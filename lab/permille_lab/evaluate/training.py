"""Training of any `Trainable` by zeroth or first order. The state with the lowest validation loss is kept.

Zeroth order uses the product's estimators, lattice and update. First order is AdamW on the same flat vector
with a linear schedule. Both take the same batches, which depend on seed and step only, and evaluate after the
same steps. Both return the values of the best evaluation, as the papers do ("checkpoint by best validation
loss").
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from permille.choices import EstimatorKind
from permille.errors import InputError
from permille.zo.estimators import Batch, Descent, estimate
from permille.zo.header import LogHeader, Schedule
from permille.zo.lattice import step_unit_exponent_for, values
from permille.zo.steps import apply_record, take_step
from permille_lab.evaluate.methods import Order
from permille_lab.evaluate.tuning import GRID_FACTOR, MAX_ATTEMPTS
from permille_lab.evaluate.unfinished import Unfinished
from permille_lab.models.trainables import Trainable

Batches = Callable[[int], Batch]
"""Returns the batch of a step."""

Validate = Callable[[NDArray[np.float32]], float]
"""Returns the validation loss of some values."""

STEP_NORM = 0.4
"""Step norm at which the search for a step size begins (docs/adr/0030).

The step norm is `learning_rate * g_rms * sqrt(k / q)`:

- `g_rms`: root mean square of the projected gradients
- `k`: number of trained numbers
- `q`: number of queries
"""

EPSILON_NORM = 0.5
_NO_PACKAGE = "sha256:" + "0" * 64
_PROBE_STEPS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The settings of one run. The step size is relative, so that one grid suits every method.

    Attributes:
        step_factor: factor on the method's natural step size. For zeroth order, that step size has the norm
            `STEP_NORM`. For first order, it is AdamW's 1e-3.
        queries: number of directions in a step (zeroth order only).
        evaluations: number of validations, evenly spaced. The last one is after the last step.
        first_step: number of the run's first step, if the run is a segment of a longer one.
        total_steps: number of steps of the longer run, None if the run is not a segment.
    """

    order: Order
    steps: int
    step_factor: float
    seed: int
    queries: int = 1
    estimator: EstimatorKind = EstimatorKind.SPSA
    evaluations: int = 10
    first_step: int = 0
    total_steps: int | None = None

    @property
    def schedule_steps(self) -> int:
        """The step at which the linear schedule ends."""
        return self.steps if self.total_steps is None else self.total_steps

    def __post_init__(self) -> None:
        if self.steps < 1 or self.evaluations < 1 or not self.step_factor > 0:
            raise InputError(
                f"expected steps, evaluations and a step factor above 0, got {self.steps}, "
                f"{self.evaluations} and {self.step_factor}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """The values of the best evaluation and the curve that chose them.

    Attributes:
        curve: pairs of step and validation loss. Step 0 is the base. A loss is not finite if training
            diverged.
        step_factor: the factor of the best attempt.
        attempts: number of runs from the base.
    """

    values_K: NDArray[np.float32]
    step: int
    loss: float
    curve: tuple[tuple[int, float], ...]
    step_factor: float
    attempts: int = 1

    @property
    def rose(self) -> bool:
        """True if a loss was not finite or above that of the base, so the steps were too long."""
        base = self.curve[0][1]
        return any(not loss <= base for _, loss in self.curve[1:])


def train(
    trainable: Trainable,
    batches: Batches,
    validate: Validate,
    recipe: Recipe,
    unfinished: Path | None = None,
) -> Trained:
    """Train from the base.

    Training stops if the loss is not finite. The best values before that count.

    Args:
        unfinished: folder for the state of the run, so that a killed run continues. None keeps no state.
    """
    move = _zeroth_order if recipe.order is Order.ZEROTH else _first_order
    kept = Unfinished(unfinished, repr(recipe))
    state = kept.state
    if not state:
        best = torch.from_numpy(trainable.base_K.copy())
        state |= {"step": 0, "best": best, "curve": [(0, validate(trainable.base_K))]}
    curve: list[tuple[int, float]] = state["curve"]
    due = {math.ceil(recipe.steps * (n + 1) / recipe.evaluations) for n in range(recipe.evaluations)}
    for step, values_K in enumerate(move(trainable, batches, recipe, state), start=state["step"] + 1):
        if step in due:
            loss = validate(values_K) if np.isfinite(values_K).all() else math.nan
            if loss < _best(curve)[1]:
                state["best"] = torch.from_numpy(values_K.copy())
            curve.append((step, loss))
        over = step == recipe.steps or not math.isfinite(curve[-1][1])
        state["step"] = recipe.steps if over else step
        kept.keep(now=over)
        if over:
            break
    step, loss = _best(curve)
    return Trained(
        values_K=state["best"].numpy(),
        step=step,
        loss=loss,
        curve=tuple(curve),
        step_factor=recipe.step_factor,
    )


def _best(curve: list[tuple[int, float]]) -> tuple[int, float]:
    """Return the first pair with the lowest loss, or the base if no loss is finite."""
    return min(curve, key=lambda at: at[1] if math.isfinite(at[1]) else math.inf)


def train_safely(
    trainable: Trainable,
    batches: Batches,
    validate: Validate,
    recipe: Recipe,
    unfinished: Path | None = None,
) -> Trained:
    """Train. If the loss rose above that of the base, train again from the base with a smaller step size.

    The attempt with the lowest validation loss counts. The agent does the same with half the step size
    (docs/adr/0030). A step size that suits the tuning seed is sometimes too large for another seed. Without
    new attempts, one diverged seed would decide a comparison.
    """
    best = train(trainable, batches, validate, recipe, unfinished)
    attempts, rose = 1, best.rose
    while rose and attempts < MAX_ATTEMPTS:
        recipe = replace(recipe, step_factor=recipe.step_factor / GRID_FACTOR)
        trained = train(trainable, batches, validate, recipe, unfinished)
        attempts, rose = attempts + 1, trained.rose
        best = min(best, trained, key=lambda one: one.loss)
        del trained  # with `full`, its values take as much memory as the model
    return replace(best, attempts=attempts)


def _zeroth_order(
    trainable: Trainable, batches: Batches, recipe: Recipe, state: dict[str, Any]
) -> Iterator[NDArray[np.float32]]:
    """Yield the values after each step that follows `state["step"]`. The state on the lattice is `s`."""
    header = _header(trainable, batches, recipe)
    s_K = state.setdefault("s", torch.zeros(trainable.k, dtype=torch.int64)).numpy()
    for step in range(state["step"], recipe.steps):
        number = recipe.first_step + step
        record = take_step(
            trainable,
            batches(step),
            Descent(header=header, w_base_K=trainable.base_K),
            s_K,
            number,
            normalised=False,
        )
        apply_record(s_K, record, header)
        yield values(trainable.base_K, s_K, header.step_unit_exponent)


def _header(trainable: Trainable, batches: Batches, recipe: Recipe) -> LogHeader:
    """Return the header of the run.

    Epsilon follows from `EPSILON_NORM`, and the learning rate from the projected gradients at the base.
    """
    epsilon = EPSILON_NORM / math.sqrt(trainable.k)
    header = _plain_header(trainable, recipe, epsilon=epsilon, learning_rate=1.0, exponent=0)
    probe = Descent(header=replace(header, estimator=EstimatorKind.FORWARD), w_base_K=trainable.base_K)
    s_K = np.zeros(trainable.k, dtype=np.int64)
    squares: list[float] = []
    for step in range(_PROBE_STEPS):
        _, g_Q = estimate(trainable, batches(step), probe, s_K, step)
        squares += (g_Q**2).tolist()
    g_rms = math.sqrt(sum(squares) / len(squares))
    if not (math.isfinite(g_rms) and g_rms > 0):
        raise InputError(f"expected a finite gradient other than 0 at the base, got rms {g_rms}")
    natural = STEP_NORM * math.sqrt(recipe.queries) / (g_rms * math.sqrt(trainable.k))
    learning_rate = recipe.step_factor * natural
    return _plain_header(
        trainable,
        recipe,
        epsilon=epsilon,
        learning_rate=learning_rate,
        exponent=step_unit_exponent_for(learning_rate, g_rms, recipe.queries),
    )


def _plain_header(
    trainable: Trainable, recipe: Recipe, *, epsilon: float, learning_rate: float, exponent: int
) -> LogHeader:
    return LogHeader(
        package_digest=_NO_PACKAGE,
        mask_digest=_NO_PACKAGE,
        seed=recipe.seed,
        estimator=recipe.estimator,
        queries=recipe.queries,
        epsilon=epsilon,
        learning_rate=learning_rate,
        schedule=Schedule.LINEAR,
        total_steps=recipe.schedule_steps,
        step_unit_exponent=exponent,
        counts=(trainable.k,),
    )


def _first_order(
    trainable: Trainable, batches: Batches, recipe: Recipe, state: dict[str, Any]
) -> Iterator[NDArray[np.float32]]:
    """Run AdamW on the flat vector, without weight decay as in the papers. Yield each step's values.

    `state` gets `values` and `optimizer`.
    """
    values_K = state.setdefault("values", torch.from_numpy(trainable.base_K.copy())).requires_grad_(True)
    rate = recipe.step_factor * 1e-3
    optimizer = torch.optim.AdamW([values_K], lr=rate, weight_decay=0.0)
    if "optimizer" in state:
        optimizer.load_state_dict(state["optimizer"])
    for step in range(state["step"], recipe.steps):
        _, gradient_K = trainable.gradient(values_K.detach().numpy(), batches(step))
        values_K.grad = torch.from_numpy(gradient_K)
        optimizer.param_groups[0]["lr"] = rate * (1 - (recipe.first_step + step) / recipe.schedule_steps)
        optimizer.step()
        state["optimizer"] = optimizer.state_dict()
        yield values_K.detach().numpy()

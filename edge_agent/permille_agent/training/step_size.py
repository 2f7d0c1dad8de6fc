"""Search for epsilon and the learning rate of a zeroth-order run.

In the formulas, k is the number of trained weights, q the number of directions of a step, and g the vector of
projected gradients.

**Epsilon.** The first candidate satisfies `epsilon * sqrt(k) = 0.5`. The projected gradients at epsilon and
2 epsilon must agree: `|g(epsilon) - g(2 epsilon)| / |g(epsilon)| <= 0.3`. Otherwise smaller and larger values
are tried. Forward-mode derivatives are exact and need no check.

**Learning rate.** Steps are normalised: the projected gradients of a step are divided by their root mean
square, so the learning rate alone decides the length of a step. The first candidate gives a length of 0.5,
`learning_rate * sqrt(k / q) = 0.5`, because the mean of q directions is `sqrt(q)` times shorter than one
direction. Trials compare this candidate with a third and three times its value. A trial makes a few steps
from the base and measures the loss on the select split. If the best value is at an end of the range, the
range is extended.

The rules are derived in docs/adr/0030. Each result is a function of the package, the data, the seed, the
options and earlier results.
"""

import hashlib
import math
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from permille.choices import EstimatorKind
from permille.errors import PermilleError
from permille.zo.estimators import Descent, estimate
from permille.zo.header import LogHeader, Schedule
from permille.zo.lattice import step_unit_exponent_for, values
from permille.zo.steps import apply_record
from permille_agent.training.evaluation import mean_loss
from permille_agent.training.run import Run, finite_or_none, widest_block

EPSILON_NORM = 0.5  # length of the first candidate's perturbation
STEP_NORM = 0.5  # length of the first candidate's step
MAX_RELATIVE_ERROR = 0.3  # largest relative difference of projected gradients at epsilon and 2 epsilon
PROBE_STEPS = 4  # batches on which projected gradients are compared
EPSILON_FACTORS = (1.0, 0.5, 2.0, 0.25, 4.0)  # candidates, the nearest ones first
TRIAL_FACTOR = 3.0  # ratio of neighbouring learning rates
MAX_TRIALS = 6  # bounds the time of a search that keeps extending its range


class SearchFailed(PermilleError):  # noqa: N818 - a way for a run to end
    """No epsilon or step size works for this package and this text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Accuracy and size of the projected gradients at one epsilon. None replaces numbers that are not finite.

    Attributes:
        epsilon: scale of the perturbations.
        relative_error: relative difference to the projected gradients at 2 epsilon. 0 for forward-mode
            derivatives, which are exact.
        g_rms: root mean square of the projected gradients.
    """

    epsilon: float
    relative_error: float | None
    g_rms: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LossFound:
    """A loss on the select split, or on the test split of a short text. None if it is not finite."""

    loss: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSize:
    """The learning rate with the lowest loss. The rate `start * TRIAL_FACTOR**p` has the loss `losses[p]`."""

    learning_rate: float
    start: float
    losses: dict[int, float | None]


def search_seed(seed: int, stage: str) -> int:
    """Derive a seed for a stage of the search, so that its directions differ from the run's."""
    digest = hashlib.sha256(f"permille-search-1\0{seed}\0{stage}".encode()).digest()
    return int.from_bytes(digest[:8], "big")


def find_epsilon(run: Run) -> Probe:
    """Find an epsilon with accurate projected gradients.

    Raises:
        SearchFailed: the loss does not depend on the weights, or no epsilon is accurate.
    """
    start = EPSILON_NORM / math.sqrt(run.trained.stop - run.trained.start)
    if run.options.estimator is EstimatorKind.FORWARD:
        probe = run.folder.once("search-forward", Probe, lambda: _probe(run, start))
        if not probe.g_rms:
            raise SearchFailed(f"The gradient on this text is 0 or not finite: {probe.g_rms}.")
        return probe
    errors = []
    for number, factor in enumerate(EPSILON_FACTORS, start=1):
        probe = run.folder.once(f"search-epsilon-{number}", Probe, partial(_probe, run, factor * start))
        error = probe.relative_error
        if error is not None and error <= MAX_RELATIVE_ERROR and probe.g_rms:
            return probe
        errors.append(error)
    tried = ", ".join(f"{factor * start:.2g}" for factor in EPSILON_FACTORS)
    raise SearchFailed(
        f"No epsilon gives a relative error of the gradient of at most {MAX_RELATIVE_ERROR}: got {errors} "
        f"for epsilon {tried}. The engine's arithmetic is too coarse for this package, or the loss is too "
        "curved. Train with --method gradient, or choose another --engine."
    )


def find_step_size(run: Run, epsilon: float, trial_steps: int) -> StepSize:
    """Find the learning rate whose trial steps reach the lowest loss.

    Raises:
        SearchFailed: no learning rate gives a finite loss.
    """
    start = STEP_NORM / step_spread(run.descent(seed=0, epsilon=epsilon).header)
    base_loss(run)
    losses: dict[int, float] = {}
    wanted = [-1, 0, 1]  # powers of `TRIAL_FACTOR`
    while wanted:
        for power in wanted:
            trial = partial(_trial, run, epsilon, start * TRIAL_FACTOR**power, trial_steps)
            found = run.folder.once(f"search-trial-{power}", LossFound, trial)
            losses[power] = math.inf if found.loss is None else found.loss
        # Of equal losses, the smaller learning rate wins.
        best = min(losses, key=lambda power: (losses[power], power))
        edge = best - 1 if best == min(losses) else best + 1 if best == max(losses) else None
        wanted = [edge] if edge is not None and len(losses) < MAX_TRIALS else []
    if not math.isfinite(losses[best]):
        raise SearchFailed("The loss is not finite after a few steps, whatever their size.")
    return StepSize(
        learning_rate=start * TRIAL_FACTOR**best,
        start=start,
        losses={power: finite_or_none(loss) for power, loss in sorted(losses.items())},
    )


def _trial(run: Run, epsilon: float, learning_rate: float, steps: int) -> LossFound:
    """Make a few steps from the base with one learning rate, and return the loss of the last state."""
    run.progress.phase(f"finding the step size: a trial of {learning_rate:.2g}")
    descent = run.descent(
        # Use the same directions in all trials, so that only the learning rate differs.
        seed=search_seed(run.options.seed, "race"),
        epsilon=epsilon,
        learning_rate=learning_rate,
        total_steps=steps,
        schedule=Schedule.LINEAR,
    )
    descent = with_step_unit(descent)
    header, s_K = descent.header, np.zeros(run.package.k, dtype=np.int64)
    for step in range(steps):
        record = run.take_step(descent, s_K, step)
        apply_record(s_K, record, header)
        run.progress.step(step + 1, steps, record.loss)
    return _loss_found(run, values(run.w_base_K, s_K, header.step_unit_exponent))


def base_loss(run: Run) -> float:
    """Return the loss of the start. Only the first call measures it.

    Raises:
        SearchFailed: the loss is not finite.
    """
    found = run.folder.once("search-base", LossFound, lambda: _loss_found(run, run.first_values()))
    if found.loss is None:
        raise SearchFailed("The loss of the base model on this text is not finite.")
    return found.loss


def with_step_unit(descent: Descent) -> Descent:
    """Fit the step unit to the learning rate."""
    header = descent.header
    # The 1.0 is the root mean square of normalised projected gradients.
    exponent = step_unit_exponent_for(header.learning_rate, 1.0, widest_block(header), header.sigma)
    return replace(descent, header=replace(header, step_unit_exponent=exponent))


def step_spread(header: LogHeader) -> float:
    """Return the length of a step at the learning rate 1: the root of the sum of k / q over all blocks."""
    total = 0.0
    for queries, tensors in header.blocks():
        weights = header.weights_of(tensors)
        total += (weights.stop - weights.start) / (queries.stop - queries.start)
    return math.sqrt(total)


def _probe(run: Run, epsilon: float) -> Probe:
    g_N, error = np.asarray(_projected(run, epsilon)), 0.0
    # The forward mode is exact and needs no second estimate.
    if run.options.estimator is not EstimatorKind.FORWARD:
        g2_N = np.asarray(_projected(run, 2 * epsilon))
        with np.errstate(invalid="ignore", divide="ignore"):
            error = float(np.linalg.norm(g_N - g2_N) / np.linalg.norm(g_N))
    g_rms = math.sqrt(sum(g * g for g in g_N.tolist()) / len(g_N))
    return Probe(epsilon=epsilon, relative_error=finite_or_none(error), g_rms=finite_or_none(g_rms))


def _projected(run: Run, epsilon: float) -> list[float]:
    """Estimate projected gradients at the base, on the first batches and along the search's directions."""
    # Use the same directions for every epsilon, so that the results can be compared.
    seed = search_seed(run.options.seed, "probe")
    run.progress.phase(f"finding epsilon: derivatives at {epsilon:.2g}")
    descent = run.descent(seed=seed, epsilon=epsilon, total_steps=PROBE_STEPS)
    s_K = np.zeros(run.package.k, dtype=np.int64)
    scalars: list[float] = []
    for step in range(PROBE_STEPS):
        loss, g_Q = estimate(run.engine, run.batches(step), descent, s_K, step)
        run.progress.step(step + 1, PROBE_STEPS, loss)
        scalars += g_Q.tolist()
    return scalars


def _loss_found(run: Run, values_K: NDArray[np.float32]) -> LossFound:
    rows = run.prepared.select or run.prepared.test
    return LossFound(loss=finite_or_none(mean_loss(run.engine, values_K, rows)))

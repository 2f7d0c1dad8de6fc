"""How far to look and how far to step: epsilon and the learning rate, found on the device before training.

Epsilon starts where `epsilon * sqrt(k)` is about 0.5, and is checked: the projected gradients at epsilon and
at 2 epsilon, as the run's own estimator gives them, must agree,
`|g(epsilon) - g(2 epsilon)| / |g(epsilon)| <= 0.3`, else a smaller or larger one is tried. Forward mode has
no epsilon, so nothing is checked there.

The learning rate starts where one step has norm 0.4: `learning_rate * g_rms * sqrt(k / q)`, because the mean
of q directions is `sqrt(q)` times shorter than one. It is raced against a third and three times of it: a few
steps each from the base, thrown away, judged on the select split; while the best is at an end of the range,
the range grows there. Both rules are in docs/adr/0071.

Every result is a function of (package, data, seed, options) and of results before it.
"""

import hashlib
import math
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from permille.errors import PermilleError
from permille.zo.estimators import estimate
from permille.zo.header import EstimatorKind, LogHeader
from permille.zo.lattice import step_unit_exponent_for, values
from permille.zo.steps import apply_record, take_step
from permille_agent.training.evaluation import mean_loss
from permille_agent.training.run import Json, RunFolder, finite_or_none
from permille_agent.training.setup import Setup, step_spread, widest_block

EPSILON_NORM = 0.5
STEP_NORM = 0.4
MAX_RELATIVE_ERROR = 0.3
PROBE_STEPS = 4
EPSILON_FACTORS = (1.0, 0.5, 2.0, 0.25, 4.0)
RACE_FACTOR = 3.0
MAX_RACES = 6


class SearchFailed(PermilleError):  # noqa: N818 - an end of a run, reported as such
    """No epsilon or no step size works for this package on this text."""


def search_seed(seed: int, stage: str) -> int:
    """The seed of thrown-away directions: never those of the run itself."""
    digest = hashlib.sha256(f"permille-search-1\0{seed}\0{stage}".encode()).digest()
    return int.from_bytes(digest[:8], "big")


def find_epsilon(setup: Setup, run: RunFolder) -> Json:
    """Epsilon, its relative error and the rms of the projected gradients, as {epsilon, relative_error,
    g_rms}.

    Raises:
        SearchFailed: the loss does not depend on the weights, or no epsilon gives a usable gradient.
    """
    start = EPSILON_NORM / math.sqrt(len(setup.w_base_K))
    if setup.options.estimator is EstimatorKind.FORWARD:
        probe = run.once("search-forward", lambda: {"g_rms": finite_or_none(_rms(_projected(setup, start)))})
        g_rms = probe["g_rms"]
        if not g_rms:
            raise SearchFailed(f"expected a finite gradient other than 0 on this text, got {g_rms}")
        return {"epsilon": start, "relative_error": 0.0, "g_rms": g_rms}
    candidates = {str(tried): start * factor for tried, factor in enumerate(EPSILON_FACTORS, start=1)}
    errors = []
    for name, epsilon in candidates.items():
        probe = run.once(f"search-epsilon-{name}", partial(_probe, setup, epsilon))
        errors.append(probe["relative_error"])
        if probe["relative_error"] is not None and probe["relative_error"] <= MAX_RELATIVE_ERROR:
            return {"epsilon": epsilon, **probe}
    tried_epsilons = ", ".join(f"{epsilon:.2g}" for epsilon in candidates.values())
    raise SearchFailed(
        f"expected a relative error of the gradient of at most {MAX_RELATIVE_ERROR}, got {errors} for "
        f"epsilon {tried_epsilons}: this engine's arithmetic is too coarse for this package, or the loss too "
        "curved along these directions"
    )


def find_learning_rate(setup: Setup, run: RunFolder, epsilon: float, g_rms: float, race_steps: int) -> Json:
    """The learning rate that wins the race, with all losses: {learning_rate, start, races, base_loss}.

    Raises:
        SearchFailed: no learning rate gave a finite loss.
    """
    header = setup.header(seed=0, epsilon=epsilon)
    start = STEP_NORM / (g_rms * step_spread(header, setup.exponents))
    base_loss = run.once("search-base", lambda: {"loss": finite_or_none(_base_loss(setup))})["loss"]
    if base_loss is None:
        raise SearchFailed("expected a finite loss of the base model on this text, got none")
    losses: dict[int, float] = {}
    wanted = [-1, 0, 1]
    while wanted:
        for power in wanted:
            racer = Racer(setup, epsilon, g_rms, start * RACE_FACTOR**power, race_steps)
            result = run.once(f"search-race-{power}", racer.race)
            losses[power] = math.inf if result["loss"] is None else float(result["loss"])
        best = min(losses, key=lambda power: (losses[power], power))
        edge = best - 1 if best == min(losses) else best + 1 if best == max(losses) else None
        wanted = [edge] if edge is not None and len(losses) < MAX_RACES else []
    if not math.isfinite(losses[best]):
        raise SearchFailed("expected a finite loss after a few steps of some size, got none")
    return {
        "learning_rate": start * RACE_FACTOR**best,
        "start": start,
        "races": {str(power): finite_or_none(loss) for power, loss in sorted(losses.items())},
        "base_loss": base_loss,
    }


@dataclass(frozen=True, slots=True)
class Racer:
    """A few steps from the base, with one learning rate. The steps are thrown away.

    Attributes:
        g_rms: root mean square of the projected gradients, for the step unit.
    """

    setup: Setup
    epsilon: float
    g_rms: float
    learning_rate: float
    steps: int

    def race(self) -> Json:
        """What is durable of it."""
        return {
            "learning_rate": self.learning_rate,
            "steps": self.steps,
            "loss": finite_or_none(self._loss()),
        }

    def _loss(self) -> float:
        """Loss on the select split after the steps."""
        setup, header = self.setup, self._header()
        s_K = np.zeros(header.k, dtype=np.int64)
        for step in range(self.steps):
            batch = setup.batches(step)
            record = take_step(setup.engine, batch, setup.descent(header), s_K, step, clip=None)
            apply_record(s_K, record, header, setup.exponents)
        values_K = values(setup.w_base_K, s_K, header.step_unit_exponent)
        return mean_loss(setup.engine, values_K, setup.prepared.select)

    def _header(self) -> LogHeader:
        header = self.setup.header(
            seed=search_seed(self.setup.options.seed, "race"),
            epsilon=self.epsilon,
            learning_rate=self.learning_rate,
            total_steps=self.steps,
            schedule=self.setup.options.schedule,
        )
        exponent = step_unit_exponent_for(self.learning_rate, self.g_rms, widest_block(header), header.sigma)
        return replace(header, step_unit_exponent=exponent)


def _base_loss(setup: Setup) -> float:
    return mean_loss(setup.engine, setup.w_base_K, setup.prepared.select)


def _probe(setup: Setup, epsilon: float) -> Json:
    g_N = np.asarray(_projected(setup, epsilon))
    g2_N = np.asarray(_projected(setup, 2 * epsilon))
    with np.errstate(invalid="ignore", divide="ignore"):
        error = float(np.linalg.norm(g_N - g2_N) / np.linalg.norm(g_N))
    return {"relative_error": finite_or_none(error), "g_rms": finite_or_none(_rms(g_N.tolist()))}


def _projected(setup: Setup, epsilon: float) -> list[float]:
    """Projected gradients at the base, along thrown-away directions on the first batches."""
    header = setup.header(
        seed=search_seed(setup.options.seed, "probe"),
        epsilon=epsilon,
        total_steps=PROBE_STEPS,
    )
    s_K = np.zeros(header.k, dtype=np.int64)
    scalars: list[float] = []
    for step in range(PROBE_STEPS):
        batch = setup.batches(step)
        _, g_Q = estimate(setup.engine, batch, setup.descent(header), s_K, step)
        scalars += g_Q.tolist()
    return scalars


def _rms(scalars: list[float]) -> float:
    return math.sqrt(sum(g * g for g in scalars) / len(scalars))

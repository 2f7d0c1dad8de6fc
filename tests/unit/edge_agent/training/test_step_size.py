"""Tests of epsilon and the step size: the rules, their limits, and reuse of stored results."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from permille.choices import EstimatorKind
from permille.package.reader import Package
from permille.zo.estimators import Batch
from permille_agent.training.run import Run, RunFolder
from permille_agent.training.step_size import (
    EPSILON_NORM,
    PROBE_STEPS,
    STEP_NORM,
    TRIAL_FACTOR,
    SearchFailed,
    find_epsilon,
    find_step_size,
    search_seed,
)
from tests.bigram_engine import BigramEngine
from tests.packages import tiny_package
from tests.unit.edge_agent.runs import run_of, user_text

Function = Callable[[NDArray[np.float64]], float]


class FunctionEngine(BigramEngine):
    """An engine with a loss that is a function of the distance from the base. The text does not matter."""

    def __init__(self, package: Package, function: Function, slope: float = 0.0) -> None:
        super().__init__(package)
        self._base_K = package.values().astype(np.float64)
        self._function = function
        self._slope = slope
        self.calls = 0

    def losses(self, values_VK: NDArray[np.float32], batch: Batch) -> NDArray[np.float32]:
        """Return the function's value for each variant."""
        self.calls += 1
        return np.array([self._function(values_K - self._base_K) for values_K in values_VK], dtype=np.float32)

    def gradient(self, values_K: NDArray[np.float32], batch: Batch) -> tuple[float, NDArray[np.float32]]:
        """Return the loss and a constant slope along the first weight."""
        gradient_K = np.zeros(self.k, np.float32)
        gradient_K[0] = self._slope
        return float(self._function(values_K - self._base_K)), gradient_K

    def token_losses(self, values_K: NDArray[np.float32], batch: Batch) -> NDArray[np.float32]:
        """Return the function's value at every target."""
        loss = self._function(values_K - self._base_K)
        return np.full(int(batch.target_BT.sum()), loss, dtype=np.float32)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return tiny_package(tmp_path_factory.mktemp("package"))


SPSA = EstimatorKind.SPSA


def _begin(package: Package, folder: Path, function: Function, **changes: Any) -> Run:
    engine = FunctionEngine(package, function, slope=2.0)
    return run_of(package, engine, user_text(folder), folder, **changes)


def test_epsilon_starts_at_a_norm_of_a_half(package: Package, tmp_path: Path) -> None:
    run = _begin(package, tmp_path, lambda d: 3.0 + 0.5 * float(d[0]), estimator=SPSA)
    found = find_epsilon(run)
    assert found.epsilon * math.sqrt(package.k) == pytest.approx(EPSILON_NORM)
    assert found.g_rms == pytest.approx(0.5, rel=1e-3)
    assert (found.relative_error or 0.0) < 1e-3


class Told:
    """A progress display that keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def phase(self, name: str) -> None:
        self.lines.append(name)

    def step(self, done: int, total: int, loss: float) -> None:
        self.lines.append(f"{done} of {total}")

    def evaluated(self, step: int, loss: float, first_loss: float) -> None: ...


def test_the_search_shows_its_trials_and_their_steps(package: Package, tmp_path: Path) -> None:
    run = _begin(package, tmp_path, lambda d: 3.0 + 0.5 * float(d[0]), estimator=SPSA)
    told = Told()
    found = find_step_size(replace(run, progress=told), find_epsilon(run).epsilon, trial_steps=2)
    rates = [found.start * TRIAL_FACTOR**power for power in (-1, 0, 1)]
    tried = [f"finding the step size: a trial of {rate:.2g}" for rate in rates]
    assert [line for line in told.lines if line in tried] == tried
    assert [told.lines.count(f"{step} of 2") for step in (1, 2)] == [len(found.losses)] * 2
    told.lines.clear()
    (tmp_path / "another").mkdir()
    find_epsilon(replace(run, progress=told, folder=RunFolder(tmp_path / "another")))
    assert told.lines[0].startswith("finding epsilon: derivatives at ")
    assert told.lines[-1] == f"{PROBE_STEPS} of {PROBE_STEPS}"


def test_epsilon_shrinks_where_the_loss_is_too_curved(package: Package, tmp_path: Path) -> None:
    start = EPSILON_NORM / math.sqrt(package.k)
    # The sine turns between `start` and `2 * start`. At smaller distances it is nearly straight.
    run = _begin(package, tmp_path, lambda d: 3.0 + math.sin(1.4 * float(d[0]) / start), estimator=SPSA)
    found = find_epsilon(run)
    assert found.epsilon in (pytest.approx(start / 2), pytest.approx(start / 4))
    assert (found.relative_error or 1.0) <= 0.3


def test_epsilon_grows_where_the_arithmetic_is_coarse(package: Package, tmp_path: Path) -> None:
    start = EPSILON_NORM / math.sqrt(package.k)
    grid = 1.7 * start
    run = _begin(package, tmp_path, lambda d: 3.0 + round(float(d[0]) / grid) * grid, estimator=SPSA)
    assert find_epsilon(run).epsilon > start


def test_no_usable_epsilon_is_refused(package: Package, tmp_path: Path) -> None:
    noise = np.random.Generator(np.random.PCG64(0))
    run = _begin(package, tmp_path, lambda _d: float(noise.normal()))
    with pytest.raises(SearchFailed, match=r"relative error of the gradient of at most 0\.3"):
        find_epsilon(run)


@pytest.mark.parametrize("flat", [0.0, math.nan])
def test_a_loss_without_gradient_is_refused(package: Package, tmp_path: Path, flat: float) -> None:
    with pytest.raises(SearchFailed):
        find_epsilon(_begin(package, tmp_path, lambda _d: flat))


def test_forward_mode_needs_no_epsilon(package: Package, tmp_path: Path) -> None:
    found = find_epsilon(_begin(package, tmp_path, lambda _d: 1.0, estimator=EstimatorKind.FORWARD))
    assert found.relative_error == 0.0
    assert found.g_rms == pytest.approx(2.0)


def _bowl(package: Package, best_norm: float) -> Function:
    """Return a loss that is smallest at one point, `best_norm` away from the base."""
    target_K = np.full(package.k, best_norm / math.sqrt(package.k))
    return lambda d: 3.0 + float(np.linalg.norm(d - target_K)) / (1.0 + best_norm)


def test_trials_start_at_the_norm_rule_and_the_best_is_taken(package: Package, tmp_path: Path) -> None:
    run = _begin(package, tmp_path, _bowl(package, 2.0))
    found = find_step_size(run, 0.01, 3)
    norm = found.start * math.sqrt(package.k / run.options.queries)
    assert norm == pytest.approx(STEP_NORM)
    best = min(found.losses, key=lambda power: found.losses[power] or math.inf)
    assert found.learning_rate == pytest.approx(found.start * TRIAL_FACTOR**best)
    assert set(found.losses) >= {-1, 0, 1}


def test_the_range_grows_where_the_best_is_at_the_end(package: Package, tmp_path: Path) -> None:
    falling = _begin(package, tmp_path, lambda d: 3.0 + float(d @ d))
    assert min(find_step_size(falling, 0.01, 2).losses) < -1


def test_losses_that_are_not_finite_are_never_the_best(package: Package, tmp_path: Path) -> None:
    run = _begin(package, tmp_path, lambda d: 3.0 if np.linalg.norm(d) < 0.4 else math.nan)
    found = find_step_size(run, 0.001, 3)
    assert found.learning_rate > 0
    assert all(loss is None or loss == 3.0 for loss in found.losses.values())


def test_a_base_without_a_finite_loss_is_refused(package: Package, tmp_path: Path) -> None:
    with pytest.raises(SearchFailed, match="loss of the base model on this text is not finite"):
        find_step_size(_begin(package, tmp_path, lambda _d: math.inf), 0.01, 2)


def test_what_was_found_is_not_computed_again(package: Package, tmp_path: Path) -> None:
    run = _begin(package, tmp_path, _bowl(package, 2.0))
    first = find_epsilon(run), find_step_size(run, 0.01, 2)
    calls = run.engine.calls  # type: ignore[attr-defined]
    assert (find_epsilon(run), find_step_size(run, 0.01, 2)) == first
    assert run.engine.calls == calls  # type: ignore[attr-defined]


def test_thrown_away_directions_are_never_those_of_the_run() -> None:
    seeds = {search_seed(seed, stage) for seed in range(50) for stage in ("probe", "race")}
    assert len(seeds) == 100
    assert not seeds & set(range(50))

"""Tests of training, tuning, and names of methods."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from permille.errors import InputError
from permille.zo.estimators import Batch
from permille_lab.evaluate import training, unfinished
from permille_lab.evaluate.methods import Order, TrainedSet, method
from permille_lab.evaluate.training import Recipe, Trained, train, train_safely
from permille_lab.evaluate.tuning import (
    GRID_FACTOR,
    MAX_ATTEMPTS,
    TUNING_SEED_OFFSET,
    Trial,
    tune,
    tuning_seed,
)
from permille_lab.models import trainables
from tests.unit.engines.tiny import tiny_batch, tiny_model


@pytest.mark.parametrize(("order", "steps", "factor"), [(Order.ZEROTH, 30, 1.0), (Order.FIRST, 8, 3.0)])
def test_training_lowers_the_loss_and_keeps_the_best(order: Order, steps: int, factor: float) -> None:
    trainable = trainables.lora(tiny_model("llama"), 4, frozen_a=False, seed=0)
    batch = tiny_batch()

    def validate(values_K: NDArray[np.float32]) -> float:
        return float(trainable.losses(values_K[None], batch)[0])

    recipe = Recipe(order=order, steps=steps, step_factor=factor, seed=0, queries=4, evaluations=4)
    trained = train(trainable, lambda _: batch, validate, recipe)
    assert trained.loss < trained.curve[0][1]
    assert trained.loss == min(loss for _, loss in trained.curve)
    assert validate(trained.values_K) == trained.loss
    assert [step for step, _ in trained.curve] == [0, *(math.ceil(steps * n / 4) for n in (1, 2, 3, 4))]
    again = train(trainable, lambda _: batch, validate, recipe)
    np.testing.assert_array_equal(again.values_K, trained.values_K)


@pytest.mark.parametrize("order", Order)
def test_a_killed_run_continues_with_its_last_kept_step(
    order: Order, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unfinished, "EVERY_S", 0.0)
    trainable = trainables.lora(tiny_model("llama"), 4, frozen_a=False, seed=0)
    recipe = Recipe(order=order, steps=6, step_factor=1.0, seed=0, evaluations=3)
    taken: list[int] = []

    def batches(step: int) -> Batch:
        taken.append(step)
        if taken.count(4) == 1 and step == 4:
            raise KeyboardInterrupt
        return tiny_batch()

    def validate(values_K: NDArray[np.float32]) -> float:
        return float(trainable.losses(values_K[None], tiny_batch())[0])

    with pytest.raises(KeyboardInterrupt):
        train(trainable, batches, validate, recipe, tmp_path)
    taken.append(-1)
    continued = train(trainable, batches, validate, recipe, tmp_path)
    again = taken[taken.index(-1) + 1 :]
    # Zeroth order first measures its natural step size again, on the batches 0 to 3.
    assert again == ([0, 1, 2, 3, 4, 5] if order is Order.ZEROTH else [4, 5])
    whole = train(trainable, lambda _: tiny_batch(), validate, recipe)
    np.testing.assert_array_equal(continued.values_K, whole.values_K)
    assert continued.curve == whole.curve
    finished = train(trainable, lambda _: tiny_batch(), validate, recipe, tmp_path)
    assert (finished.curve, finished.step) == (whole.curve, whole.step)
    # Another recipe is another run.
    other = train(trainable, lambda _: tiny_batch(), validate, replace(recipe, seed=1), tmp_path)
    assert not np.array_equal(other.values_K, whole.values_K) or order is Order.FIRST


def test_a_run_that_diverges_keeps_what_was_best() -> None:
    trainable = trainables.lora(tiny_model("llama"), 4, frozen_a=False, seed=0)
    recipe = Recipe(order=Order.FIRST, steps=6, step_factor=1e30, seed=0, evaluations=3)
    trained = train(
        trainable,
        lambda _: tiny_batch(),
        lambda values_K: float(trainable.losses(values_K[None], tiny_batch())[0]),
        recipe,
    )
    assert trained.step == 0
    np.testing.assert_array_equal(trained.values_K, trainable.base_K)


def _attempts(
    losses: Mapping[float, tuple[float, ...]], monkeypatch: pytest.MonkeyPatch
) -> tuple[Trained, list[float]]:
    """Return the chosen step factor for these evaluation losses, and the tried factors."""
    tried: list[float] = []

    def curve_of(*given: Any) -> Trained:
        factor = round(given[3].step_factor, 6)
        tried.append(factor)
        curve = tuple(enumerate(losses[factor]))
        step, loss = min(curve, key=lambda point: point[1] if math.isfinite(point[1]) else math.inf)
        return Trained(
            values_K=np.full(1, factor, np.float32), step=step, loss=loss, curve=curve, step_factor=factor
        )

    monkeypatch.setattr(training, "train", curve_of)
    recipe = Recipe(order=Order.ZEROTH, steps=2, step_factor=10.0, seed=0)
    trainable = trainables.lora(tiny_model("llama"), 4, frozen_a=False, seed=0)
    return train_safely(trainable, lambda _: tiny_batch(), lambda _: 0.0, recipe), tried


@pytest.mark.parametrize(
    ("losses", "factor", "attempts"),
    [
        ({10.0: (3.0, 3.0, 1.0)}, 10.0, 1),
        ({10.0: (3.0, 3.1, 2.5), 3.162278: (3.0, 2.8, 2.0)}, 3.162278, 2),
        ({10.0: (3.0, 1.5, 9.0), 3.162278: (3.0, 2.8, 2.0)}, 10.0, 2),
        ({10.0: (3.0, math.nan), 3.162278: (3.0, 5.0, 4.0), 1.0: (3.0, 2.9, 2.8)}, 1.0, 3),
        ({10.0: (3.0, 4.0, 5.0), 3.162278: (3.0, 5.0, 4.0), 1.0: (3.0, 3.2, 3.1)}, 10.0, 3),
    ],
)
def test_a_run_that_rose_above_the_base_begins_anew_with_smaller_steps(
    losses: Mapping[float, tuple[float, ...]], factor: float, attempts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, tried = _attempts(losses, monkeypatch)
    assert (trained.values_K[0], trained.attempts) == (np.float32(factor), attempts)
    assert trained.step_factor == factor
    assert tried == list(losses)
    assert trained.loss == min(loss for curve in losses.values() for loss in curve if math.isfinite(loss))


def search(losses: Mapping[int, float | Trial], tried: list[int] | None = None) -> Callable[[float], Trial]:
    """Return the runs of one seed.

    `losses` has their losses by the power of the factor. Other powers diverge.
    """

    def run(factor: float) -> Trial:
        power = round(math.log(factor, GRID_FACTOR))
        if tried is not None:
            tried.append(power)
        found = losses.get(power, math.nan)
        return found if isinstance(found, Trial) else Trial(loss=found)

    return run


def test_the_grid_can_be_of_given_factors() -> None:
    tried: list[float] = []

    def run(factor: float) -> Trial:
        tried.append(factor)
        return Trial(loss=abs(math.log10(factor) - 3))

    tuned = tune(run, middle=10.0, factor=10.0)
    assert tried == [1.0, 10.0, 100.0, 1000.0, 10_000.0]
    assert (tuned.step_factor, tuned.on_edge) == (1000.0, False)


def test_the_grid_grows_at_its_edge_until_the_best_is_inside() -> None:
    tried: list[int] = []
    tuned = tune(search({power: abs(power - 3) for power in range(-9, 9)}, tried), trials=3, extensions=4)
    assert tuned.step_factor == pytest.approx(GRID_FACTOR**3)
    assert sorted(tuned.losses) == sorted(tried) == [-1, 0, 1, 2, 3, 4]
    assert not tuned.on_edge
    assert tuned.medians == {}


def test_other_seeds_choose_among_the_best_and_its_neighbours_by_the_median() -> None:
    """The factor with the best median wins, although the first seed prefers another.

    A factor at which most seeds diverge never wins.
    """
    first = {-1: 3.0, 0: 1.0, 1: 2.0, 2: 9.0}
    others = ({-1: 3.1, 0: 1.1, 1: 0.5, 2: 0.8}, {-1: 2.9, 0: 1.2, 1: 0.6, 2: 0.7})
    tried: list[list[int]] = [[], [], []]
    tuned = tune(*(search(losses, tried[n]) for n, losses in enumerate((first, *others))), trials=3)
    assert tuned.step_factor == pytest.approx(GRID_FACTOR)
    assert tried == [[-1, 0, 1, 2]] * 3
    assert tuned.medians == {-1: 3.0, 0: 1.1, 1: 0.6, 2: 0.8}
    assert not tuned.on_edge
    assert tune(search(first), trials=3).step_factor == 1.0
    diverging = [search({-1: 2.0, 0: 1.0, 1: 0.5, 2: 0.9}), *[search({0: 1.0, -1: 2.0})] * 2]
    tuned = tune(*diverging, trials=3)
    assert tuned.step_factor == pytest.approx(1.0)
    assert tuned.medians[2] == math.inf


def test_the_median_goes_on_to_a_better_neighbour_while_the_grid_may_grow() -> None:
    first = {-1: 3.0, 0: 1.0, 1: 1.1, 2: 1.2, 3: 1.3}
    other = {-1: 3.0, 0: 1.5, 1: 0.9, 2: 0.5, 3: 0.7}
    tuned = tune(search(first), search(other), search(other), trials=3, extensions=4)
    assert tuned.step_factor == pytest.approx(GRID_FACTOR**2)
    assert sorted(tuned.medians) == [-1, 0, 1, 2, 3]
    assert not tuned.on_edge
    short = tune(search(first), search(other), search(other), trials=3, extensions=1)
    assert short.step_factor == pytest.approx(GRID_FACTOR**2)
    assert short.on_edge
    assert 3 not in short.losses


def test_the_search_compares_what_runs_that_begin_anew_would_keep() -> None:
    """Two seeds do better with a long step. The third falls back to the short one."""
    first: dict[int, float | Trial] = {-1: 2.0, 0: 1.0, 1: Trial(loss=1.9, rose=True)}
    other = {-1: 2.0, 0: 1.4, 1: 0.6, 2: 0.8}
    tried: list[int] = []
    tuned = tune(search(first, tried), search(other), search(other | {1: 0.7}), trials=3)
    assert tuned.medians[1] == 0.7
    assert tuned.step_factor == pytest.approx(GRID_FACTOR)
    risen = [search(first), *[search({-1: 2.0, 0: 1.4, 1: Trial(loss=1.8, rose=True)})] * 2]
    tuned = tune(*risen, trials=3)
    assert tuned.medians == {-1: 2.0, 0: 1.4, 1: 1.4}  # in a tie, the shorter step wins
    assert tuned.step_factor == 1.0
    rounded = search({-1: 2.0, 0: 1.4, 1: 1.399999, 2: 1.41})
    assert tune(rounded, rounded, rounded, trials=3).step_factor == 1.0
    assert len(tried) == len(set(tried))
    always = {power: Trial(loss=3.0 - power, rose=True) for power in range(-9, 9)}
    below = tune(search(always), search(always), search(always), trials=3, extensions=2)
    assert below.medians[2] == 1.0
    assert below.on_edge


def test_no_more_attempts_are_compared_than_are_made() -> None:
    losses = {power: Trial(loss=5.0, rose=True) for power in range(-9, 9)} | {
        1 - MAX_ATTEMPTS: Trial(loss=1.0)
    }
    tuned = tune(search({**losses, 0: Trial(loss=0.5)}), *[search(losses)] * 2, trials=3)
    assert tuned.medians[0] == 1.0
    assert tuned.medians[1] == 5.0


def test_a_grid_that_ends_on_its_edge_says_so_and_divergence_never_wins() -> None:
    tuned = tune(search({-1: 3.0, 0: 2.0, 1: 1.0}), trials=3, extensions=4)
    assert tuned.step_factor == pytest.approx(GRID_FACTOR)
    assert not tuned.on_edge  # training diverged beyond it
    assert tune(search({power: -power for power in range(9)}), trials=3, extensions=2).on_edge
    with pytest.raises(InputError, match="expected a finite loss"):
        tune(search({}))
    with pytest.raises(InputError, match="odd"):
        tune(search({0: 1.0}), trials=2)


def test_tuning_seeds_are_no_reporting_seeds() -> None:
    assert {tuning_seed(seed) for seed in range(100)}.isdisjoint(range(TUNING_SEED_OFFSET))
    with pytest.raises(InputError, match="reporting seed"):
        tuning_seed(TUNING_SEED_OFFSET)


def test_methods_are_parsed_by_name() -> None:
    assert method("zo:sensitive-c4").trained is TrainedSet.SENSITIVE_C4
    fa = method("fo:lora-fa-16")
    assert (fa.order, fa.trained, fa.size) == (Order.FIRST, TrainedSet.LORA_FA, 16)
    assert method("icl:8").shots == 8
    assert method("zero-shot").order is None


@pytest.mark.parametrize(
    "name", ["zo:lora", "zo:lora-0", "zo:full-3", "xx:full", "icl:0", "zo:", "", "zo:lora-fa"]
)
def test_what_is_no_method_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="expected"):
        method(name)

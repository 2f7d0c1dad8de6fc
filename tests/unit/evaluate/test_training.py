"""Training, tuning and the names of methods."""

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from permille.errors import InputError
from permille.evaluate import trainables
from permille.evaluate.methods import Order, TrainedSet, method
from permille.evaluate.training import Recipe, train
from permille.evaluate.tuning import GRID_FACTOR, TUNING_SEED_OFFSET, tune, tuning_seed
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


def test_the_grid_grows_at_its_edge_until_the_best_is_inside() -> None:
    tried: list[float] = []

    def loss_at(factor: float) -> float:
        tried.append(factor)
        return abs(math.log(factor / GRID_FACTOR**3))

    tuned = tune(loss_at, trials=3, extensions=4)
    assert tuned.step_factor == pytest.approx(GRID_FACTOR**3)
    assert sorted(tuned.losses) == [-1, 0, 1, 2, 3, 4]
    assert not tuned.on_edge
    assert len(tried) == len(set(tried))


def test_a_grid_that_ends_on_its_edge_says_so_and_divergence_never_wins() -> None:
    tuned = tune(lambda factor: 1 / factor if factor < 5 else math.nan, trials=3, extensions=4)
    assert tuned.step_factor == pytest.approx(GRID_FACTOR)
    assert not tuned.on_edge  # beyond it training diverged
    assert tune(lambda factor: 1 / factor, trials=3, extensions=2).on_edge
    with pytest.raises(InputError, match="expected a finite loss"):
        tune(lambda _: math.nan)
    with pytest.raises(InputError, match="odd"):
        tune(lambda _: 1.0, trials=2)


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

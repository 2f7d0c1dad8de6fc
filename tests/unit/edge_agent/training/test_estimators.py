"""Tests of a run's estimators: their headers, and that a log replays to the run's state."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from permille.choices import EstimatorKind, Method
from permille.errors import InputError
from permille.package.reader import Package
from permille.zo.estimators import Batch, directions_of, estimate
from permille.zo.header import BlockSplit
from permille.zo.journal import read_journal
from permille.zo.lattice import step_unit_exponent_for
from permille.zo.replay import replay
from permille_agent.training.options import DEFAULT_QUERIES, TrainOptions, estimator_of
from permille_agent.training.plan import make_plan
from permille_agent.training.run import find_run
from tests.bigram_engine import BigramEngine
from tests.unit.edge_agent.runs import TINY_RATE, Begin, Device, plan_and_train
from tests.unit.zo.logs import make_header


@pytest.mark.parametrize(
    ("kind", "queries"),
    [(EstimatorKind.ONE_SIDED, 4), (EstimatorKind.SPLIT, 10), (EstimatorKind.FORWARD, 2)],
)
def test_every_estimator_trains_and_its_log_replays(begin: Begin, kind: EstimatorKind, queries: int) -> None:
    run = begin(estimator=kind, queries=queries)
    plan, selected = plan_and_train(run)
    contents = read_journal(run.folder.journal(selected.descent))
    assert contents.header.estimator is kind
    losses = [evaluation.loss for evaluation in run.folder.evaluations(selected.descent)]
    assert min(loss for loss in losses if loss is not None) < plan.base_loss
    rows = np.array([record.coefficients for record in contents.records[: selected.step]])
    s_K = replay(contents.header, rows)
    assert np.array_equal(s_K, selected.s_K)


def test_the_same_run_twice_has_the_same_bits_and_goes_on_after_a_kill(begin: Begin) -> None:
    _, first = plan_and_train(begin(folder="a"))
    killed = begin(folder="b")
    plan_and_train(killed)
    journal = killed.folder.journal(0)
    whole = journal.read_bytes()
    journal.write_bytes(whole[:-60])
    _, again = plan_and_train(killed)
    assert journal.read_bytes() == whole
    assert np.array_equal(first.s_K, again.s_K)


def test_an_adopted_model_is_rebuilt_from_its_log(device: Device) -> None:
    result = device.train(steps=30, queries=8)
    assert result.outcome.value == "adopted"
    run = find_run(device.home, result.run)
    cached_K = device.used_values()
    (run.path / "state.i64").unlink()
    assert np.array_equal(device.used_values(), cached_K)


def test_the_first_steps_have_one_length_whatever_the_estimator(begin: Begin) -> None:
    run = begin(estimator=EstimatorKind.SPLIT, queries=10)
    header = run.descent(seed=0).header
    below = header.weights_of(header.blocks()[0][1]).stop
    spread = (below / 2 + (header.k - below) / 8) ** 0.5
    plan, lengths = make_plan(run), run.package.manifest.lengths
    assert plan.learning_rate * spread == pytest.approx(lengths.step)
    assert plan.epsilon * header.k**0.5 == pytest.approx(lengths.perturbation)


@pytest.mark.parametrize("split", [False, True])
def test_a_step_is_as_long_as_predicted(split: bool) -> None:
    k, queries, steps = 240, 10, 300
    rng = np.random.default_rng(5)
    fields: dict[str, Any] = {"counts": (k // 2, k // 2), "queries": queries}
    if split:
        cut = BlockSplit(first_upper_tensor=1, lower_queries=2)
        fields |= {"estimator": EstimatorKind.SPLIT, "split": cut}
    header = make_header(**fields)
    moved = felt = 0.0
    for step in range(steps):
        z_QK = directions_of(header, step) / header.sigma
        # The gradient is random and independent of the directions.
        g_Q = z_QK @ rng.standard_normal(k)
        parts = [g_Q[rows] @ z_QK[rows] / (rows.stop - rows.start) for rows, _ in header.blocks()]
        moved += float((sum(parts) ** 2).sum())
        # Blocks of equal size: the mean over all queries is the mean square of each block, too.
        felt += float((g_Q**2).mean())
    header = header.with_lengths(0.5, 2.0)
    assert 2.0 / header.learning_rate == pytest.approx((moved / felt) ** 0.5, rel=0.15)
    # The block with the most directions decides the unit.
    widest = 8 if split else 10
    assert header.step_unit_exponent == step_unit_exponent_for(header.learning_rate, 1.0, widest)


@pytest.mark.parametrize(
    ("counts", "layers", "expected"),
    [
        ((1, 1) * 4, 4, 4),
        ((0, 0, 0, 0, 1, 1, 1, 1), 4, 6),
        ((1, 1, 1, 1, 0, 0, 0, 0), 4, 2),
        ((0, 1, 0, 1, 0, 0), 3, 2),
        ((1, 1) * 4 + (0, 0) * 4, 8, 4),  # half of the 4 masked layers, not of all 8 layers
    ],
)
def test_a_split_is_in_the_middle_of_what_is_masked(
    counts: tuple[int, ...], layers: int, expected: int
) -> None:
    split = BlockSplit.halving(counts, layers, 2)
    assert (split.first_upper_tensor, split.lower_queries) == (expected, 2)


def test_an_engine_can_share_the_lower_block_of_a_split(begin: Begin, package: Package) -> None:
    class Recorder(BigramEngine):
        def losses(self, values_VK: NDArray[np.float32], batch: Batch) -> NDArray[np.float32]:
            self.asked_VK = values_VK
            return super().losses(values_VK, batch)

    engine = Recorder(package)
    run = begin(engine=engine, estimator=EstimatorKind.SPLIT, queries=10)
    s_K = np.zeros(package.k, dtype=np.int64)
    estimate(engine, run.batches(0), run.descent(seed=1, epsilon=1e-3), s_K, 0)
    lower = sum(package.counts[: len(package.counts) // 2])
    # 2 lower and 8 upper directions, each with both signs
    assert len(np.unique(engine.asked_VK[:, :lower], axis=0)) == 4
    assert len(np.unique(engine.asked_VK, axis=0)) == 16


def test_one_masked_layer_cannot_be_split() -> None:
    with pytest.raises(InputError, match="two decoder layers"):
        BlockSplit.halving((0, 0, 3, 1), 2, 1)


def test_estimators_have_names() -> None:
    for name in ("one_sided", "one-sided"):
        assert estimator_of(Method.ZEROTH_ORDER, name) is EstimatorKind.ONE_SIDED
    with pytest.raises(InputError, match="spsa, forward, one-sided, split"):
        estimator_of(Method.ZEROTH_ORDER, "adam")
    with pytest.raises(InputError, match="is no estimator of a gradient run"):
        estimator_of(Method.GRADIENT, "spsa")


@pytest.mark.parametrize("kind", [EstimatorKind.GRADIENT, EstimatorKind.ONE_SIDED, EstimatorKind.SPSA])
def test_weights_below_the_first_layer_stay_where_they_are(
    begin: Begin, package: Package, kind: EstimatorKind
) -> None:
    queries = 0 if kind is EstimatorKind.GRADIENT else 4
    run = begin(estimator=kind, queries=queries, steps=4, first_layer=1, rate_scale=TINY_RATE)
    _, selected = plan_and_train(run)
    middle = package.k // 2
    assert (run.trained, selected.step > 0) == (slice(middle, package.k), True)
    assert not selected.s_K[:middle].any()
    assert selected.s_K[middle:].any()
    with pytest.raises(InputError, match="No masked weight is in layer 2 or above"):
        _ = replace(run, options=replace(run.options, first_layer=2)).trained


@pytest.mark.parametrize("kind", DEFAULT_QUERIES)
def test_every_estimator_has_a_number_of_queries_that_it_takes(kind: EstimatorKind) -> None:
    assert TrainOptions(steps=5, estimator=kind, queries=DEFAULT_QUERIES[kind]).estimator is kind


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"queries": 257, "estimator": EstimatorKind.SPSA}, "must|Give"),
        ({"queries": 16}, "A gradient run takes no queries"),
        ({"queries": 0, "estimator": EstimatorKind.ONE_SIDED}, "must|Give"),
        ({"queries": 1, "estimator": EstimatorKind.ONE_SIDED}, "queries"),
        ({"queries": 8, "estimator": EstimatorKind.SPLIT}, "queries"),
        ({"batch_rows": 257}, "must|Give"),
        ({"row_tokens": 4}, "must|Give"),
        ({"seed": 2**63}, "must|Give"),
        ({"steps": None}, "must|Give"),
        ({"steps": 1_000_001}, "must|Give"),
    ],
)
def test_options_refuse_numbers_that_no_run_can_have(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        TrainOptions(**{"steps": 5, **changes})


def test_every_option_that_decides_results_is_in_the_definition() -> None:
    forward = TrainOptions(steps=5, estimator=EstimatorKind.FORWARD, queries=8)
    assert forward.definition() != TrainOptions(steps=5).definition()
    assert TrainOptions(steps=5).within(16).row_tokens == 16

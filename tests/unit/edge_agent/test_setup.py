"""Estimators and layers of a run: its headers, phases, and that its log replays to its state."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from permille.engines.interface import Batch
from permille.engines.sharing import layer_spans, plan_sharing
from permille.errors import InputError, PackageError
from permille.package.reader import Package
from permille.sensitivity.basis import learn_basis
from permille.zo.estimators import estimate
from permille.zo.header import EstimatorKind
from permille.zo.header_parts import BlockSplit
from permille.zo.journal import read_journal
from permille.zo.layers import NO_LAYERS, Basis, DirectionLayers, Exponents
from permille.zo.log import decode_canonical
from permille.zo.package_layers import layers_of
from permille.zo.replay import replay
from permille.zo.step_directions import directions_of
from permille_agent import trainer
from permille_agent.activation import Active
from permille_agent.home import Home, open_home
from permille_agent.options import DEFAULT_QUERIES, TrainOptions, estimator_named
from permille_agent.pace import lengths_by_time
from permille_agent.personal import canonical_log, model_values
from permille_agent.progress import SilentProgress
from permille_agent.releases import InstalledRelease, record_installed
from permille_agent.run_clock import RunClock
from permille_agent.run_folder import RunFolder, open_run
from permille_agent.search import STEP_NORM, SearchFailed, find_epsilon, find_learning_rate
from permille_agent.setup import Phase, block_split, step_spread, training_layers, widest_block
from permille_agent.trainer import Chosen, attempt_header, make_plan, train_attempts
from permille_agent.training_job import run_training
from tests.bigram_engine import BigramEngine, bigram_engine
from tests.packages import layered_package, tiny_package
from tests.unit.edge_agent.runs import QUICK, setup_of, user_text
from tests.unit.zo.logs import make_header


def add_layers(package: Package, folder: Path, *, rank: int = 6) -> Package:
    """A basis of the gradients that somebody else's text causes, and exponents."""
    engine = BigramEngine(package)
    setup = setup_of(package, engine, user_text(folder, seed=11), batch_rows=4)
    every_KK = np.eye(package.k, dtype=np.float32)
    gradients_NK = np.array(
        [engine.directional_derivatives(package.values(), every_KK, setup.batches(n))[1] for n in range(12)]
    )
    exponents_K = (np.arange(package.k) % 3).astype(np.int8)
    u_KR = learn_basis(gradients_NK.astype(np.float32), rank)
    return layered_package(package, basis_KR=u_KR, exponents_K=exponents_K)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return tiny_package(tmp_path_factory.mktemp("package"))


@pytest.fixture(scope="module")
def layered(plain: Package, tmp_path_factory: pytest.TempPathFactory) -> Package:
    return add_layers(plain, tmp_path_factory.mktemp("public"))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return user_text(tmp_path_factory.mktemp("text"))


def _train(package: Package, text: Path, run: RunFolder, **changes: Any) -> tuple[dict[str, Any], Chosen]:
    setup = setup_of(package, BigramEngine(package), text, **changes)
    clock = RunClock(run)
    plan = make_plan(setup, run, SilentProgress(), clock)
    return plan, train_attempts(setup, run, plan, SilentProgress(), clock)


def _run(folder: Path) -> RunFolder:
    return open_run(open_home(folder / "home"), {"test": 1})


@pytest.mark.parametrize(
    ("kind", "queries"),
    [(EstimatorKind.ONE_SIDED, 4), (EstimatorKind.SPLIT, 10), (EstimatorKind.FORWARD, 2)],
)
@pytest.mark.parametrize("with_layers", [False, True], ids=["plain", "layered"])
def test_every_estimator_trains_and_its_log_replays(
    plain: Package,
    layered: Package,
    text: Path,
    tmp_path: Path,
    kind: EstimatorKind,
    queries: int,
    with_layers: bool,
) -> None:
    package = layered if with_layers else plain
    run = _run(tmp_path)

    plan, chosen = _train(package, text, run, estimator=kind, queries=queries, scaling=with_layers)

    contents = read_journal(run.journal(chosen.attempt))
    assert contents.header.estimator is kind
    assert chosen.header.basis_steps == (3 if with_layers else 0)
    assert (chosen.header.exponents is not None) == with_layers
    losses = {evaluation.step: evaluation.loss for evaluation in run.evaluations(chosen.attempt)}
    assert min(loss for loss in losses.values() if loss is not None) < plan["base_loss"]
    rows = np.array([record.coefficients for record in contents.records[: chosen.step]])
    s_K = replay(contents.header, rows, layers_of(package, contents.header))
    assert np.array_equal(s_K, chosen.s_K)


def test_learned_directions_have_a_search_and_rates_of_their_own(
    layered: Package, text: Path, tmp_path: Path
) -> None:
    run = _run(tmp_path)
    setup = setup_of(layered, BigramEngine(layered), text, steps=40)

    plan = make_plan(setup, run, SilentProgress(), RunClock(run))

    learned = plan["learned"]
    assert learned["steps"] == 10
    assert run.load("search-learned-race-0") is not None
    assert run.load("search-race-0") is not None
    header = attempt_header(setup, plan, 1)
    assert header.basis is not None
    assert header.basis.learning_rate == learned["learning_rate"] / 2
    assert header.basis.epsilon == learned["epsilon"]
    assert (header.learning_rate, header.epsilon) == (plan["learning_rate"] / 2, plan["epsilon"])
    # Rounding a coefficient must lose little: both kinds of steps have some hundreds of units
    for step, rates in ((0, learned), (10, plan)):
        unit = 2.0**header.step_unit_exponent * header.sigma_at(step) * setup.options.queries
        assert header.learning_rate_at(step) * rates["g_rms"] / unit > 300


def test_directions_that_lose_the_race_are_left_out(plain: Package, text: Path, tmp_path: Path) -> None:
    last_KR = np.zeros((plain.k, 2), dtype=np.int8)
    last_KR[-2:] = [[127, 0], [0, 127]]
    useless = layered_package(plain, basis_KR=last_KR)
    setup = setup_of(useless, BigramEngine(useless), text, steps=40, estimator=EstimatorKind.SPSA)
    run = _run(tmp_path)

    plan = make_plan(setup, run, SilentProgress(), RunClock(run))

    assert plan["learned"] is None
    assert attempt_header(setup, plan, 0).version == 1


def test_directions_without_a_usable_epsilon_are_left_out(
    layered: Package, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: Any) -> Any:
        if Phase.LEARNED in arguments:
            raise SearchFailed("expected an epsilon, got none")
        return find_epsilon(*arguments)

    monkeypatch.setattr(trainer, "find_epsilon", fails)
    setup = setup_of(layered, BigramEngine(layered), text)

    plan = make_plan(setup, _run(tmp_path), SilentProgress(), RunClock(_run(tmp_path)))

    assert plan["learned"] is None


def test_learned_directions_may_be_left_out(layered: Package, text: Path, tmp_path: Path) -> None:
    setup = setup_of(layered, BigramEngine(layered), text, basis=False, estimator=EstimatorKind.SPSA)

    plan = make_plan(setup, _run(tmp_path), SilentProgress(), RunClock(_run(tmp_path)))

    assert plan["learned"] is None
    assert attempt_header(setup, plan, 0).version == 1


def test_a_package_without_layers_gives_logs_of_version_1(plain: Package, text: Path, tmp_path: Path) -> None:
    _, chosen = _train(plain, text, _run(tmp_path), scaling=True, estimator=EstimatorKind.SPSA)

    assert chosen.header.version == 1


def test_the_same_run_twice_has_the_same_bits_and_goes_on_after_a_kill(
    layered: Package, text: Path, tmp_path: Path
) -> None:
    _, first = _train(layered, text, _run(tmp_path / "a"))
    killed = _run(tmp_path / "b")
    _train(layered, text, killed)
    journal = killed.journal(0)
    whole = journal.read_bytes()
    journal.write_bytes(whole[:-60])

    _, again = _train(layered, text, killed)

    assert journal.read_bytes() == whole
    assert np.array_equal(first.s_K, again.s_K)


def test_an_adopted_model_is_rebuilt_from_its_log_and_the_packages_layers(text: Path, tmp_path: Path) -> None:
    home = open_home(tmp_path / "home")
    package = add_layers(tiny_package(home.blobs), tmp_path)
    record_installed(home, InstalledRelease(name="tiny", version=1, manifest_digest=package.digest))
    result = _run_training(home, text)
    assert result.outcome.value == "adopted"
    run = RunFolder(home.runs / str(result.run))
    active = Active(package=package.digest, run=run.name)
    cached_K = model_values(home, active, package)
    (run.path / "state.i64").unlink()

    assert np.array_equal(model_values(home, active, package), cached_K)
    log = decode_canonical(canonical_log(run), max_bytes=1 << 20, max_steps=100)
    assert log.header.basis is not None
    with pytest.raises(PackageError) as refused:
        replay(log.header, log.coefficients_TQ, layers_of(tiny_package(home.blobs), log.header))
    assert refused.value.code == "log-binding"


def _run_training(home: Home, text: Path) -> Any:
    options = replace(QUICK, steps=30, queries=8)
    return run_training(
        home,
        data_paths=[text],
        steps=None,
        minutes=None,
        seed=0,
        share_log=False,
        options=options,
        engine_of=bigram_engine,
    )


def test_the_first_step_size_has_the_same_length_for_every_kind(
    layered: Package, text: Path, tmp_path: Path
) -> None:
    setup = setup_of(layered, BigramEngine(layered), text, estimator=EstimatorKind.SPLIT, queries=10)
    run = _run(tmp_path)
    for phase in setup.phases:
        epsilon = find_epsilon(setup, run, phase)
        found = find_learning_rate(setup, run, epsilon["epsilon"], epsilon["g_rms"], 2, phase)
        header = setup.phase_header(phase, seed=0, epsilon=1e-3)
        spread = step_spread(header, setup.layers)
        if phase is Phase.PLAIN and setup.layers.exponents is None:
            below = header.weights_of(header.blocks()[0][1]).stop
            assert spread == pytest.approx((below / 2 + (layered.k - below) / 8) ** 0.5)
        assert found["start"] * epsilon["g_rms"] * spread == pytest.approx(STEP_NORM)
    assert widest_block(header) == 8


DIGEST = "sha256:" + "c" * 64
ONE_STRONG = [[120, 1, 1, 1], [1, 10, 1, 1], [1, 1, 10, 1], [1, 1, 1, 10]]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("kind", ["strong", "even", "exponents", "plain"])
def test_a_step_is_as_long_as_predicted_whatever_its_directions_share(kind: str, split: bool) -> None:
    k, queries, steps = 240, 10, 300
    rng = np.random.default_rng(5)
    layers = NO_LAYERS
    fields: dict[str, Any] = {"counts": (k // 2, k // 2), "queries": queries}
    if split:
        cut = BlockSplit(first_upper_tensor=1, lower_queries=2)
        fields |= {"estimator": EstimatorKind.SPLIT, "split": cut}
    if kind == "exponents":
        layers = DirectionLayers(exponents=Exponents((rng.random(k) < 0.02).astype(np.int8) * 5, DIGEST))
        assert layers.exponents is not None
        fields["exponents"] = layers.exponents.use()
    elif kind != "plain":
        mix_RR = np.array(ONE_STRONG) if kind == "strong" else np.eye(4) * 100
        u_KR = np.rint(rng.choice([-1, 1], (k, 4)) @ mix_RR / 1.2).clip(-127, 127).astype(np.int8)
        layers = DirectionLayers(basis=Basis(u_KR, DIGEST))
        assert layers.basis is not None
        fields["basis"] = layers.basis.use(steps=steps, epsilon=1e-3, learning_rate=1.0)
    header = make_header(**fields)
    moved = felt = 0.0
    for step in range(steps):
        z_QK = directions_of(header, step, layers) / header.sigma_at(step)
        # A gradient as the directions see it: it has no reason to lie along any of them
        g_Q = z_QK @ rng.standard_normal(k)
        parts = [g_Q[rows] @ z_QK[rows] / (rows.stop - rows.start) for rows, _ in header.blocks()]
        moved += float((sum(parts) ** 2).sum())
        # All blocks have the same projected gradients here: those of the block itself
        felt += float((g_Q**2).mean())
    assert step_spread(header, layers) == pytest.approx((moved / felt) ** 0.5, rel=0.15)


@pytest.mark.parametrize(
    ("counts", "layers", "expected"),
    [
        ((1, 1) * 4, 4, 4),
        ((0, 0, 0, 0, 1, 1, 1, 1), 4, 6),
        ((1, 1, 1, 1, 0, 0, 0, 0), 4, 2),
        ((0, 1, 0, 1, 0, 0), 3, 2),
        ((1, 1) * 4 + (0, 0) * 4, 8, 4),  # not of the model's 8 layers: of the 4 that are masked
    ],
)
def test_a_split_is_in_the_middle_of_what_is_masked(
    counts: tuple[int, ...], layers: int, expected: int
) -> None:
    split = block_split(counts, layers, 10)
    assert (split.first_upper_tensor, split.lower_queries) == (expected, 2)


@pytest.mark.parametrize("phase", Phase)
def test_an_engine_can_share_the_lower_block_of_a_split(layered: Package, text: Path, phase: Phase) -> None:
    class Recorder(BigramEngine):
        def losses(self, values_VK: NDArray[np.float32], batch: Batch) -> NDArray[np.float32]:
            self.asked_VK = values_VK
            return super().losses(values_VK, batch)

    engine = Recorder(layered)
    setup = setup_of(layered, engine, text, estimator=EstimatorKind.SPLIT, queries=10)
    header = setup.phase_header(phase, seed=1, epsilon=1e-3)
    s_K = np.zeros(layered.k, dtype=np.int64)
    estimate(engine, setup.batches(0), header, setup.w_base_K, s_K, 0, setup.layers)
    names = [tensor.name for tensor in layered.manifest.tensors]
    groups = plan_sharing(engine.asked_VK, layer_spans(names, layered.counts, 2))
    # 2 lower and 8 upper directions, both signs of each
    assert [layer.count for layer in groups] == [4, 16]


def test_one_masked_layer_cannot_be_split() -> None:
    with pytest.raises(InputError, match="two layers"):
        block_split((0, 0, 3, 1), 2, 5)


def test_learned_steps_are_a_quarter_at_most_and_few_for_each_direction(layered: Package, text: Path) -> None:
    setup = setup_of(layered, BigramEngine(layered), text)
    assert [setup.learned_steps(steps) for steps in (3, 4, 40, 10_000)] == [0, 1, 10, 12]
    assert training_layers(layered, replace(QUICK, basis=False)).basis is None
    assert setup.phases == (Phase.LEARNED, Phase.PLAIN)


def test_two_searches_share_the_time_of_one() -> None:
    one = lengths_by_time(600, step_s=0.5, evaluation_s=2, judgement_s=4)
    two = lengths_by_time(600, step_s=0.5, evaluation_s=2, judgement_s=4, phases=2)
    assert two.race_steps < one.race_steps
    spent = 8 * (two.race_steps * 0.5 + 2)
    assert spent <= 0.25 * 600


@pytest.mark.parametrize("name", ["one_sided", "one-sided"])
def test_estimators_have_names(name: str) -> None:
    assert estimator_named(name) is EstimatorKind.ONE_SIDED
    with pytest.raises(InputError, match="spsa, forward, one_sided, split"):
        estimator_named("adam")


@pytest.mark.parametrize("kind", EstimatorKind)
def test_every_estimator_has_a_number_of_queries_that_it_takes(kind: EstimatorKind) -> None:
    assert TrainOptions(steps=5, estimator=kind, queries=DEFAULT_QUERIES[kind]).estimator is kind


@pytest.mark.parametrize(("kind", "queries"), [(EstimatorKind.ONE_SIDED, 1), (EstimatorKind.SPLIT, 8)])
def test_queries_that_an_estimator_cannot_take_are_refused(kind: EstimatorKind, queries: int) -> None:
    with pytest.raises(InputError, match="queries"):
        TrainOptions(steps=5, estimator=kind, queries=queries)

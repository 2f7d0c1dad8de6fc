"""Estimators and scale exponents of a run: its headers, and that its log replays to its state."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from permille.errors import InputError, PackageError
from permille.package.reader import Package
from permille.zo.estimators import Batch, Descent, directions_of, estimate
from permille.zo.exponents import Exponents, exponents_of
from permille.zo.header import BlockSplit, EstimatorKind
from permille.zo.journal import read_journal
from permille.zo.log import decode_canonical
from permille.zo.replay import replay
from permille_agent.state.home import open_home
from permille_agent.state.models import Active, InstalledRelease, record_installed
from permille_agent.training.options import DEFAULT_QUERIES, TrainOptions, estimator_named
from permille_agent.training.personal import canonical_log, model_values
from permille_agent.training.plan import Plan, make_plan
from permille_agent.training.run import Run, RunFolder, block_split, widest_block
from permille_agent.training.step_size import STEP_NORM, find_scale, find_step_size, step_spread
from permille_agent.training.steps import SelectedState, train
from tests.bigram_engine import BigramEngine
from tests.packages import layered_package, tiny_package
from tests.unit.edge_agent.runs import run_of, train_quickly, user_text
from tests.unit.zo.logs import make_header


def add_exponents(package: Package) -> Package:
    """The package with exponents from 0 to 2."""
    return layered_package(package, exponents_K=(np.arange(package.k) % 3).astype(np.int8))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return tiny_package(tmp_path_factory.mktemp("package"))


@pytest.fixture(scope="module")
def layered(plain: Package) -> Package:
    return add_exponents(plain)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return user_text(tmp_path_factory.mktemp("text"))


def _begin(package: Package, text: Path, folder: Path, **changes: Any) -> Run:
    return run_of(package, BigramEngine(package), text, folder, **changes)


def _train(run: Run) -> tuple[Plan, SelectedState]:
    plan = make_plan(run)
    return plan, train(run, plan)


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
    run = _begin(package, text, tmp_path, estimator=kind, queries=queries, scaling=with_layers)

    plan, selected = _train(run)

    contents = read_journal(run.folder.journal(selected.descent))
    assert contents.header.estimator is kind
    assert (selected.header.exponents is not None) == with_layers
    losses = [evaluation.loss for evaluation in run.folder.evaluations(selected.descent)]
    assert min(loss for loss in losses if loss is not None) < plan.base_loss
    rows = np.array([record.coefficients for record in contents.records[: selected.step]])
    s_K = replay(contents.header, rows, exponents_of(package))
    assert np.array_equal(s_K, selected.s_K)


def test_a_package_without_exponents_gives_plain_logs(plain: Package, text: Path, tmp_path: Path) -> None:
    _, selected = _train(_begin(plain, text, tmp_path, scaling=True, estimator=EstimatorKind.SPSA))

    assert selected.header.exponents is None


def test_the_same_run_twice_has_the_same_bits_and_goes_on_after_a_kill(
    layered: Package, text: Path, tmp_path: Path
) -> None:
    _, first = _train(_begin(layered, text, tmp_path / "a", scaling=True))
    killed = _begin(layered, text, tmp_path / "b", scaling=True)
    _train(killed)
    journal = killed.folder.journal(0)
    whole = journal.read_bytes()
    journal.write_bytes(whole[:-60])

    _, again = _train(killed)

    assert journal.read_bytes() == whole
    assert np.array_equal(first.s_K, again.s_K)


def test_an_adopted_model_is_rebuilt_from_its_log_and_the_packages_layers(text: Path, tmp_path: Path) -> None:
    home = open_home(tmp_path / "home")
    package = add_exponents(tiny_package(home.blobs))
    record_installed(home, InstalledRelease(name="tiny", version=1, manifest_digest=package.digest))
    result = train_quickly(home, [text], steps=30, queries=8, scaling=True)
    assert result.outcome.value == "adopted"
    run = RunFolder(home.runs / str(result.run))
    active = Active(package=package.digest, run=run.name)
    cached_K = model_values(home, active, package)
    (run.path / "state.i64").unlink()

    assert np.array_equal(model_values(home, active, package), cached_K)
    log = decode_canonical(canonical_log(run), max_bytes=1 << 20, max_steps=100)
    assert log.header.exponents is not None
    with pytest.raises(PackageError) as refused:
        replay(log.header, log.coefficients_TQ, exponents_of(tiny_package(home.blobs)))
    assert refused.value.code == "log-binding"


@pytest.mark.parametrize("scaling", [False, True])
def test_the_first_step_size_has_the_same_length_with_and_without_exponents(
    layered: Package, text: Path, tmp_path: Path, scaling: bool
) -> None:
    run = _begin(layered, text, tmp_path, estimator=EstimatorKind.SPLIT, queries=10, scaling=scaling)

    scale = find_scale(run)
    found = find_step_size(run, scale, 2)

    descent = run.descent(seed=0, epsilon=1e-3)
    header, spread = descent.header, step_spread(descent)
    if not scaling:
        below = header.weights_of(header.blocks()[0][1]).stop
        assert spread == pytest.approx((below / 2 + (layered.k - below) / 8) ** 0.5)
    assert found.start * scale.g_rms * spread == pytest.approx(STEP_NORM)
    assert widest_block(header) == 8


DIGEST = "sha256:" + "c" * 64


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("kind", ["exponents", "plain"])
def test_a_step_is_as_long_as_predicted_whatever_its_directions_share(kind: str, split: bool) -> None:
    k, queries, steps = 240, 10, 300
    rng = np.random.default_rng(5)
    exponents = None
    fields: dict[str, Any] = {"counts": (k // 2, k // 2), "queries": queries}
    if split:
        cut = BlockSplit(first_upper_tensor=1, lower_queries=2)
        fields |= {"estimator": EstimatorKind.SPLIT, "split": cut}
    if kind == "exponents":
        exponents = Exponents((rng.random(k) < 0.02).astype(np.int8) * 5, DIGEST)
        fields["exponents"] = exponents.use
    header = make_header(**fields)
    moved = felt = 0.0
    for step in range(steps):
        z_QK = directions_of(header, step, exponents) / header.sigma
        # A gradient as the directions see it: it has no reason to lie along any of them
        g_Q = z_QK @ rng.standard_normal(k)
        parts = [g_Q[rows] @ z_QK[rows] / (rows.stop - rows.start) for rows, _ in header.blocks()]
        moved += float((sum(parts) ** 2).sum())
        # All blocks have the same projected gradients here: those of the block itself
        felt += float((g_Q**2).mean())
    descent = Descent(header=header, w_base_K=np.zeros(k, dtype=np.float32), exponents=exponents)
    assert step_spread(descent) == pytest.approx((moved / felt) ** 0.5, rel=0.15)


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


def test_an_engine_can_share_the_lower_block_of_a_split(layered: Package, text: Path, tmp_path: Path) -> None:
    class Recorder(BigramEngine):
        def losses(self, values_VK: NDArray[np.float32], batch: Batch) -> NDArray[np.float32]:
            self.asked_VK = values_VK
            return super().losses(values_VK, batch)

    engine = Recorder(layered)
    run = run_of(layered, engine, text, tmp_path, estimator=EstimatorKind.SPLIT, queries=10)
    s_K = np.zeros(layered.k, dtype=np.int64)
    estimate(engine, run.batches(0), run.descent(seed=1, epsilon=1e-3), s_K, 0)
    lower = sum(layered.counts[: len(layered.counts) // 2])
    # 2 lower and 8 upper directions, both signs of each
    assert len(np.unique(engine.asked_VK[:, :lower], axis=0)) == 4
    assert len(np.unique(engine.asked_VK, axis=0)) == 16


def test_one_masked_layer_cannot_be_split() -> None:
    with pytest.raises(InputError, match="two layers"):
        block_split((0, 0, 3, 1), 2, 5)


@pytest.mark.parametrize("name", ["one_sided", "one-sided"])
def test_estimators_have_names(name: str) -> None:
    assert estimator_named(name) is EstimatorKind.ONE_SIDED
    with pytest.raises(InputError, match="spsa, forward, one_sided, split"):
        estimator_named("adam")


@pytest.mark.parametrize("kind", DEFAULT_QUERIES)
def test_every_estimator_has_a_number_of_queries_that_it_takes(kind: EstimatorKind) -> None:
    assert TrainOptions(steps=5, estimator=kind, queries=DEFAULT_QUERIES[kind]).estimator is kind


@pytest.mark.parametrize(("kind", "queries"), [(EstimatorKind.ONE_SIDED, 1), (EstimatorKind.SPLIT, 8)])
def test_queries_that_an_estimator_cannot_take_are_refused(kind: EstimatorKind, queries: int) -> None:
    with pytest.raises(InputError, match="queries"):
        TrainOptions(steps=5, estimator=kind, queries=queries)

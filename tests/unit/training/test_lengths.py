"""Tests of the lengths of zeroth order: the rules, their limits, and reuse of finished measurements."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from permille.package.build import write_manifest
from permille.package.manifest import Lengths
from permille.package.reader import Package
from permille.training.lengths import FACTOR, MOST_TRIALS, PERTURBATIONS, PROBES, STEP, STEPS, measure_lengths
from permille.training.reference import make_reference
from permille.zo.estimators import Batch
from tests.unit.engines.tiny import VOCABULARY, tiny_package

Function = Callable[[NDArray[np.float64]], float]


class FunctionEngine:
    """An engine with a loss that is a function of the distance from the base. The text does not matter."""

    def __init__(self, package: Package, function: Function) -> None:
        self._base_K = package.values().astype(np.float64)
        self._function = function
        self.calls = 0

    def losses(self, values_VK: NDArray[np.float32], _batch: Batch) -> NDArray[np.float32]:
        """Return the function's value for each variant."""
        self.calls += 1
        return np.array([self._function(values_K - self._base_K) for values_K in values_VK], dtype=np.float32)

    def token_losses(self, values_K: NDArray[np.float32], batch: Batch) -> NDArray[np.float32]:
        """Return the function's value at every target."""
        self.calls += 1
        loss = self._function(values_K - self._base_K)
        return np.full(int(batch.target_BT.sum()), loss, dtype=np.float32)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return tiny_package(tmp_path_factory.mktemp("blobs"), "llama").package


@pytest.fixture(scope="module")
def package(bare: Package) -> Package:
    text_NT = np.random.default_rng(0).integers(0, VOCABULARY, (8, 20))
    manifest = make_reference(bare, text_NT=text_NT, chat=None, made={})
    return Package.open(bare.blobs, write_manifest(bare.blobs, manifest))


def _slope(package: Package) -> NDArray[np.float64]:
    return np.random.default_rng(1).standard_normal(package.k)


def _bowl(package: Package, norm: float) -> Function:
    """Return a loss that is smallest at one point, at a distance of `norm` from the base."""
    target_K = _slope(package)
    target_K *= norm / np.linalg.norm(target_K)
    return lambda d_K: 3.0 + float(np.linalg.norm(d_K - target_K) ** 2)


def _lengths(package: Package, function: Function) -> Lengths:
    return measure_lengths(FunctionEngine(package, function), package).lengths  # type: ignore[arg-type]


def test_on_a_slope_the_first_perturbation_is_taken(package: Package) -> None:
    slope_K = _slope(package)
    assert _lengths(package, lambda d_K: 3.0 + float(slope_K @ d_K)).perturbation == PERTURBATIONS[0]


def test_the_perturbation_shrinks_where_the_loss_is_too_curved(package: Package) -> None:
    slope_K = _slope(package)
    # The sine turns at a distance of some 0.5. At smaller distances it is nearly straight.
    found = _lengths(package, lambda d_K: 3.0 + float(np.sin(3 * slope_K @ d_K)))
    assert found.perturbation < PERTURBATIONS[0]


def test_the_perturbation_grows_where_the_arithmetic_is_coarse(package: Package) -> None:
    slope_K = _slope(package)
    found = _lengths(package, lambda d_K: 3.0 + round(float(slope_K @ d_K) / 1.7) * 1.7)
    assert found.perturbation > PERTURBATIONS[0]


def test_of_inaccurate_perturbations_the_best_one_is_taken(package: Package) -> None:
    noise = np.random.Generator(np.random.PCG64(0))
    assert _lengths(package, lambda _: float(noise.normal())).perturbation in PERTURBATIONS


def test_a_loss_that_is_not_finite_gives_lengths_of_the_format(package: Package) -> None:
    assert _lengths(package, lambda _: np.nan).perturbation == PERTURBATIONS[0]


@pytest.mark.parametrize(("norm", "expected"), [(3.5, STEP), (11.0, STEP * FACTOR), (1.0, STEP / FACTOR)])
def test_the_step_fits_the_distance_of_the_minimum(package: Package, norm: float, expected: float) -> None:
    assert _lengths(package, _bowl(package, norm)).step == pytest.approx(expected)


def test_the_range_of_steps_grows_where_the_best_is_at_its_end(package: Package) -> None:
    rising = _lengths(package, lambda d_K: 3.0 + float(d_K @ d_K))
    assert rising.step == pytest.approx(STEP / FACTOR ** (MOST_TRIALS - 2))


def test_a_step_that_diverges_is_not_taken(package: Package) -> None:
    found = _lengths(package, lambda d_K: 3.0 - float(_slope(package) @ d_K) if d_K @ d_K < 0.5 else np.nan)
    assert found.step <= STEP


def test_without_public_text_the_lengths_stay(bare: Package) -> None:
    assert _lengths(bare, _bowl(bare, 4.0)) == Lengths()


def test_finished_measurements_are_not_made_again(package: Package, tmp_path: Path) -> None:
    told, engine = list[str](), FunctionEngine(package, _bowl(package, 3.5))
    first = measure_lengths(engine, package, work=tmp_path, progress=told.append)  # type: ignore[arg-type]
    assert told == ["perturbation 0.5", "step 0.5", "step 1.5", "step 0.167"]
    rows, trials = 4, 3
    # The first step of each trial is the first probe of the perturbation.
    assert engine.calls == 2 * PROBES + trials * (STEPS - 1 + rows)
    again = measure_lengths(engine, package, work=tmp_path, progress=told.append)  # type: ignore[arg-type]
    assert (again, len(told)) == (first, 4)


def test_a_killed_measurement_continues(package: Package, tmp_path: Path) -> None:
    class Killed(BaseException): ...

    def kill(what: str) -> None:
        if what == "step 1.5":
            raise Killed

    engine = FunctionEngine(package, _bowl(package, 3.5))
    with pytest.raises(Killed):
        measure_lengths(engine, package, work=tmp_path, progress=kill)  # type: ignore[arg-type]
    told = list[str]()
    found = measure_lengths(engine, package, work=tmp_path, progress=told.append)  # type: ignore[arg-type]
    assert (told, found.lengths) == (["step 1.5", "step 0.167"], _lengths(package, _bowl(package, 3.5)))


@pytest.mark.parametrize(
    "damaged", [b"", b"{", b"\xff", b"[1]", b"null", b'{"step 0.5": "low"}', b'{"step 0.5": []}']
)
def test_what_a_damaged_file_held_is_measured_again(package: Package, tmp_path: Path, damaged: bytes) -> None:
    engine = FunctionEngine(package, _bowl(package, 3.5))
    first = measure_lengths(engine, package, work=tmp_path)  # type: ignore[arg-type]
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    file.write_bytes(damaged)
    assert measure_lengths(engine, package, work=tmp_path) == first  # type: ignore[arg-type]
    assert file.read_bytes() == whole

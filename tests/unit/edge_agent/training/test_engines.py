"""Tests of a run's engine: chosen by name, fixed for the whole run, and without torch if possible."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from permille.choices import EstimatorKind, Method
from permille.engines.interface import EngineInfo
from permille.engines.light.engine import LightEngine
from permille.errors import InputError
from permille.package.reader import Package
from permille.quantization.types import Scheme
from permille.schemas.runs import Outcome
from permille.zo.estimators import Batch
from permille.zo.lattice import state_digest
from permille.zo.log import decode_canonical
from permille.zo.replay import replay
from permille_agent.state.home import open_home
from permille_agent.state.models import InstalledRelease, record_installed
from permille_agent.training.engines import EngineChoice, EngineUsed
from permille_agent.training.options import estimator_of
from permille_agent.training.outcome import RunOutcome, RunResult
from permille_agent.training.run import find_run
from tests.bigram_engine import BigramEngine, bigram_engine
from tests.packages import program_bytes, program_package, tiny_package
from tests.unit.edge_agent.runs import Killed, home_with_package, train_quickly, user_text


def die(*_: object) -> None:
    raise Killed


class Light(BigramEngine):
    """The quick engine of the tests, under the name of the light engine."""

    def info(self) -> EngineInfo:
        return EngineInfo(name="light", version="1", compute_dtype="float32", threads=1, device="cpu")


def test_a_choice_opens_its_engine_and_auto_stays_with_that_of_the_run(tmp_path: Path) -> None:
    _, package = home_with_package(tmp_path / "home")
    assert EngineChoice(name="light", threads=1)(package).info()["name"] == "light"
    assert EngineChoice().begun_with("torch").name == "torch"
    assert EngineChoice(name="light").begun_with("torch").name == "light"


def test_a_run_does_not_go_on_with_another_engine(tmp_path: Path) -> None:
    home, _ = home_with_package(tmp_path / "home")
    text = user_text(tmp_path)

    def train(engine_of: object) -> RunResult:
        return train_quickly(home, [text], engine_of=engine_of)

    class Dies(BigramEngine):
        def losses(self, *_: object) -> object:  # type: ignore[override]
            raise Killed

    with pytest.raises(Killed):
        train(Dies)
    with pytest.raises(
        InputError, match=r"began with the engine 'torch', not 'light'\. Continue with --engine"
    ):
        train(Light)
    result = train(bigram_engine)
    assert result.outcome is not Outcome.INTERRUPTED
    run = find_run(home, result.run)
    assert run.require("engine", EngineUsed) == run.require("outcome", RunOutcome).engine


@pytest.mark.parametrize(
    "estimator", [pytest.param(EstimatorKind.SPSA, marks=pytest.mark.slow), EstimatorKind.GRADIENT]
)
def test_a_training_on_torch_learns_what_one_on_light_does(estimator: EstimatorKind, tmp_path: Path) -> None:
    """Text, seed and directions are the same. The shared log replays to the reported state."""
    gained, home = {}, open_home(tmp_path / "home")
    for name in ("light", "torch"):
        home, package = home_with_package(tmp_path / name)
        result = train_quickly(
            home,
            [user_text(tmp_path)],
            estimator=estimator,
            steps=40,
            queries=4 if estimator is EstimatorKind.SPSA else 0,
            share_log=estimator is EstimatorKind.SPSA,
            engine_of=EngineChoice(name=name, threads=1),
        )
        decision = result.decision
        assert decision is not None and decision.loss_base is not None and decision.loss_personal is not None
        gained[name] = decision.loss_base - decision.loss_personal
        assert result.engine is not None and result.engine.name == name
    assert gained["light"] > 0
    assert abs(gained["torch"] - gained["light"]) < 0.2 * gained["light"]
    if estimator is EstimatorKind.SPSA:
        data = (home.runs / str(result.run) / "shared.log").read_bytes()
        log = decode_canonical(data, max_bytes=1 << 20, max_steps=1000)
        s_K, exponent = replay(log.header, log.coefficients_TQ), log.header.step_unit_exponent
        digest = state_digest(s_K, mask_digest=package.mask_digest, step_unit_exponent=exponent)
        assert result.metrics is not None and result.metrics.state_digest == digest


def test_training_on_the_light_engine_imports_no_torch(tmp_path: Path) -> None:
    home, package = home_with_package(tmp_path / "home")
    text = user_text(tmp_path)
    code = f"""
import sys
from pathlib import Path
from permille_agent.state.home import open_home
from permille_agent.training.options import TrainOptions
from permille_agent.training.train import run_training
options = TrainOptions(seed=0, steps=2, batch_rows=1, row_tokens=16)
result = run_training(open_home(Path({str(home.root)!r})), [Path({str(text)!r})], options)
print(result.metrics.engine, sorted({{"torch", "transformers"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "light []", done.stderr
    assert isinstance(EngineChoice()(Package.open(package.blobs, package.digest)), LightEngine)


def test_the_active_model_is_opened_with_what_fits_it_not_with_the_engine_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The resumed run must use its own engine, which may not support the active model's family."""
    home, old = home_with_package(tmp_path / "home")
    text = user_text(tmp_path)
    opened: list[tuple[str, str]] = []

    def open_engine(choice: EngineChoice, package: Package) -> BigramEngine:
        opened.append((package.digest, choice.name))
        return Light(package)

    monkeypatch.setattr(EngineChoice, "__call__", open_engine)

    def train() -> RunResult:
        return train_quickly(home, [text], steps=120, engine_of=EngineChoice())

    assert train().outcome is Outcome.ADOPTED
    new = tiny_package(home.blobs, seed=1)
    record_installed(home, InstalledRelease(name="tiny", version=2, manifest_digest=new.digest))
    with monkeypatch.context() as patch:
        patch.setattr("permille_agent.training.train.decide_adoption", die)
        with pytest.raises(Killed):
            train()
    opened.clear()

    train()

    assert opened == [(new.digest, "light"), (old.digest, "auto")]


def test_a_run_with_int8_activations_says_so_and_goes_on_with_them_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = open_home(tmp_path / "home")
    package = tiny_package(home.blobs, scheme=Scheme.INT4)
    record_installed(home, InstalledRelease(name="tiny", version=1, manifest_digest=package.digest))
    text = user_text(tmp_path)

    def train(engine: str) -> RunResult:
        return train_quickly(home, [text], engine_of=EngineChoice(name=engine, threads=1))

    with monkeypatch.context() as patch:
        patch.setattr("permille_agent.training.train.decide_adoption", die)
        with pytest.raises(Killed):
            train("light-int8")
    with pytest.raises(InputError, match="This run began with the engine 'light-int8'"):
        train("light")
    first = train("auto")
    assert first.metrics is not None and first.metrics.engine.value == "light-int8"
    assert first.engine is not None and first.engine.compute_dtype == "int8-activations"


def test_an_inference_engine_runs_the_packages_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program takes four variants and eight rows per pass. The tests' own engine computes its losses."""
    home, package = home_with_package(tmp_path / "home")
    child = program_package(package)
    record_installed(home, InstalledRelease(name="tiny", version=2, manifest_digest=child.digest))

    class Runtime:
        def __init__(self, path: Path, *, threads: int) -> None:
            assert (path.read_bytes(), threads) == (program_bytes(), 1)
            self._engine = BigramEngine(package)

        def input_shape(self, _method: str, index: int) -> tuple[int, ...]:
            return (4, package.k) if index == 0 else (8, 128)

        def run(self, method: str, inputs: tuple[Any, ...], out: NDArray[Any]) -> None:
            if method != "forward":
                digest = bytes.fromhex(package.digest.removeprefix("sha256:"))
                out[:] = np.frombuffer(digest, np.uint8) if method == "package" else 32
                return
            values_VK, variant_R, ids_RT = inputs
            target_RT = np.ones(ids_RT.shape, bool)
            target_RT[:, 0] = False
            for row, variant in enumerate(variant_R):
                one = slice(row, row + 1)
                batch = Batch(
                    input_ids_BT=ids_RT[one],
                    attention_BT=np.ones_like(target_RT[one]),
                    target_BT=target_RT[one],
                )
                out[row] = self._engine.token_losses(values_VK[variant], batch)

    monkeypatch.setattr("permille.engines.executorch.engine.Program", Runtime)
    monkeypatch.setattr("permille.engines.executorch.engine.metadata.version", lambda _name: "1")
    used = list[tuple[str, str]]()
    for choice in (EngineChoice(name="executorch", threads=1), bigram_engine):
        result = train_quickly(
            home,
            [user_text(tmp_path)],
            steps=3,
            seed=len(used),
            estimator=estimator_of(Method.ZEROTH_ORDER, engine="executorch"),
            engine_of=choice,
        )
        assert result.metrics is not None
        used.append((result.metrics.engine.value, result.metrics.estimator.value))
    assert used == [("executorch", "spsa"), ("torch", "spsa")]


def test_an_active_model_of_another_package_is_opened_with_what_fits_it(tmp_path: Path) -> None:
    """The NF4 model is still compared, although int8 activations support INT4 only."""
    home = open_home(tmp_path / "home")
    text = user_text(tmp_path)
    results = []
    for version, scheme, engine in ((1, Scheme.NF4, "light"), (2, Scheme.INT4, "light-int8")):
        package = tiny_package(home.blobs, scheme=scheme)
        record_installed(home, InstalledRelease(name="tiny", version=version, manifest_digest=package.digest))
        choice = EngineChoice(name=engine, threads=1)
        results.append(train_quickly(home, [text], steps=120, engine_of=choice))
    assert results[0].outcome is Outcome.ADOPTED
    assert "cannot be opened" not in results[1].message
    assert results[1].decision is not None and results[1].decision.against_active is not None

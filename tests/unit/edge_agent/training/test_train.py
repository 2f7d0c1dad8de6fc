"""Tests of whole runs on a small model: adopted, kept, refused, failed, interrupted, and killed at writes."""

import json
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import permille.zo.journal
import permille_agent.state.home
import permille_agent.training.personal
from permille.engines.interface import Engine
from permille.engines.sampling import TokenSampling
from permille.errors import InputError, OperatorError, PackageError
from permille.files import write_atomic
from permille.package.blobs import BlobFolder
from permille.package.reader import Package
from permille.schemas.runs import LogForm, Outcome
from permille.zo.estimators import Batch
from permille.zo.lattice import state_digest, values
from permille.zo.log import decode_canonical
from permille.zo.replay import replay
from permille_agent.state.home import Home
from permille_agent.state.models import Active, activate, active_model, rollback
from permille_agent.training.engines import interruptible
from permille_agent.training.outcome import RunResult
from permille_agent.training.personal import model_values, shareable
from permille_agent.training.run import RunFolder, find_run, list_runs
from tests.bigram_engine import BigramEngine, bigram_engine
from tests.packages import tiny_package
from tests.unit.edge_agent.runs import (
    QUICK,
    Device,
    Killed,
    device_at,
    home_with_package,
    train_quickly,
    user_text,
)


def _end_of(home: Home, result: RunResult) -> tuple[object, ...]:
    """Return the values that must be bitwise equal, regardless of kills."""
    run = find_run(home, result.run)
    evaluations = run.evaluations(0)
    return (
        result.outcome,
        result.decision,
        result.plan,
        evaluations,
        shareable(run, LogForm.LOG, BlobFolder(home.blobs)),
        active_model(home),
    )


def test_a_run_that_learns_is_adopted_and_its_shared_log_replays_to_the_state_that_is_used(
    device: Device,
) -> None:
    package = device.package
    result = device.train(share_log=True)
    assert result.outcome is Outcome.ADOPTED
    assert device.active() == Active(package=package.digest, run=result.run)
    decision, metrics = result.decision, result.metrics
    assert decision is not None and decision.against_base is not None and metrics is not None
    assert (decision.loss_personal or math.inf) < (decision.loss_base or 0.0)
    assert decision.against_base.low > 0
    assert (metrics.steps, metrics.k, metrics.release) == (12, package.k, "tiny")
    assert metrics.test_tokens >= 2000
    assert metrics.peak_rss_bytes > 1 << 20

    shared = (device.home.runs / str(result.run) / "shared.log").read_bytes()
    log = decode_canonical(shared, max_bytes=1 << 20, max_steps=1000)
    s_K, exponent = replay(log.header, log.coefficients_TQ), log.header.step_unit_exponent
    digest = state_digest(s_K, mask_digest=package.mask_digest, step_unit_exponent=exponent)
    assert metrics.state_digest == decision.state_digest == digest
    assert (device.used_values() == values(package.values(), s_K, exponent)).all()


def test_without_consent_neither_log_nor_state_digest_and_never_text_or_a_path_is_laid_out(
    device: Device, tmp_path: Path
) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{not json\n")
    result = device.train(bad)
    folder = device.home.runs / str(result.run)
    assert result.metrics is not None
    assert result.metrics.state_digest is None
    assert result.metrics.personal_bytes > 0
    assert not (folder / "shared.log").exists()
    assert result.data is not None and result.data.bad_rows == {"not JSON": 1}
    assert result.bad_row_examples == (f"{bad}:1: not JSON",)
    outcome = (folder / "outcome.json").read_text()
    assert not [word for word in ("river", "bad.jsonl", str(tmp_path)) if word in outcome]


class Unlearnable(BigramEngine):
    """An engine with random losses, so that training cannot improve them."""

    def losses(self, values_VK: NDArray[np.float32], batch: Batch) -> NDArray[np.float32]:
        means = [BigramEngine.token_losses(self, values_K, batch).mean() for values_K in values_VK]
        return np.array(means, dtype=np.float32)

    def token_losses(self, values_K: NDArray[np.float32], batch: Batch) -> NDArray[np.float32]:
        seed = int(np.abs(values_K).sum(dtype=np.float64) * 1e6) % 2**32
        rng = np.random.Generator(np.random.PCG64(seed))
        noise: NDArray[np.float64] = rng.normal(4.0, 0.5, int(batch.target_BT.sum()))
        return noise.astype(np.float32)


def test_what_is_not_surely_better_is_not_adopted(device: Device) -> None:
    result = device.train(engine_of=Unlearnable)
    assert result.outcome is Outcome.KEPT_BASE
    assert device.active() == Active(package=device.package.digest)
    assert result.decision is not None and result.decision.adopted is False


def test_too_little_text_is_refused_and_reported_once(device: Device, tmp_path: Path) -> None:
    device = replace(device, text=user_text(tmp_path, 20))
    first, second = device.train(), device.train()
    assert first.outcome is second.outcome is Outcome.REFUSED_DATA
    assert "There is too little text: 518 tokens in 1 document," in first.message
    assert (first.known, second.known) == (False, True)
    assert len(list_runs(device.home)) == 1
    assert first.metrics is not None and first.metrics.package_digest == device.package.digest
    assert device.active() == Active(package=device.package.digest)


def test_losses_that_are_never_finite_end_as_failed(device: Device) -> None:
    result = device.train(engine_of=lambda package: BigramEngine(package, nan_above=0.0))
    assert result.outcome is Outcome.FAILED
    assert "loss of the base model on this text is not finite" in result.message
    assert result.metrics is not None and result.metrics.steps == 0
    assert device.active() == Active(package=device.package.digest)


def test_a_run_that_ended_is_told_again_not_computed_again(device: Device) -> None:
    first = device.train()

    def no_engine(_package: Package) -> BigramEngine:
        raise AssertionError("no engine is needed")

    second = device.train(engine_of=no_engine)
    assert second.known
    assert replace(second, known=False) == replace(first, known=False)


def test_nothing_installed_and_unusable_paths_are_refused(tmp_path: Path) -> None:
    home = permille_agent.state.home.open_home(tmp_path / "home")
    with pytest.raises(OperatorError, match="permille-agent enroll"):
        train_quickly(home, [tmp_path])
    home, _ = home_with_package(tmp_path / "home")
    with pytest.raises(InputError, match=r"There is no file or folder "):
        train_quickly(home, [tmp_path / "missing.txt"])


def test_a_new_run_replaces_the_active_one_only_where_it_is_better(device: Device) -> None:
    digest = device.package.digest
    long, short = device.train(steps=40), device.train(steps=10)
    assert (long.outcome, short.outcome) == (Outcome.ADOPTED, Outcome.KEPT_BASE)
    assert short.decision is not None
    assert short.decision.against_base is not None and short.decision.against_base.low > 0
    assert short.decision.against_active is not None and short.decision.against_active.low <= 0
    assert device.active() == Active(package=digest, run=long.run)
    longer = device.train(steps=120)
    assert longer.outcome is Outcome.ADOPTED
    assert device.active() == Active(package=digest, run=longer.run)


@pytest.mark.slow
@pytest.mark.parametrize("at", ["losses-active", "activate"])
def test_a_run_killed_before_its_activation_is_judged_against_the_model_that_is_in_use_then(
    device: Device, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    digest = device.package.digest
    first, second = device.train(steps=10), device.train(steps=40)
    assert (first.outcome, second.outcome) == (Outcome.ADOPTED, Outcome.ADOPTED)

    def die(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("permille_agent.training.train.activate", die)
        if at == "losses-active":
            patch.setattr("permille_agent.training.decision._compared", die)
        with pytest.raises(Killed):
            device.train(steps=160)
    rollback(device.home)
    assert device.active() == Active(package=digest, run=first.run)
    third = device.train(steps=160)
    assert third.outcome is Outcome.ADOPTED
    assert third.decision is not None
    assert third.decision.incumbent == Active(package=digest, run=first.run)
    assert device.active() == Active(package=digest, run=third.run)
    unkilled = device_at(device.home.root.parent / "unkilled", device.text)
    unkilled.train(steps=10)
    alone = unkilled.train(steps=160)
    assert alone.decision is not None and alone.decision.against_active is not None
    assert third.decision.against_active is not None
    assert third.decision.against_active.improvement == alone.decision.against_active.improvement


def test_a_new_package_replaces_a_personalised_one_only_once_training_on_it_is_better(device: Device) -> None:
    before = Active(package=device.package.digest, run=device.train(steps=40).run)
    new = device.install(2, seed=1)
    assert device.active() == before
    weak = device.train(steps=3)
    assert (weak.outcome, device.active()) == (Outcome.KEPT_BASE, before)
    strong = device.train(steps=120)
    assert strong.outcome is Outcome.ADOPTED
    assert device.active() == Active(package=new.digest, run=strong.run)


class _StopsAfter(BigramEngine):
    """An engine that sets the event at its `calls`-th loss."""

    def __init__(self, package: Package, stop: threading.Event, calls: int) -> None:
        super().__init__(package)
        self._stop, self._left = stop, calls

    def losses(self, values_VK: NDArray[np.float32], batch: Batch) -> NDArray[np.float32]:
        self._left -= 1
        if self._left == 0:
            self._stop.set()
        return super().losses(values_VK, batch)


def test_an_interrupted_run_goes_on_with_the_same_bits(device: Device, tmp_path: Path) -> None:
    whole = device_at(tmp_path / "whole", device.text)
    expected = _end_of(whole.home, whole.train())
    for calls in (1, 5, 3, 2):
        stop = threading.Event()
        interrupted = device.train(stop=stop, engine_of=lambda p, s=stop, c=calls: _StopsAfter(p, s, c))
        assert interrupted.outcome is Outcome.INTERRUPTED
    assert _end_of(device.home, device.train()) == expected


def test_the_interruptible_engine_passes_everything_through(package: Package) -> None:
    plain, wrapped = BigramEngine(package), interruptible(BigramEngine(package), threading.Event())
    asked = package.values(), np.array([5, 6]), TokenSampling(max_new_tokens=4)
    assert (wrapped.k, wrapped.info()) == (plain.k, plain.info())
    assert list(wrapped.generate(*asked)) == list(plain.generate(*asked))


@contextmanager
def _killed_at(number: int, *, torn: bool) -> Iterator[list[int]]:
    """Raise `Killed` instead of durable write number `number`. If `torn`, half of that write is stored."""
    count = [0]
    write_all, append = permille.zo.journal._write_all, RunFolder.append_evaluation

    def due() -> bool:
        count[0] += 1
        return count[0] == number

    def state(path: Path, data: bytes, *, mode: int = 0o644) -> None:
        if due():
            raise Killed
        write_atomic(path, data, mode=mode)

    def journal(descriptor: int, data: bytes, offset: int) -> None:
        if due():
            if torn:
                write_all(descriptor, data[: len(data) // 2], offset)
            raise Killed
        write_all(descriptor, data, offset)

    def evaluation(run: RunFolder, descent: int, value: object) -> None:
        if due():
            if torn:
                with run._evaluations_path(descent).open("ab") as file:
                    file.write(b'{"step": 1, "lo')
            raise Killed
        append(run, descent, value)  # type: ignore[arg-type]

    patch = pytest.MonkeyPatch()
    patch.setattr(permille_agent.state.home, "write_atomic", state)
    patch.setattr(permille_agent.training.personal, "write_atomic", state)
    patch.setattr(permille.zo.journal, "_write_all", journal)
    patch.setattr(RunFolder, "append_evaluation", evaluation)
    try:
        yield count
    finally:
        patch.undo()


def test_a_kill_at_any_write_changes_nothing_of_the_end(device: Device, tmp_path: Path) -> None:
    few: dict[str, Any] = {"steps": 2, "queries": 2, "batch_rows": 1}
    whole = device_at(tmp_path / "whole", device.text)
    with _killed_at(0, torn=False) as count:
        expected = _end_of(whole.home, whole.train(**few))
    killed = 0
    # Attempts die at their first and second durable write in turn, so two of them advance the run by one
    # write.
    for number in range(1, count[0] + 1):
        with _killed_at(1 + number % 2, torn=number % 3 == 0):
            try:
                result = device.train(**few)
                break
            except Killed:
                killed += 1
    else:
        result = device.train(**few)
    assert killed >= count[0] // 2
    assert _end_of(device.home, result) == expected


def _flip_a_coefficient(run: RunFolder, journal: Path) -> None:
    (run.path / "state.i64").unlink()
    contents = permille.zo.journal.read_journal(journal)
    records = list(contents.records)
    first, *others = records[1].coefficients
    records[1] = replace(records[1], coefficients=(first + 1, *others))
    journal.unlink()
    with permille.zo.journal.Journal.create(journal, contents.header) as written:
        for record in records:
            written.append(record)


def _cut_the_journal(run: RunFolder, journal: Path) -> None:
    journal.write_bytes(journal.read_bytes()[:-60])


@pytest.mark.parametrize(
    ("damage", "code"), [(_flip_a_coefficient, "state-digest"), (_cut_the_journal, "state-log")]
)
def test_a_damaged_log_is_found_before_the_model_is_used(
    device: Device, damage: Callable[[RunFolder, Path], None], code: str
) -> None:
    result = device.train()
    assert result.decision is not None
    run = find_run(device.home, result.run)
    damage(run, run.journal(result.decision.descent))
    with pytest.raises(PackageError, match=code):
        device.used_values()


def test_a_damaged_cache_of_the_state_is_replayed_instead_and_another_package_refused(device: Device) -> None:
    result = device.train()
    expected_K = device.used_values()
    cache = device.home.runs / str(result.run) / "state.i64"
    data = bytearray(cache.read_bytes())
    data[3] ^= 1
    cache.write_bytes(data)
    assert (device.used_values() == expected_K).all()
    assert cache.read_bytes() != bytes(data)
    other = tiny_package(device.home.blobs, seed=9)
    with pytest.raises(PackageError, match="log-binding"):
        model_values(device.home, Active(package=other.digest, run=result.run), other)


def test_the_definition_of_a_run_names_everything_that_decides_it(device: Device, tmp_path: Path) -> None:
    result = device.train()
    definition = json.loads((device.home.runs / str(result.run) / "run.json").read_text())["definition"]
    assert definition["package"] == device.package.digest
    assert (definition["options"]["steps"], definition["options"]["seed"]) == (QUICK.steps, 0)
    assert replace(device, text=user_text(tmp_path, 330)).train().run != result.run


def test_an_active_model_with_fewer_positions_is_judged_on_rows_that_fit_it(device: Device) -> None:
    def bounded(package: Package) -> BigramEngine:
        engine = BigramEngine(package)
        losses, positions = engine.token_losses, int(package.config["max_position_embeddings"])

        def token_losses(values_K: NDArray[np.float32], batch: Batch) -> NDArray[np.float32]:
            if batch.input_ids_BT.shape[1] > positions:
                raise InputError(f"expected at most {positions} tokens a sequence")
            return losses(values_K, batch)

        engine.token_losses = token_losses  # type: ignore[method-assign]
        return engine

    device.install(2, seed=1, config={"max_position_embeddings": 16})
    assert device.train(engine_of=bounded).outcome is Outcome.ADOPTED
    device.install(3, seed=2)
    second = device.train(engine_of=bounded)
    assert second.outcome in (Outcome.ADOPTED, Outcome.KEPT_BASE)
    assert second.decision is not None and second.decision.against_active is not None


def test_an_active_model_that_cannot_be_opened_protects_nothing(device: Device) -> None:
    base = Active(package=device.package.digest)
    activate(device.home, replace(base, run="gone"), expected=base)
    result = device.train()
    assert result.outcome is Outcome.ADOPTED
    assert "cannot be opened" in result.message
    assert device.active() == replace(base, run=result.run)


def test_an_active_model_that_no_engine_knows_protects_nothing(device: Device) -> None:
    assert device.train(steps=40).outcome is Outcome.ADOPTED
    device.install(2, seed=1)

    def choosy(package: Package) -> Engine:
        if package.digest == device.package.digest:
            raise InputError("expected a family that this engine knows")
        return bigram_engine(package)

    result = device.train(steps=120, engine_of=choosy)
    assert result.outcome is Outcome.ADOPTED
    assert "cannot be opened: expected a family" in result.message

"""A whole run on a small model: adopted, kept, refused, failed, interrupted, killed at every write."""

import json
import math
import threading
from collections.abc import Iterator
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
from permille.package.reader import Package
from permille.schemas.runs import Outcome
from permille.zo.estimators import Batch
from permille.zo.lattice import state_digest, values
from permille.zo.log import decode_canonical
from permille.zo.replay import replay
from permille_agent.state.home import Home
from permille_agent.state.models import Active, InstalledRelease, activate, active_model, record_installed
from permille_agent.training.engines import interruptible
from permille_agent.training.outcome import RunResult
from permille_agent.training.personal import canonical_log, model_values
from permille_agent.training.run import RunFolder, find_run, list_runs
from tests.bigram_engine import BigramEngine, bigram_engine
from tests.packages import tiny_package
from tests.unit.edge_agent.runs import QUICK, home_with_package, train_quickly, user_text


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it."""


def _train(home: Home, *data_paths: Path, **changes: Any) -> RunResult:
    return train_quickly(home, data_paths, **changes)


def _end_of(home: Home, result: RunResult) -> tuple[object, ...]:
    """What has to be the same to the bit, however often a run was killed."""
    run = find_run(home, result.run)
    evaluations = run.evaluations(0)
    return result.outcome, result.decision, result.plan, evaluations, canonical_log(run), active_model(home)


def test_a_run_that_learns_is_adopted(tmp_path: Path) -> None:
    home, package = home_with_package(tmp_path / "home")

    result = _train(home, user_text(tmp_path), share_log=True)

    assert result.outcome is Outcome.ADOPTED
    assert active_model(home) == Active(package=package.digest, run=result.run)
    decision, metrics = result.decision, result.metrics
    assert decision is not None and decision.against_base is not None and metrics is not None
    assert (decision.loss_personal or math.inf) < (decision.loss_base or 0.0)
    assert decision.against_base.low > 0
    assert metrics.state_digest == decision.state_digest
    assert (metrics.steps, metrics.k, metrics.release) == (12, package.k, "tiny")
    assert metrics.test_tokens >= 2000
    assert metrics.peak_rss_bytes > 1 << 20


def test_the_shared_log_replays_to_the_state_that_is_used(tmp_path: Path) -> None:
    home, package = home_with_package(tmp_path / "home")
    result = _train(home, user_text(tmp_path), share_log=True)
    run = RunFolder(home.runs / str(result.run))

    log = decode_canonical((run.path / "shared.log").read_bytes(), max_bytes=1 << 20, max_steps=1000)

    s_K = replay(log.header, log.coefficients_TQ)
    exponent = log.header.step_unit_exponent
    assert result.decision is not None
    assert result.decision.state_digest == state_digest(
        s_K, mask_digest=package.mask_digest, step_unit_exponent=exponent
    )
    active = active_model(home)
    assert active is not None
    used_K = model_values(home, active, package)
    assert (used_K == values(package.values(), s_K, exponent)).all()


def test_without_consent_no_log_and_no_state_digest_is_laid_out(tmp_path: Path) -> None:
    home, _ = home_with_package(tmp_path / "home")

    result = _train(home, user_text(tmp_path))

    assert result.metrics is not None
    assert result.metrics.state_digest is None
    assert result.metrics.log_bytes > 0
    assert not (home.runs / result.run / "shared.log").exists()


def test_the_outcome_and_the_metrics_hold_no_text_and_no_path(tmp_path: Path) -> None:
    home, _ = home_with_package(tmp_path / "home")

    result = _train(home, user_text(tmp_path))

    outcome = (home.runs / str(result.run) / "outcome.json").read_text()
    assert "river" not in outcome
    assert str(tmp_path) not in outcome


class Unlearnable(BigramEngine):
    """Evaluations know nothing of what the steps do."""

    def losses(self, values_VK: NDArray[np.float32], batch: Batch) -> NDArray[np.float32]:
        """As ever."""
        means = [BigramEngine.token_losses(self, values_K, batch).mean() for values_K in values_VK]
        return np.array(means, dtype=np.float32)

    def token_losses(self, values_K: NDArray[np.float32], batch: Batch) -> NDArray[np.float32]:
        """Depends on the values only by chance."""
        seed = int(np.abs(values_K).sum(dtype=np.float64) * 1e6) % 2**32
        rng = np.random.Generator(np.random.PCG64(seed))
        noise: NDArray[np.float64] = rng.normal(4.0, 0.5, int(batch.target_BT.sum()))
        return noise.astype(np.float32)


def test_what_is_not_surely_better_is_not_adopted(tmp_path: Path) -> None:
    home, package = home_with_package(tmp_path / "home")

    result = _train(home, user_text(tmp_path), engine_of=Unlearnable)

    assert result.outcome is Outcome.KEPT_BASE
    assert active_model(home) == Active(package=package.digest)
    assert result.decision is not None and result.decision.adopted is False


def test_too_little_text_is_refused_and_reported_once(tmp_path: Path) -> None:
    home, package = home_with_package(tmp_path / "home")
    text = user_text(tmp_path, 20)

    first = _train(home, text)
    second = _train(home, text)

    assert first.outcome is second.outcome is Outcome.REFUSED_DATA
    assert "expected at least 5400 tokens" in first.message
    assert (first.known, second.known) == (False, True)
    assert len(list_runs(home)) == 1
    assert first.metrics is not None and first.metrics.package_digest == package.digest
    assert active_model(home) == Active(package=package.digest)


def test_losses_that_are_never_finite_end_as_failed(tmp_path: Path) -> None:
    home, package = home_with_package(tmp_path / "home")

    result = _train(home, user_text(tmp_path), engine_of=lambda package: BigramEngine(package, nan_above=0.0))

    assert result.outcome is Outcome.FAILED
    assert "relative error" in result.message
    assert result.metrics is not None and result.metrics.steps == 0
    assert active_model(home) == Active(package=package.digest)


def test_a_run_that_ended_is_told_again_not_computed_again(tmp_path: Path) -> None:
    home, _ = home_with_package(tmp_path / "home")
    text = user_text(tmp_path)
    first = _train(home, text)

    def no_engine(_package: Package) -> BigramEngine:
        raise AssertionError("no engine is needed")

    second = _train(home, text, engine_of=no_engine)

    assert second.known
    assert replace(second, known=False) == replace(first, known=False)


def test_nothing_installed_and_unusable_paths_are_refused(tmp_path: Path) -> None:
    home = permille_agent.state.home.open_home(tmp_path / "home")
    with pytest.raises(OperatorError, match="permille-agent pull"):
        _train(home, tmp_path)
    home, _ = home_with_package(tmp_path / "home")
    with pytest.raises(InputError, match="found none"):
        _train(home, tmp_path / "missing.txt")


def test_a_new_run_replaces_the_active_one_only_where_it_is_better(tmp_path: Path) -> None:
    home, package = home_with_package(tmp_path / "home")
    text = user_text(tmp_path)
    long = _train(home, text, steps=40)

    short = _train(home, text, steps=10)

    assert long.outcome is Outcome.ADOPTED
    assert short.outcome is Outcome.KEPT_BASE
    assert short.decision is not None
    assert short.decision.against_base is not None and short.decision.against_base.low > 0
    assert short.decision.against_active is not None and short.decision.against_active.low <= 0
    assert active_model(home) == Active(package=package.digest, run=long.run)
    longer = _train(home, text, steps=120)
    assert longer.outcome is Outcome.ADOPTED
    assert active_model(home) == Active(package=package.digest, run=longer.run)


def test_a_new_package_replaces_a_personalised_one_only_once_training_on_it_is_better(tmp_path: Path) -> None:
    home, old = home_with_package(tmp_path / "home")
    text = user_text(tmp_path)
    first = _train(home, text, steps=40)
    new = tiny_package(home.blobs, seed=1)
    record_installed(home, InstalledRelease(name="tiny", version=2, manifest_digest=new.digest))

    assert active_model(home) == Active(package=old.digest, run=first.run)
    weak = _train(home, text, steps=3)
    assert (weak.outcome, active_model(home)) == (
        Outcome.KEPT_BASE,
        Active(package=old.digest, run=first.run),
    )
    strong = _train(home, text, steps=120)
    assert strong.outcome is Outcome.ADOPTED
    assert active_model(home) == Active(package=new.digest, run=strong.run)


def test_an_interrupted_run_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    text = user_text(tmp_path)
    whole, _ = home_with_package(tmp_path / "whole")
    expected = _end_of(whole, _train(whole, text))
    home, _ = home_with_package(tmp_path / "home")
    for calls in (1, 9, 7, 6, 3):
        stop = threading.Event()
        interrupted = _train(home, text, stop=stop, engine_of=lambda p, s=stop, c=calls: _StopsAfter(p, s, c))
        assert interrupted.outcome is Outcome.INTERRUPTED

    assert _end_of(home, _train(home, text)) == expected


class _StopsAfter(BigramEngine):
    """Sets the event after so many calls."""

    def __init__(self, package: Package, stop: threading.Event, calls: int) -> None:
        super().__init__(package)
        self._stop = stop
        self._left = calls

    def losses(self, values_VK: NDArray[np.float32], batch: Batch) -> NDArray[np.float32]:
        """Counted."""
        self._left -= 1
        if self._left == 0:
            self._stop.set()
        return super().losses(values_VK, batch)


def test_the_interruptible_engine_passes_everything_through(tmp_path: Path) -> None:
    package = tiny_package(tmp_path)
    plain, wrapped = BigramEngine(package), interruptible(BigramEngine(package), threading.Event())
    prompt = np.array([5, 6])

    assert wrapped.k == plain.k
    assert wrapped.info() == plain.info()
    assert list(wrapped.generate(package.values(), prompt, TokenSampling(max_new_tokens=4))) == list(
        plain.generate(package.values(), prompt, TokenSampling(max_new_tokens=4))
    )


@contextmanager
def _killed_at(number: int, *, torn: bool) -> Iterator[list[int]]:
    """Raise `Killed` in place of the durable write with this number, or after half of it."""
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


def test_a_kill_at_any_write_changes_nothing_of_the_end(tmp_path: Path) -> None:
    text = user_text(tmp_path)
    few: dict[str, Any] = {"steps": 4, "queries": 2, "batch_rows": 1}
    whole, _ = home_with_package(tmp_path / "whole")
    with _killed_at(0, torn=False) as count:
        expected = _end_of(whole, _train(whole, text, **few))
    home, _ = home_with_package(tmp_path / "killed")
    killed = 0
    # Each try is killed one write later than it came so far, so every write is hit, one run through.
    for number in range(1, count[0] + 1):
        with _killed_at(1 + number % 2, torn=number % 3 == 0):
            try:
                result = _train(home, text, **few)
                break
            except Killed:
                killed += 1
    else:
        result = _train(home, text, **few)

    assert killed >= count[0] // 2
    assert _end_of(home, result) == expected


def test_a_flipped_coefficient_is_found_before_the_model_is_used(tmp_path: Path) -> None:
    home, package = home_with_package(tmp_path / "home")
    result = _train(home, user_text(tmp_path))
    run = find_run(home, result.run)
    (run.path / "state.i64").unlink()
    journal_path = run.journal(result.decision.descent if result.decision else 9)
    contents = permille.zo.journal.read_journal(journal_path)
    records = list(contents.records)
    flipped = replace(records[1], coefficients=(records[1].coefficients[0] + 1, *records[1].coefficients[1:]))
    journal_path.unlink()
    with permille.zo.journal.Journal.create(journal_path, contents.header) as journal:
        for record in [records[0], flipped, *records[2:]]:
            journal.append(record)

    active = active_model(home)
    assert active is not None
    with pytest.raises(PackageError, match="state-digest"):
        model_values(home, active, package)


def test_a_damaged_cache_of_the_state_is_replayed_instead(tmp_path: Path) -> None:
    home, package = home_with_package(tmp_path / "home")
    result = _train(home, user_text(tmp_path))
    active = active_model(home)
    assert active is not None
    expected_K = model_values(home, active, package)
    cache = home.runs / str(result.run) / "state.i64"
    data = bytearray(cache.read_bytes())
    data[3] ^= 1
    cache.write_bytes(data)

    assert (model_values(home, active, package) == expected_K).all()
    assert cache.read_bytes() != bytes(data)


def test_a_run_on_another_package_is_refused(tmp_path: Path) -> None:
    home, _ = home_with_package(tmp_path / "home")
    result = _train(home, user_text(tmp_path))
    other = tiny_package(home.blobs, seed=9)

    with pytest.raises(PackageError, match="log-binding"):
        model_values(home, Active(package=other.digest, run=result.run), other)


def test_a_journal_that_lost_steps_is_refused(tmp_path: Path) -> None:
    home, package = home_with_package(tmp_path / "home")
    result = _train(home, user_text(tmp_path))
    run = find_run(home, result.run)
    journal = run.journal(result.decision.descent if result.decision else 9)
    journal.write_bytes(journal.read_bytes()[:-60])
    active = active_model(home)
    assert active is not None

    with pytest.raises(PackageError, match="state-log"):
        model_values(home, active, package)


def test_the_definition_of_a_run_names_everything_that_decides_it(tmp_path: Path) -> None:
    home, package = home_with_package(tmp_path / "home")
    result = _train(home, user_text(tmp_path))
    definition = json.loads((home.runs / str(result.run) / "run.json").read_text())["definition"]

    assert definition["package"] == package.digest
    assert definition["options"]["steps"] == QUICK.steps
    assert definition["options"]["seed"] == 0
    other = _train(home, user_text(tmp_path, 330))
    assert other.run != result.run


def test_an_active_model_with_fewer_positions_is_judged_on_rows_that_fit_it(tmp_path: Path) -> None:
    home, _ = home_with_package(tmp_path / "home")
    short = tiny_package(home.blobs, seed=1, config={"max_position_embeddings": 16})
    record_installed(home, InstalledRelease(name="tiny", version=2, manifest_digest=short.digest))

    def bounded(package: Package) -> BigramEngine:
        engine = BigramEngine(package)
        losses, positions = engine.token_losses, int(package.config["max_position_embeddings"])

        def token_losses(values_K: NDArray[np.float32], batch: Batch) -> NDArray[np.float32]:
            if batch.input_ids_BT.shape[1] > positions:
                raise InputError(f"expected at most {positions} tokens a sequence")
            return losses(values_K, batch)

        engine.token_losses = token_losses  # type: ignore[method-assign]
        return engine

    first = _train(home, user_text(tmp_path), engine_of=bounded)
    assert first.outcome is Outcome.ADOPTED
    roomy = tiny_package(home.blobs, seed=2)
    record_installed(home, InstalledRelease(name="tiny", version=3, manifest_digest=roomy.digest))

    second = _train(home, user_text(tmp_path), engine_of=bounded)

    assert second.outcome in (Outcome.ADOPTED, Outcome.KEPT_BASE)
    assert second.decision is not None and second.decision.against_active is not None


def test_an_active_model_that_cannot_be_opened_protects_nothing(tmp_path: Path) -> None:
    home, package = home_with_package(tmp_path / "home")
    activate(home, Active(package=package.digest, run="gone"), expected=Active(package=package.digest))

    result = _train(home, user_text(tmp_path))

    assert result.outcome is Outcome.ADOPTED
    assert "cannot be opened" in result.message
    assert active_model(home) == Active(package=package.digest, run=result.run)


def test_an_active_model_that_no_engine_knows_protects_nothing(tmp_path: Path) -> None:
    home, old = home_with_package(tmp_path / "home")
    text = user_text(tmp_path)
    first = _train(home, text, steps=40)
    assert first.outcome is Outcome.ADOPTED
    new = tiny_package(home.blobs, seed=1)
    record_installed(home, InstalledRelease(name="tiny", version=2, manifest_digest=new.digest))

    def choosy(package: Package) -> Engine:
        if package.digest == old.digest:
            raise InputError("expected a family that this engine knows")
        return bigram_engine(package)

    result = _train(home, text, steps=120, engine_of=choosy)

    assert result.outcome is Outcome.ADOPTED
    assert "cannot be opened: expected a family" in result.message


def test_bad_rows_are_counted_in_the_outcome_and_named_only_beside_it(tmp_path: Path) -> None:
    home, _ = home_with_package(tmp_path / "home")
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{not json\n")

    result = _train(home, user_text(tmp_path), bad)

    assert result.data is not None and result.data.bad_rows == {"not JSON": 1}
    assert result.bad_row_examples == (f"{bad}:1: not JSON",)
    assert "bad.jsonl" not in (home.runs / str(result.run) / "outcome.json").read_text()

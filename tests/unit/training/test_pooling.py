"""Tests of pooled states: trained as on a device, judged on unseen text, and bound to their package."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from permille.engines.light.engine import LightEngine
from permille.errors import InputError
from permille.package.build import write_manifest
from permille.package.limits import Role
from permille.package.reader import Package, verify_package
from permille.training.pooling import Pooled, PoolingPlan, pool, write_pooled
from permille.training.reference import Reference, make_reference
from permille.zo.estimators import Batch
from permille.zo.lattice import values
from permille.zo.packed_state import StateOrigin, pooled_state
from permille_agent.link.pull import plan_download
from tests.bigram_engine import BigramEngine
from tests.packages import pooled_package, sentences, tiny_package, tiny_tokenizer
from tests.unit.engines.tiny import VOCABULARY
from tests.unit.engines.tiny import tiny_package as write_tiny

PLAN = PoolingPlan(steps=50, batch_rows=3, seed=1)


@pytest.fixture
def package(tmp_path: Path) -> Package:
    return tiny_package(tmp_path / "blobs")


@pytest.fixture(scope="module")
def rows() -> NDArray[np.int64]:
    """Return 80 rows of 24 tokens of one kind of text."""
    tokenizer = tiny_tokenizer()
    ids = [token for text in sentences(400) for token in tokenizer.encode(text).ids]
    return np.array(ids[: 80 * 24], np.int64).reshape(80, 24)


class Recording(BigramEngine):
    """An engine that records the rows of its gradients and of its losses."""

    def __init__(self, package: Package) -> None:
        super().__init__(package)
        self.trained: list[bytes] = []
        self.judged: set[bytes] = set()

    def gradient(self, values_K: NDArray[np.float32], batch: Batch) -> tuple[float, NDArray[np.float32]]:
        self.trained += [row.tobytes() for row in batch.input_ids_BT]
        return super().gradient(values_K, batch)

    def token_losses(self, values_K: NDArray[np.float32], batch: Batch) -> NDArray[np.float32]:
        self.judged |= {row.tobytes() for row in batch.input_ids_BT}
        return super().token_losses(values_K, batch)


class KilledError(Exception):
    """Simulated death of the process."""


def trained(package: Package, rows: NDArray[np.int64], checkpoint: Path, **changes: Any) -> Pooled:
    engine = changes.pop("engine", BigramEngine(package))
    progress = changes.pop("progress", lambda _done, _total: None)
    plan = replace(PLAN, **changes)
    return pool(engine, package, rows, plan, checkpoint=checkpoint, progress=progress)


def test_a_state_is_better_on_rows_that_no_step_has_seen(
    package: Package, rows: NDArray[np.int64], tmp_path: Path
) -> None:
    engine = Recording(package)
    found = trained(package, rows, tmp_path / "moments", engine=engine)
    assert found.better
    assert found.loss_pooled < found.loss_base - 0.1
    assert found.gain == pytest.approx(found.loss_base - found.loss_pooled)
    held = {row.tobytes() for row in rows[-8:]}
    assert held <= engine.judged
    assert not held & set(engine.trained)
    counts = {row: engine.trained.count(row) for row in engine.trained}
    assert len(counts) == 72 and set(counts.values()) == {2, 3}, "150 rows are each of 72 twice, and 6 more"
    values_K = values(package.values(), found.s_K, found.step_unit_exponent)
    assert (values_K != package.values()).any()


@pytest.mark.parametrize("at", [1, 19, 20, 33, 50])
def test_a_kill_anywhere_changes_no_bit(
    package: Package, rows: NDArray[np.int64], tmp_path: Path, at: int
) -> None:
    def dies(done: int, _total: int) -> None:
        if done == at:
            raise KilledError

    whole = trained(package, rows, tmp_path / "whole")
    with pytest.raises(KilledError):
        trained(package, rows, tmp_path / "killed", progress=dies)
    engine = Recording(package)
    again = trained(package, rows, tmp_path / "killed", engine=engine)
    assert again.s_K.tobytes() == whole.s_K.tobytes()
    assert (again.loss_pooled, again.gain) == (whole.loss_pooled, whole.gain)
    assert len(engine.trained) == 3 * (50 - (50 if at == 50 else at // 20 * 20))


def test_a_damaged_checkpoint_costs_steps_and_no_bit(
    package: Package, rows: NDArray[np.int64], tmp_path: Path
) -> None:
    whole = trained(package, rows, tmp_path / "moments")
    data = bytearray((tmp_path / "moments").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "moments").write_bytes(data)
    engine = Recording(package)
    again = trained(package, rows, tmp_path / "moments", engine=engine)
    assert again.s_K.tobytes() == whole.s_K.tobytes()
    assert len(engine.trained) == 3 * 50


def test_too_little_text_and_weights_of_zero_are_refused(
    package: Package, rows: NDArray[np.int64], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match="needs 5 sequences or more, and has 4"):
        trained(package, rows[:4], tmp_path / "moments")
    monkeypatch.setattr(package, "values", lambda: np.zeros(package.k, np.float32))
    with pytest.raises(InputError, match=r"all 0, or too large: the rate is 0\.0"):
        pool(BigramEngine(package), package, rows, PLAN, checkpoint=tmp_path / "moments")


def test_a_state_that_changes_nothing_is_not_better(package: Package) -> None:
    nothing = Pooled(
        s_K=np.zeros(package.k, np.int64),
        step_unit_exponent=-20,
        loss_base=1.0,
        loss_pooled=1.0,
        gain=0.0,
        error=0.0,
    )
    assert not nothing.better
    assert not replace(nothing, gain=0.1, error=0.06).better
    assert replace(nothing, gain=0.1, error=0.04).better


def test_a_package_with_a_state_differs_from_its_parent_in_that_alone(package: Package) -> None:
    s_K = np.arange(package.k) - 5
    made = pooled_package(package, s_K, -12)
    assert made.digest != package.digest
    assert made.manifest.parent() == package.manifest
    assert set(made.manifest.layers) - set(package.manifest.layers) == {made.manifest.layer(Role.POOLED)}
    assert made.manifest.provenance["pooling"] == {"corpus": "made up"}
    found = pooled_state(verify_package(made.blobs, made.digest))
    assert found is not None
    assert (found.s_K == s_K).all()
    assert (found.header.package_digest, found.header.origin) == (package.digest, StateOrigin.POOLED)
    assert pooled_state(package) is None


def test_a_device_that_has_the_package_downloads_the_state_alone(package: Package) -> None:
    made = pooled_package(package, np.ones(package.k, np.int64), -12)
    has = {layer.digest for layer in package.manifest.layers}
    plan = plan_download(made.manifest, 1 << 40, present=has)
    assert [layer.role for layer in plan.layers] == [Role.POOLED]
    assert plan.download_bytes < package.k


def test_another_state_replaces_the_first(package: Package, rows: NDArray[np.int64], tmp_path: Path) -> None:
    first = pooled_package(package, np.ones(package.k, np.int64), -12)
    found = trained(first, rows, tmp_path / "moments")
    second = write_pooled(first.blobs, first.manifest, found, {})
    assert second.parent() == package.manifest
    assert sum(layer.role is Role.POOLED for layer in second.layers) == 1


def test_the_reference_pulls_and_bounds_what_general_text_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = write_tiny(tmp_path / "tiny", "llama").package
    rng = np.random.default_rng(3)
    text_NT = rng.integers(0, VOCABULARY, (8, 12))
    made = make_reference(bare, text_NT=text_NT, chat=None, made={})
    package = Package.open(bare.blobs, write_manifest(bare.blobs, made))
    pull = Reference.pull
    engine, reference, base_K = LightEngine(package), Reference.of(package), package.values()
    assert reference is not None
    # A random model forgets nothing, so the general loss is replaced by the state's size.
    monkeypatch.setattr(Reference, "loss", lambda _self, _engine, v_K: float(np.abs(v_K - base_K).sum()))
    pulls: list[int] = []

    def counted(self: Reference, step: int) -> Batch:
        pulls.append(step)
        return pull(self, step)

    monkeypatch.setattr(Reference, "pull", counted)
    rows_NT = np.tile(rng.integers(0, VOCABULARY, 12), (40, 1))
    plan = PoolingPlan(steps=12, batch_rows=4)

    def rise(bound: float) -> tuple[float, int]:
        monkeypatch.setattr("permille.training.pooling.KEEP_GENERAL", bound)
        found = pool(engine, package, rows_NT, plan, checkpoint=tmp_path / "moments")
        values_K = values(base_K, found.s_K, found.step_unit_exponent)
        rise = reference.loss(engine, values_K) - reference.loss(engine, base_K)
        return rise, int(np.abs(found.s_K).sum())

    free, whole = rise(1e9)
    assert pulls == list(range(12))
    assert free > 0
    bounded, less = rise(free / 2)
    assert bounded <= free / 2
    assert 0 < less < whole
    with pytest.raises(InputError, match="at an eighth of its strength"):
        rise(-1.0)

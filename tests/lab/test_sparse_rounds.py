"""Tests of rounds of pruning and fine-tuning on a tiny checkpoint: rates, zeros, reports and kills."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from permille.errors import InputError
from permille.models.checkpoint import Checkpoint
from permille.models.families import scoped_tensors
from permille.models.loading import load_model
from permille.quantization.perplexity import perplexity
from permille_lab.sparse.adapters import RecoveryAdapter
from permille_lab.sparse.rounds import IterativePlan, IterativeText, iterate
from permille_sparsify.plan import Pattern, PruningMethod, RecoveryPlan
from tests.unit.engines.tiny import tiny_model

_ROWS = np.random.default_rng(0).integers(0, 60, (3, 8, 12))
TEXT = IterativeText(calibration_NT=_ROWS[0], recovery_MT=_ROWS[1], evaluation_ET=_ROWS[2][:2])
STEPS = RecoveryPlan(steps=2, rows=4, rate=0.01)
PLAN = IterativePlan(rate=0.6, rounds=3, rank=2, longer=2, recovery=STEPS, spread=0.2)


class KilledError(Exception):
    """Error of a test's `progress` function."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("source")
    tiny_model("llama").save_pretrained(folder)
    return Checkpoint(folder)


def zeros(model: Checkpoint) -> dict[str, float]:
    return {name: float((model.float32(name) == 0).mean()) for name, _ in scoped_tensors(model.config)}


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_rounds_reach_the_rate_and_report_what_they_lost(source: Checkpoint, tmp_path: Path) -> None:
    folder, rounds = iterate(source, tmp_path, TEXT, PLAN)
    made = Checkpoint(folder)
    assert [found.rate for found in rounds] == pytest.approx([0.6 * 19 / 27, 0.6 * 26 / 27, 0.6])
    assert all(np.mean(found.rates) == pytest.approx(found.rate) for found in rounds)
    assert rounds[-1].rates != pytest.approx([0.6, 0.6])
    for name, share in zeros(made).items():
        asked = rounds[-1].rates[int(name.split("layers.")[1][0])]
        assert asked - 1 / 16 <= share <= asked + 1e-9, name
    assert made.names == source.names
    untouched = set(source.names) - {name for name, _ in scoped_tensors(source.config)}
    assert all(made.raw(name).data.tobytes() == source.raw(name).data.tobytes() for name in untouched)
    assert TEXT.evaluation_ET is not None
    first, judged = (
        perplexity(load_model(each), TEXT.evaluation_ET)["loss"] for each in (source.folder, folder)
    )
    assert [found.loss_before for found in rounds] == [first, *(found.loss_merged for found in rounds[:-1])]
    assert judged == rounds[-1].loss_merged != rounds[-1].loss_pruned
    assert sorted(path.name for path in tmp_path.glob("*/model")) == ["model"]


def test_earlier_zeros_stay_in_a_pattern(source: Checkpoint, tmp_path: Path) -> None:
    plan = replace(PLAN, rate=0.5, pattern=Pattern.parse("2:4"), adapter=RecoveryAdapter.LORA, rounds=2)
    folder, rounds = iterate(source, tmp_path, replace(TEXT, evaluation_ET=None), plan)
    assert rounds[0].loss_merged is rounds[1].loss_before is rounds[1].loss_merged is None
    assert rounds[0].rates == pytest.approx((0.4375, 0.4375))
    for name, _ in scoped_tensors(source.config):
        groups = (Checkpoint(folder).float32(name) == 0).reshape(-1, 4).sum(axis=1)
        assert groups.tolist() == [2] * len(groups)


def test_a_dense_adapter_says_what_merging_costs(source: Checkpoint, tmp_path: Path) -> None:
    steps = replace(STEPS, steps=10, rate=0.05)
    plan = replace(PLAN, rounds=1, masked=False, by_loss=False, spread=0.0, recovery=steps)
    _, (only,) = iterate(source, tmp_path, TEXT, replace(plan, method=PruningMethod.MAGNITUDE))
    assert only.rates == (0.6, 0.6)
    assert only.loss_dense is not None
    assert only.loss_dense != only.loss_merged
    assert min(only.norms) > 0


@pytest.mark.slow
@pytest.mark.parametrize("killed_at", [0.02, 0.5, 0.75, 0.97])
def test_a_killed_work_goes_on_to_the_same_bits(source: Checkpoint, tmp_path: Path, killed_at: float) -> None:
    noted: list[str] = []

    def kill(done: float, _note: str) -> None:
        if done > killed_at:
            raise KilledError

    whole, reports = iterate(source, tmp_path / "whole", TEXT, PLAN)
    with pytest.raises(KilledError):
        iterate(source, tmp_path / "killed", TEXT, PLAN, progress=kill)
    resumed, again = iterate(
        source, tmp_path / "killed", TEXT, PLAN, progress=lambda _done, note: noted.append(note)
    )
    assert weights(resumed) == weights(whole)
    assert again == reports
    assert noted[0].startswith(f"round {1 + (killed_at >= 0.25) + (killed_at >= 0.5)}/3")


def test_another_plan_begins_anew_and_a_finished_one_is_not_made_again(
    source: Checkpoint, tmp_path: Path
) -> None:
    noted: list[str] = []
    plan = replace(PLAN, rounds=1)
    iterate(source, tmp_path, TEXT, replace(plan, rate=0.3))
    folder, _ = iterate(source, tmp_path, TEXT, plan, progress=lambda _done, note: noted.append(note))
    assert noted
    noted.clear()
    assert iterate(source, tmp_path, TEXT, plan, progress=lambda _done, note: noted.append(note))[0] == folder
    assert noted == []


def test_bad_plans_are_refused(source: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="at least 1 round"):
        iterate(source, tmp_path, TEXT, replace(PLAN, rounds=0))
    folder, _ = iterate(source, tmp_path / "once", TEXT, replace(PLAN, rounds=1))
    shutil.copytree(folder, tmp_path / "sparse")
    with pytest.raises(InputError, match="has these zeros already"):
        iterate(Checkpoint(tmp_path / "sparse"), tmp_path / "twice", TEXT, replace(PLAN, rate=0.3))


def test_norm_control_makes_changes_smaller(source: Checkpoint, tmp_path: Path) -> None:
    plan = replace(PLAN, rounds=1, recovery=replace(STEPS, steps=10, rate=0.05))
    (free,), (held,) = (
        iterate(source, tmp_path / str(l2), TEXT, replace(plan, l2=l2))[1] for l2 in (0.0, 10.0)
    )
    assert held.norms[0] < 0.8 * free.norms[0]

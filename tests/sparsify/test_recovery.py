"""Tests of the recovery of pruned models: zeros, merging, losses and kills."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from permille.corpora.sequences import row_order
from permille.errors import InputError
from permille.models.checkpoint import Checkpoint
from permille.models.families import scoped_tensors
from permille.models.loading import load_model
from permille_sparsify.plan import RecoveryPlan
from permille_sparsify.recovery import STEPS_A_CHECKPOINT, attach, recover, recover_model
from tests.unit.engines.tiny import tiny_model

ROWS_NT = np.random.default_rng(0).integers(0, 60, (12, 10))


class KilledError(Exception):
    """Error of a test's `progress` function."""


def pruned_model() -> Any:
    """Return a model with zeros in half of its linear weights."""
    model = tiny_model("llama")
    rng = np.random.default_rng(3)
    with torch.no_grad():
        for name in names(model):
            weight = model.get_parameter(name)
            weight[torch.from_numpy(rng.random(tuple(weight.shape)) < 0.5)] = 0
    return model


def names(model: Any) -> list[str]:
    return [name for name, _ in scoped_tensors(model.config.to_dict())]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return torch.as_tensor(model(input_ids=torch.from_numpy(ROWS_NT[:2])).logits)


def recovered(checkpoint: Path | None = None, stop: int = 0) -> Any:
    """Return a model after 24 steps of recovery. Raise `KilledError` after `stop` steps instead."""

    def progress(done: int, _total: int) -> None:
        if done == stop:
            raise KilledError

    model = pruned_model()
    trained = attach(model, names(model), 3, seed=1)
    recover(
        model,
        trained,
        ROWS_NT,
        RecoveryPlan(steps=24, rows=3, rate=0.02, seed=5),
        checkpoint=checkpoint,
        progress=progress,
    )
    return model


def test_a_recovered_model_computes_as_in_training_and_keeps_zeros(tmp_path: Path) -> None:
    pruned = pruned_model()
    pruned.save_pretrained(tmp_path / "pruned")
    plan = RecoveryPlan(steps=24, rows=3, rate=0.02, rank=3, seed=5)
    target = tmp_path / "recovered"
    recover_model(Checkpoint(tmp_path / "pruned"), target, ROWS_NT, plan)
    trained = load_model(tmp_path / "pruned")
    recover(trained, attach(trained, names(trained), 3, seed=5), ROWS_NT, plan)
    model = load_model(target)
    assert torch.equal(logits(model), logits(trained))
    for name in names(model):
        zeros = pruned.get_parameter(name) == 0
        weight = model.get_parameter(name)
        assert not weight[zeros].any()
        assert not torch.signbit(weight[zeros]).any()
        assert bool((weight[~zeros] != pruned.get_parameter(name)[~zeros]).any())
    others = set(pruned.state_dict()) - set(names(pruned))
    assert all(torch.equal(model.state_dict()[name], pruned.state_dict()[name]) for name in others)


def test_steps_lower_the_loss_and_train_adapters_alone() -> None:
    model = pruned_model()
    trained = attach(model, names(model), 4, seed=0)
    losses = recover(model, trained, ROWS_NT, RecoveryPlan(steps=40, rows=4, rate=0.03))
    assert losses[0] == pytest.approx(math.log(model.config.vocab_size), abs=0.5)
    assert np.mean(losses[-5:]) < losses[0] - 0.3
    changed = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert {id(parameter) for parameter in changed} == {id(parameter) for parameter in trained}


def test_a_killed_training_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    path = tmp_path / "steps"
    with pytest.raises(KilledError):
        recovered(path, stop=STEPS_A_CHECKPOINT + 2)
    resumed, whole = recovered(path), recovered()
    for (_, first), (_, second) in zip(resumed.named_parameters(), whole.named_parameters(), strict=True):
        assert torch.equal(first, second)


def test_a_damaged_checkpoint_begins_again(tmp_path: Path) -> None:
    path = tmp_path / "steps"
    with pytest.raises(KilledError):
        recovered(path, stop=STEPS_A_CHECKPOINT)
    path.write_bytes(path.read_bytes()[:-9])
    assert torch.equal(logits(recovered(path)), logits(recovered()))


def test_every_row_is_taken_once_a_turn() -> None:
    taken = np.concatenate([row_order(10, 4, 3, step) for step in range(5)])
    assert sorted(taken[:10]) == sorted(taken[10:]) == list(range(10))
    assert taken[:10].tolist() != taken[10:].tolist()


def test_too_little_text_is_refused() -> None:
    model = pruned_model()
    trained = attach(model, names(model), 2, seed=0)
    with pytest.raises(InputError, match="takes 16 rows"):
        recover(model, trained, ROWS_NT, RecoveryPlan(steps=1, rows=16, rate=0.1))

"""Gradients of masked weights against transformers' own loss, in flat order, and resumed after a stop."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from permille.errors import InputError
from permille.models.families import scoped_tensors
from permille.sensitivity.gradients import masked_gradients
from tests.unit.sensitivity.test_fisher import sequences, tiny


def mask_of(model: Any, count: int = 3) -> dict[str, NDArray[np.uint32]]:
    """Some weights of every second tensor; the others have none."""
    rng = np.random.default_rng(1)
    return {
        name: np.sort(rng.choice(n * k, (count if index % 2 else 0), replace=False)).astype(np.uint32)
        for index, (name, (n, k)) in enumerate(scoped_tensors(model.config.to_dict()))
    }


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_rows_are_the_gradients_of_single_sequences_in_flat_order(family: str) -> None:
    model = tiny(family)
    mask = mask_of(model)
    rows = masked_gradients(model, sequences(), mask)
    assert rows.shape == (5, sum(indices.size for indices in mask.values()))
    for tokens_T, row in zip(sequences(), rows, strict=True):
        ids_BT = torch.from_numpy(tokens_T)[None]
        model.zero_grad()
        model(input_ids=ids_BT, labels=ids_BT).loss.backward()
        expected = [model.get_parameter(name).grad.reshape(-1)[mask[name].astype(int)] for name in mask]
        np.testing.assert_allclose(row, torch.cat(expected).numpy(), rtol=2e-4, atol=1e-7)


def test_the_model_is_as_before() -> None:
    model = tiny()
    model.lm_head.weight.requires_grad_(False)
    before = {name: (p.requires_grad, p.detach().clone()) for name, p in model.named_parameters()}
    masked_gradients(model, sequences(2), mask_of(model))
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == before[name][0] and parameter.grad is None
        assert torch.equal(parameter, before[name][1])


def test_a_stopped_job_goes_on_after_the_last_rows_that_it_kept(tmp_path: Path) -> None:
    model, tokens = tiny(), sequences(40)
    mask = mask_of(model)
    seen: list[int] = []

    def stop(done: int, total: int) -> None:
        seen.append(done)
        if done == 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        masked_gradients(model, tokens, mask, folder=tmp_path, progress=stop)
    rows = masked_gradients(
        model, tokens, mask, folder=tmp_path, progress=lambda done, total: seen.append(done)
    )
    assert seen == [*range(1, 21), *range(17, 41)]
    assert np.array_equal(rows, masked_gradients(model, tokens, mask))


def test_rows_of_another_mask_are_not_taken_for_ours(tmp_path: Path) -> None:
    model = tiny()
    masked_gradients(model, sequences(), mask_of(model), folder=tmp_path)
    other = {name: indices[:-1] for name, indices in mask_of(model, 4).items()}
    found = masked_gradients(model, sequences(), other, folder=tmp_path)
    assert np.array_equal(found, masked_gradients(model, sequences(), other))


def test_what_has_no_gradient_is_refused() -> None:
    model = tiny()
    mask = mask_of(model)
    with pytest.raises(InputError, match="masked"):
        masked_gradients(model, sequences(), {name: indices[:0] for name, indices in mask.items()})
    with pytest.raises(InputError, match="token ids"):
        masked_gradients(model, sequences() + 40, mask)
    torch.nn.init.constant_(model.model.layers[1].mlp.down_proj.weight, float("nan"))
    with pytest.raises(InputError, match="finite"):
        masked_gradients(model, sequences(), mask)

"""Tests of every trained set: its gradient against finite differences, and the weights that stay fixed."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from permille.errors import InputError
from permille.zo.estimators import Batch
from permille_lab.models import trainables
from permille_lab.models.forward_rows import PACKABLE, can_pack, packed_parts
from permille_lab.models.trainables import Trainable
from tests.unit.engines.tiny import CONFIGS, tiny_batch, tiny_model

MASK = {"model.layers.0.mlp.up_proj.weight": np.array([3, 40], np.uint32)}
MAKERS: dict[str, Callable[[Any], Trainable]] = {
    "masked": lambda model: trainables.masked_weights(model, MASK),
    "all": trainables.all_weights,
    "lora": lambda model: trainables.lora(model, 4, frozen_a=False, seed=0),
    "lora-fa": lambda model: trainables.lora(model, 4, frozen_a=True, seed=0),
    "prefix": lambda model: trainables.prefix(model, 3, seed=0),
    "prefix-real": lambda model: trainables.prefix(model, 3, real=True, seed=0),
}


@pytest.fixture
def batch() -> Batch:
    return tiny_batch()


@pytest.mark.parametrize("kind", sorted(MAKERS))
def test_the_gradient_is_that_of_the_losses(kind: str, batch: Batch) -> None:
    trainable = MAKERS[kind](tiny_model("llama"))
    rng = np.random.default_rng(0)
    z_K = rng.choice(np.array([-1, 1], np.float32), trainable.k)
    epsilon = np.float32(0.05 / np.sqrt(trainable.k))
    pair_VK = np.stack([trainable.base_K + epsilon * z_K, trainable.base_K - epsilon * z_K]).astype(
        np.float32
    )
    plus, minus = trainable.losses(pair_VK, batch).astype(np.float64)
    loss, gradient_K = trainable.gradient(trainable.base_K, batch)
    derivative, scale = float(gradient_K @ z_K), np.linalg.norm(gradient_K)
    assert abs((plus - minus) / (2 * epsilon) - derivative) < 0.02 * scale + 2e-5 / epsilon
    assert loss == pytest.approx(float(trainable.losses(trainable.base_K[None], batch)[0]), abs=1e-5)
    assert derivative != 0


@pytest.mark.parametrize("kind", ["masked", "all", "lora", "lora-fa"])
def test_the_base_is_the_model_itself(kind: str, batch: Batch) -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(batch.input_ids_BT)).logits
    target = torch.from_numpy(batch.target_BT)
    expected = torch.nn.functional.cross_entropy(
        logits[:, :-1][target[:, 1:]], torch.from_numpy(batch.input_ids_BT)[target], reduction="none"
    )
    trainable = MAKERS[kind](model)
    np.testing.assert_allclose(trainable.token_losses(trainable.base_K, batch), expected.numpy(), atol=1e-5)


def test_a_real_prefix_is_that_of_tokens_before_the_text() -> None:
    """Each seed draws other tokens. The prefix has the same effect as these tokens in the input."""
    rows, starts = [[5, 6, 7, 8], [1, 2, 3, 9]], []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = tiny_model("llama")
        vocabulary = int(model.config.vocab_size)
        trainable = trainables.prefix(model, 3, real=True, seed=seed)
        torch.manual_seed(seed)
        trainables.prefix(tiny_model("llama"), 3, seed=seed)  # peft draws numbers before the tokens are drawn
        drawn = torch.randint(0, vocabulary, (1, 3))[0].tolist()
        plain = trainables.all_weights(tiny_model("llama"))
        expected = plain.token_losses(plain.base_K, _padded([drawn + row for row in rows], 2))
        found = trainable.token_losses(trainable.base_K, _padded(rows, 2))
        np.testing.assert_allclose(found, expected, atol=1e-5)
        starts.append(trainable.base_K)
    assert not np.allclose(starts[0], starts[1])


def _padded(rows: list[list[int]], targets: int) -> Batch:
    """Return a batch of these rows. The last `targets` tokens of each row are targets."""
    length = max(map(len, rows))
    ids_BT = np.zeros((len(rows), length), np.int64)
    attention_BT, target_BT = np.zeros(ids_BT.shape, bool), np.zeros(ids_BT.shape, bool)
    for place, row in enumerate(rows):
        ids_BT[place, : len(row)] = row
        attention_BT[place, : len(row)] = True
        target_BT[place, len(row) - targets : len(row)] = True
    return Batch(input_ids_BT=ids_BT, attention_BT=attention_BT, target_BT=target_BT)


ROWS = [[5, 6, 7, 8], [5, 6, 7, 9], [1, 2, 3], [5, 6, 7, 2], [1, 2, 4], [5, 6, 8, 2], [5, 6, 7, 8, 9]]


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("targets", [1, 2])
def test_rows_together_have_the_losses_of_each_alone(kind: str, targets: int) -> None:
    trainable = MAKERS[kind](tiny_model("llama"))
    alone = [trainable.token_losses(trainable.base_K, _padded([row], targets)) for row in ROWS]
    together = trainable.token_losses(trainable.base_K, _padded(ROWS, targets))
    np.testing.assert_allclose(together, np.concatenate(alone), atol=1e-5)
    assert len(np.unique(together.round(6))) > len(ROWS) - 2


def test_only_the_mask_moves(batch: Batch) -> None:
    model = tiny_model("llama")
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    trainable = trainables.masked_weights(model, MASK)
    trainable.token_losses(trainable.base_K + 1, batch)
    for name, weight in model.named_parameters():
        moved = (weight.detach() != before[name]).nonzero().numel() > 0
        assert moved == (name in MASK)
    changed = (dict(model.named_parameters())[next(iter(MASK))].detach() - before[next(iter(MASK))]).flatten()
    assert changed.nonzero().flatten().tolist() == [3, 40]


def test_frozen_a_trains_half_of_lora() -> None:
    whole = trainables.lora(tiny_model("llama"), 4, frozen_a=False, seed=0)
    half = trainables.lora(tiny_model("llama"), 4, frozen_a=True, seed=0)
    assert 0 < half.k < whole.k
    assert not half.base_K.any()  # only B is trained, which starts at zero
    assert whole.base_K.any()


def test_tied_weights_count_once() -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    assert trainables.all_weights(model).k == sum(parameter.numel() for parameter in model.parameters())


def test_values_of_another_set_are_refused(batch: Batch) -> None:
    trainable = trainables.masked_weights(tiny_model("llama"), MASK)
    with pytest.raises(InputError, match=r"float32 \[2\]"):
        trainable.token_losses(np.zeros(3, np.float32), batch)
    with pytest.raises(InputError, match=r"'model\.nothing'"):
        trainables.masked_weights(tiny_model("llama"), {"model.nothing": MASK[next(iter(MASK))]})


def _linear_layer(model: Any) -> str:
    return next(
        f"{name}.weight"
        for name, layer in model.named_modules()
        if type(layer) is torch.nn.Linear and "layers.0." in name
    )


# Some rows are longer than the windows of the families that have one.
LONG_ROWS = [*ROWS, [9, 8, 7, 6, 5, 4, 3, 2, 1, 2, 3, 4], [4, 5, 6, 4, 3, 2, 7, 8, 7, 1, 2, 3, 9]]


# For Gemma 2, transformers warns about SDPA, because attention scores are capped.
@pytest.mark.parametrize(
    ("family", "attention"),
    [
        (family, kind)
        for family in sorted(PACKABLE)
        for kind in ("eager", "sdpa")
        if (family, kind) != ("gemma2", "sdpa")
    ],
)
@pytest.mark.parametrize("tokens", [14, 64])
def test_packed_rows_have_the_losses_and_gradients_of_padded_ones(
    family: str, attention: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed rows must not see each other, and their tokens must keep their positions."""
    model = tiny_model(family)
    model.set_attn_implementation(attention)
    trainable = trainables.masked_weights(model, {_linear_layer(model): np.array([3, 40], np.uint32)})
    batch = _padded(LONG_ROWS, 2)
    monkeypatch.setattr(trainables, "PACKED_TOKENS", tokens)
    calls = []
    model.register_forward_pre_hook(lambda *given: calls.append(given[2]["input_ids"]), with_kwargs=True)
    losses_R = trainable.token_losses(trainable.base_K, batch)
    loss, gradient_K = trainable.gradient(trainable.base_K, batch)
    assert {len(ids) for ids in calls} == {1}
    assert len(calls) < 2 * len(ROWS)
    assert max(ids.shape[1] for ids in calls) == {14: 13, 64: sum(map(len, LONG_ROWS))}[tokens]
    monkeypatch.setattr(trainable, "_packs", False)
    np.testing.assert_allclose(losses_R, trainable.token_losses(trainable.base_K, batch), atol=2e-5)
    padded_loss, padded_K = trainable.gradient(trainable.base_K, batch)
    assert loss == pytest.approx(padded_loss, abs=2e-5)
    np.testing.assert_allclose(gradient_K, padded_K, atol=2e-5)
    assert np.abs(gradient_K).min() > 1e-6


@pytest.mark.parametrize("family", sorted(set(CONFIGS) - PACKABLE))
def test_other_families_are_padded(family: str) -> None:
    trainable = trainables.all_weights(tiny_model(family))
    alone = [trainable.token_losses(trainable.base_K, _padded([row], 1)) for row in ROWS]
    together = trainable.token_losses(trainable.base_K, _padded(ROWS, 1))
    np.testing.assert_allclose(together, np.concatenate(alone), atol=1e-5)


def test_what_cannot_be_packed_is_padded() -> None:
    right = _padded(ROWS, 1)
    assert can_pack(right)
    left = Batch(
        input_ids_BT=right.input_ids_BT[:, ::-1],
        attention_BT=right.attention_BT[:, ::-1],
        target_BT=right.target_BT,
    )
    assert not can_pack(left)
    padding_asked = right.target_BT.copy()
    padding_asked[0, -1] = True
    assert not can_pack(
        Batch(input_ids_BT=right.input_ids_BT, attention_BT=right.attention_BT, target_BT=padding_asked)
    )


def test_rows_with_a_gap_are_not_packed() -> None:
    """One row has a gap. The other rows keep their packed losses."""
    trainable = trainables.all_weights(tiny_model("llama"))
    whole = trainable.token_losses(trainable.base_K, _padded(ROWS, 1))
    batch = _padded(ROWS, 1)
    batch.attention_BT[2, 0] = False
    with_gap = trainable.token_losses(trainable.base_K, batch)
    others = [row for row in range(len(ROWS)) if row != 2]
    np.testing.assert_allclose(with_gap[others], whole[others], atol=1e-5)
    assert abs(with_gap[2] - whole[2]) > 1e-3


def test_a_first_token_is_no_target() -> None:
    trainable = trainables.all_weights(tiny_model("llama"))
    batch = _padded(ROWS, 1)
    batch.target_BT[0, 0] = True
    with pytest.raises(InputError, match="first column"):
        trainable.token_losses(trainable.base_K, batch)
    with pytest.raises(InputError, match="first column"):
        trainable.gradient(trainable.base_K, batch)


def test_packed_parts_keep_rows_whole_and_in_order() -> None:
    parts = list(packed_parts(_padded(ROWS, 1), 8))
    assert [part.ids[0].tolist() for part in parts] == [
        ROWS[0] + ROWS[1],
        ROWS[2] + ROWS[3],
        ROWS[4] + ROWS[5],
        ROWS[6],
    ]
    assert parts[1].inputs["position_ids"][0].tolist() == [0, 1, 2, 0, 1, 2, 3]
    assert parts[1].target[0].tolist() == [False, False, True, False, False, False, True]

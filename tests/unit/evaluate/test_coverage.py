"""Shares of squared gradients against numbers worked out by hand and against single gradients."""

import numpy as np
import pytest
from numpy.typing import NDArray

from permille.errors import InputError
from permille.zo.estimators import Batch
from permille_lab.evaluate.coverage import LinearWeights, held_shares, layer_shares
from permille_lab.evaluate.figures import Line, Panel, lines_picture, split_picture
from permille_lab.evaluate.models import task_mask
from permille_lab.evaluate.trainables import masked_weights
from tests.unit.engines.tiny import tiny_batch, tiny_model

SCORES = {
    "a": np.array([[1.0, 5.0], [3.0, 1.0]], np.float32),
    "b": np.array([[2.0, 2.0], [2.0, 2.0]], np.float32),
}


def test_shares_are_those_of_each_layers_largest_scores() -> None:
    found = layer_shares(SCORES, (0.01, 0.5, 1.0))
    # Layer a: 5, 8 and 10 of 10; layer b: 2, 4 and 8 of 8.
    assert found.mean == pytest.approx([(0.5 + 0.25) / 2, (0.8 + 0.5) / 2, 1.0])
    assert found.deviation == pytest.approx([0.125, 0.15, 0.0])


@pytest.mark.parametrize(
    ("scores", "fractions", "message"),
    [
        ({}, (0.5,), "scores and fractions"),
        (SCORES, (0.0,), "above 0"),
        (SCORES, (1.5,), "at most 1"),
        ({"a": np.zeros((2, 2), np.float32)}, (0.5,), "not all 0"),
        ({"a": np.array([[np.nan, 1]], np.float32)}, (0.5,), "finite"),
        ({"a": np.array([[-1, 3]], np.float32)}, (0.5,), "finite"),
    ],
)
def test_scores_that_have_no_shares_are_refused(
    scores: dict[str, NDArray[np.float32]], fractions: tuple[float, ...], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        layer_shares(scores, fractions)


def test_a_mask_holds_the_mean_of_its_layers_shares() -> None:
    mask = {"a": np.array([1], np.uint32), "b": np.array([0, 1, 2], np.uint32)}
    assert held_shares(SCORES, {"mine": mask}) == {"mine": pytest.approx((0.5 + 0.75) / 2)}


def single_examples() -> list[Batch]:
    whole = tiny_batch()
    return [
        Batch(
            input_ids_BT=whole.input_ids_BT[row : row + 1],
            attention_BT=whole.attention_BT[row : row + 1],
            target_BT=whole.target_BT[row : row + 1],
        )
        for row in range(2)
    ]


def test_squares_are_taken_of_single_examples_then_averaged() -> None:
    weights = LinearWeights(tiny_model("llama"))
    trainable = weights.trainable
    singles = single_examples()
    found = weights.squared_gradients(trainable.base_K, singles)
    gradients = [trainable.gradient(trainable.base_K, single)[1] for single in singles]
    expected = (gradients[0] ** 2 + gradients[1] ** 2) / 2
    flat = np.concatenate([score.reshape(-1) for score in found.values()])
    np.testing.assert_allclose(flat, expected, rtol=1e-6)
    assert not np.allclose(flat, ((gradients[0] + gradients[1]) / 2) ** 2)
    assert all("embed" not in name and "norm" not in name for name in found)
    with pytest.raises(InputError, match="expected examples"):
        weights.squared_gradients(trainable.base_K, [])


def test_a_tasks_mask_is_of_the_largest_sums_of_squares() -> None:
    singles = single_examples()
    mask = task_mask(tiny_model("llama"), singles, 0.01)
    parameters = dict(tiny_model("llama").named_parameters())
    whole = {name: np.arange(parameters[name].numel(), dtype=np.uint32) for name in mask}
    trainable = masked_weights(tiny_model("llama"), whole)
    sums = [np.square(trainable.gradient(trainable.base_K, single)[1]) for single in singles]
    start = 0
    for name, indices in mask.items():
        score = (sums[0] + sums[1])[start : start + len(whole[name])]
        start += len(score)
        assert 0 < len(indices) < len(score)
        assert score[indices].min() > np.delete(score, indices).max()


def test_pictures_are_png_of_modest_size_and_the_same_twice() -> None:
    panel = Panel(
        title="m",
        lines=[Line(name="x", x=[1e-3, 1e-2], y=[0.5, 0.6], spread=[0.1, 0.1])],
        level=("all", 0.55),
    )
    first = lines_picture([panel, panel], x_label="x", y_label="y", log_x=True)
    assert first.startswith(b"\x89PNG")
    assert 1000 < len(first) < 100_000
    assert lines_picture([panel, panel], x_label="x", y_label="y", log_x=True) == first
    other = Panel(title="m", lines=[Line(name="x", x=[1e-3, 1e-2], y=[0.5, 0.7])])
    assert lines_picture([other, other], x_label="x", y_label="y", log_x=True) != first
    parts = {"m": {"ours": {"forward": 0.2, "perturbation": 0.1, "update": 0.05}}}
    assert split_picture(parts).startswith(b"\x89PNG")

"""Tests of masks: exact counts, exact ties, and results that depend only on scores and seed."""

from collections.abc import Iterator, Mapping
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from permille.choices import MaskMethod
from permille.errors import InputError
from permille.sensitivity import masks
from permille.sensitivity.masks import count, select_mask
from tests.unit.zo.reference import philox


def by_sorting(score: NDArray[np.float32], wanted: int) -> NDArray[np.int64]:
    """Select by definition: sort by decreasing score, then by increasing index."""
    order = sorted(range(score.size), key=lambda i: (-float(score.flat[i]), i))
    return np.sort(np.array(order[:wanted]))


@pytest.mark.parametrize(
    ("density", "numel", "expected"),
    [
        (0.001, 1000, 1),
        (0.001, 1499, 1),
        (0.001, 1500, 2),
        (0.001, 2500, 3),
        ("0.0015", 1000, 2),
        (0.001, 10, 1),
        (1, 7, 7),
        (0.1, 10**9 + 5, 100_000_001),
        (0.3, 10, 3),
    ],
)
def test_count_rounds_halves_up_and_is_at_least_one(density: float | str, numel: int, expected: int) -> None:
    assert count(density, numel) == expected
    assert abs(Fraction(str(density)) * numel - expected) <= Fraction(1, 2) or expected == 1


@pytest.mark.parametrize("density", [0, -0.1, 1.01, float("nan"), float("inf")])
def test_density_outside_its_range_is_refused(density: float) -> None:
    with pytest.raises(InputError, match="density"):
        count(density, 100)


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(
        st.sampled_from([0.0, -0.0, 1.0, 2.0, 1e-45, 3e38, 0.5, 1.0000001]) | st.floats(0, 1, width=32),
        min_size=1,
        max_size=80,
    ),
    density=st.floats(0.01, 1),
)
def test_selection_is_the_definition_with_ties_to_the_lowest_index(
    values: list[float], density: float
) -> None:
    score = np.array(values, np.float32).reshape(1, -1)
    mask = select_mask({"a": score}, MaskMethod.FISHER, density)["a"]
    assert mask.dtype == np.uint32
    assert mask.tolist() == by_sorting(score, count(density, score.size)).tolist()


def test_chunks_do_not_change_the_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    score = np.random.default_rng(0).integers(0, 9, (31, 17)).astype(np.float32)
    whole = select_mask({"a": score}, MaskMethod.FISHER, 0.3)["a"]
    monkeypatch.setattr(masks, "_CHUNK", 13)
    assert select_mask({"a": score}, MaskMethod.FISHER, 0.3)["a"].tolist() == whole.tolist()
    ties = select_mask({"a": np.ones((5, 8), np.float32)}, MaskMethod.FISHER, 0.5)["a"]
    assert ties.tolist() == list(range(20))


def test_magnitude_takes_the_largest_absolute_weights() -> None:
    w_NK = np.array([[0.1, -5, 0.2, 3], [4, -0.3, 0, -2]], np.float32)
    assert select_mask({"a": w_NK}, MaskMethod.MAGNITUDE, 0.5)["a"].tolist() == [1, 3, 4, 7]


def test_each_tensor_has_its_own_count() -> None:
    rng = np.random.default_rng(0)
    scores = {"b": rng.random((10, 10), np.float32) * 100, "a": rng.random((20, 10), np.float32)}
    mask = select_mask(scores, MaskMethod.FISHER, 0.05)
    assert list(mask) == ["b", "a"]
    assert [mask[name].size for name in mask] == [5, 10]


@pytest.mark.parametrize("value", [np.nan, np.inf, -1e-30])
def test_scores_without_a_rank_are_refused_with_the_tensors_name(value: float) -> None:
    score = np.ones((3, 3), np.float32)
    score[1, 1] = value
    with pytest.raises(InputError, match=r"h\.0\.q has the score"):
        select_mask({"h.0.q": score}, MaskMethod.FISHER, 0.5)


@pytest.mark.parametrize("density", [0.001, 0.2, 0.5, 0.9, 1])
def test_random_masks_have_distinct_indices_and_the_exact_count(density: float) -> None:
    mask = select_mask({"a": np.zeros((40, 50), np.float32)}, MaskMethod.RANDOM, density, seed=3)["a"]
    assert mask.size == count(density, 2000)
    assert (np.diff(mask.astype(np.int64)) > 0).all()
    assert mask.max() < 2000


def test_random_masks_are_a_function_of_seed_and_tensor_id_alone() -> None:
    zeros, ones = np.zeros((30, 40), np.float32), np.ones((30, 40), np.float32)
    one = select_mask({"a": zeros, "b": zeros}, MaskMethod.RANDOM, 0.1)
    two = select_mask({"x": ones, "y": ones}, MaskMethod.RANDOM, 0.1)
    other = select_mask({"a": zeros}, MaskMethod.RANDOM, 0.1, seed=1)
    assert [one["a"].tolist(), one["b"].tolist()] == [two["x"].tolist(), two["y"].tolist()]
    assert one["b"].tolist() != one["a"].tolist() != other["a"].tolist()


@pytest.mark.parametrize("seed", [0, 12345, (1 << 64) - 1])
def test_random_indices_are_the_first_distinct_draws_of_the_tensors_stream(seed: int) -> None:
    tensors = {"a": np.zeros((25, 40), np.float32), "b": np.zeros((6, 10), np.float32)}
    mask = select_mask(tensors, MaskMethod.RANDOM, 0.3, seed=seed)
    for tensor_id, (name, tensor) in enumerate(tensors.items()):
        chosen: list[int] = []
        block = 0
        while len(chosen) < count(0.3, tensor.size):
            words = philox([block, tensor_id, 0xFFFFFFFF, 0xFFFFFFFF], [seed % 2**32, seed >> 32])
            for low, high in (words[:2], words[2:]):
                index = ((high << 32 | low) * tensor.size) >> 64
                if index not in chosen:
                    chosen.append(index)
            block += 1
        assert mask[name].tolist() == sorted(chosen[: count(0.3, tensor.size)])


def test_random_takes_64_bit_seeds_only() -> None:
    tensors = {"a": np.zeros((4, 4), np.float32)}
    for seed in (-1, 1 << 64):
        with pytest.raises(InputError, match="seed"):
            select_mask(tensors, MaskMethod.RANDOM, 0.5, seed=seed)


@pytest.mark.parametrize("method", MaskMethod)
def test_weights_that_are_zero_are_never_chosen(method: MaskMethod) -> None:
    rng = np.random.default_rng(0)
    weights = {name: rng.normal(size=(8, 8)).astype(np.float32) for name in "abc"}
    weights["a"][:, ::2] = 0
    weights["b"][:7] = 0  # fewer nonzero weights are left than wanted
    weights["c"][:] = 0
    scores = (
        weights if method is not MaskMethod.FISHER else {name: np.ones((8, 8), np.float32) for name in "abc"}
    )
    mask = select_mask(scores, method, 0.25, 3, weights=weights)
    assert {name: len(found) for name, found in mask.items()} == {"a": 16, "b": 8, "c": 0}
    assert all(weights[name].reshape(-1)[found].all() for name, found in mask.items())


def test_tensors_are_read_one_at_a_time() -> None:
    class Lazy(Mapping[str, NDArray[np.float32]]):
        def __getitem__(self, name: str) -> NDArray[np.float32]:
            return np.full((2, 3), ord(name), np.float32)

        def __iter__(self) -> Iterator[str]:
            return iter("ab")

        def __len__(self) -> int:
            return 2

    mask = select_mask(Lazy(), MaskMethod.MAGNITUDE, 0.25)
    assert {name: mask[name].tolist() for name in mask} == {"a": [0, 1], "b": [0, 1]}


def test_names_are_taken_for_what_they_say_and_others_refused() -> None:
    weights = {"a": np.arange(100, dtype=np.float32).reshape(10, 10)}
    for method in MaskMethod:
        named, meant = (select_mask(weights, name, 0.1) for name in (method.value, method))
        assert np.array_equal(named["a"], meant["a"])
    with pytest.raises(InputError, match=r"'fish' is not a method of choosing a mask\. Choose one of"):
        select_mask(weights, "fish", 0.1)

"""Which variants share a layer, against the definition written out."""

import numpy as np
import pytest
from numpy.typing import NDArray

from permille.engines.sharing import first_masked_layer, layer_spans, plan_sharing
from permille.errors import InputError

SPANS = ((0, 0), (0, 3), (3, 3), (3, 80), (80, 82))
K = 82


def defined(values_VK: NDArray[np.float32], stop: int) -> list[int]:
    """Groups by first appearance of everything below `stop`."""
    seen: dict[bytes, int] = {}
    return [seen.setdefault(row[:stop].tobytes(), len(seen)) for row in values_VK]


@pytest.mark.parametrize("seed", range(8))
def test_groups_are_those_of_equal_values_below(seed: int) -> None:
    rng = np.random.default_rng(seed)
    values_VK = np.zeros((7, K), np.float32)
    for start, stop in SPANS:  # Few different blocks, so that groups form at every layer.
        if stop > start:
            blocks = rng.standard_normal((2, stop - start)).astype(np.float32)
            blocks[1, :-1] = blocks[0, :-1]  # They differ in their last value alone.
            values_VK[:, start:stop] = blocks[rng.integers(0, 2, 7)]
    plan = plan_sharing(values_VK, SPANS)
    below = [0] * 7
    for groups, (_, stop) in zip(plan, SPANS, strict=True):
        expected = defined(values_VK, stop)
        assert groups.group_V.tolist() == expected
        assert groups.first_G.tolist() == [expected.index(group) for group in range(groups.count)]
        assert groups.parent_G.tolist() == [below[first] for first in groups.first_G]
        below = expected


def test_layers_below_the_first_masked_one_are_shared_by_all() -> None:
    values_VK = np.random.default_rng(0).standard_normal((4, K)).astype(np.float32)
    plan = plan_sharing(values_VK, SPANS)
    assert [groups.count for groups in plan] == [1, 4, 4, 4, 4]
    assert [groups.splits for groups in plan] == [False, True, False, False, False]


def test_equal_variants_stay_one_group() -> None:
    values_VK = np.zeros((3, K), np.float32)
    assert [groups.count for groups in plan_sharing(values_VK, SPANS)] == [1] * 5


def test_bits_are_compared_not_numbers() -> None:
    values_VK = np.zeros((4, K), np.float32)
    values_VK[:2, 0] = np.nan
    values_VK[2, 0] = -0.0
    assert plan_sharing(values_VK, SPANS)[1].group_V.tolist() == [0, 0, 1, 2]


def test_a_split_perturbation_computes_its_lower_block_once_a_sign() -> None:
    """Two lower variants, each with three upper ones."""
    rng = np.random.default_rng(1)
    values_VK = np.zeros((6, K), np.float32)
    values_VK[:, :3] = np.repeat(rng.standard_normal((2, 3)), 3, axis=0)
    values_VK[:, 3:] = rng.standard_normal((6, K - 3))
    plan = plan_sharing(values_VK, SPANS)
    assert [groups.count for groups in plan] == [1, 2, 2, 6, 6]
    assert plan[3].parent_G.tolist() == [0, 0, 0, 1, 1, 1]


def test_spans_follow_the_tensors() -> None:
    names = [f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (1, 1, 3)]
    spans = layer_spans(names, [2, 3, 4], 5)
    assert spans == ((0, 0), (0, 5), (5, 5), (5, 9), (9, 9))
    assert first_masked_layer(spans) == 1
    assert first_masked_layer(((0, 0), (0, 0))) == 2


@pytest.mark.parametrize(
    "names", [["lm_head.weight"], ["a.layers.2.b.weight", "a.layers.1.b.weight"], ["a.layers.9.b.weight"]]
)
def test_tensors_out_of_order_are_refused(names: list[str]) -> None:
    with pytest.raises(InputError, match="expected tensors of layers"):
        layer_spans(names, [1] * len(names), 4)

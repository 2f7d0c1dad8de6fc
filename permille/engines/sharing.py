"""Which variants of the sparse values still compute the same thing at each decoder layer. numpy only.

A layer's output depends on the values of its own span and of all layers below. Variants that agree there, to
the bit, have the same hidden states up to that layer, and an engine computes them once. This one rule covers
masks that leave the lower layers alone (all variants share them), perturbations of one block at a time, and
one-sided estimates.

A group splits on the way up and never joins again.

# Legend: V variants, K masked weights, L decoder layers, G groups at a layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from permille.errors import InputError
from permille.models.families import layer_of

# Perturbed values nearly always differ in the first few: the rest is compared only where those agree.
_GLANCE = 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerGroups:
    """The groups of variants that one decoder layer is computed for.

    Attributes:
        group_V: the group of each variant; groups are numbered by their first variant.
        first_G: the first variant of each group: whose values the layer is computed with.
        parent_G: the group of the layer below (0 for the lowest layer) whose output each group continues.
    """

    group_V: NDArray[np.int64]
    first_G: NDArray[np.int64]
    parent_G: NDArray[np.int64]

    @property
    def count(self) -> int:
        """G."""
        return len(self.first_G)

    @property
    def splits(self) -> bool:
        """Whether the hidden states from below must be copied: some group below has become several."""
        return bool((self.parent_G != np.arange(self.count)).any())


def layer_spans(names: Sequence[str], counts: Sequence[int], layers: int) -> tuple[tuple[int, int], ...]:
    """Where each decoder layer's masked weights lie in the values: [start, stop) for each of `layers`.

    Args:
        names: the package's tensors in `tensor_id` order, which is by layer.
        counts: masked weights of each.

    Raises:
        InputError: a tensor outside the layers, or layers that are not in order.
    """
    stops = np.zeros(layers, np.int64)
    last = 0
    for name, count in zip(names, counts, strict=True):
        layer = layer_of(name)
        if layer is None or not last <= layer < layers:
            raise InputError(f"expected tensors of layers {last} to {layers - 1} from here, got {name!r}")
        stops[layer] += count
        last = layer
    ends = np.cumsum(stops)
    return tuple((int(end - size), int(end)) for end, size in zip(ends, stops, strict=True))


def first_masked_layer(spans: Sequence[tuple[int, int]]) -> int:
    """The lowest layer that has a masked weight: hidden states before it depend on no value. 0 <= l <= L."""
    return next((layer for layer, (start, stop) in enumerate(spans) if stop > start), len(spans))


def plan_sharing(values_VK: NDArray[np.float32], spans: Sequence[tuple[int, int]]) -> tuple[LayerGroups, ...]:
    """The groups at each layer, from the lowest up.

    Values are compared bit by bit, so a NaN equals itself and the zeros of both signs differ.

    Args:
        spans: as `layer_spans` gives them.
    """
    variants = len(values_VK)
    bits_VK = np.ascontiguousarray(values_VK).view(np.uint32)
    group_V = np.zeros(variants, np.int64)
    plan: list[LayerGroups] = []
    for start, stop in spans:
        below_V = group_V
        if stop > start and len(np.unique(below_V)) < variants:
            group_V = _split(bits_VK[:, start:stop], below_V)
        _, first_G = np.unique(group_V, return_index=True)
        parent_G = below_V[first_G] if plan else np.zeros(len(first_G), np.int64)
        plan.append(LayerGroups(group_V=group_V, first_G=first_G, parent_G=parent_G))
    return tuple(plan)


def _split(bits_VC: NDArray[np.uint32], below_V: NDArray[np.int64]) -> NDArray[np.int64]:
    """Groups of variants that shared a group below and agree here."""
    group_V = np.empty(len(bits_VC), np.int64)
    # First variant of each new group, by the group below: only those can be equal.
    found: dict[int, list[int]] = {}
    groups = 0
    for variant, below in enumerate(below_V.tolist()):
        firsts = found.setdefault(below, [])
        equal = next((first for first in firsts if _equal(bits_VC[first], bits_VC[variant])), None)
        if equal is None:
            firsts.append(variant)
            group_V[variant] = groups
            groups += 1
        else:
            group_V[variant] = group_V[equal]
    return group_V


def _equal(left_C: NDArray[np.uint32], right_C: NDArray[np.uint32]) -> bool:
    if left_C[:_GLANCE].tobytes() != right_C[:_GLANCE].tobytes():
        return False
    return bool(np.array_equal(left_C, right_C))

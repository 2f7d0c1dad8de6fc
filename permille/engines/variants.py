"""Sharing of work between variants of the sparse values.

A layer runs once for all variants that have the same values in this layer and in all layers below it.

For example, layers below the first perturbed one are computed once per batch. The light engine and the torch
engine both follow this rule. They report the same number of layer passes, unless the light engine takes the
states below the first masked layer from its cache.

# Legend: V variants, G groups of variants, K masked weights.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from permille.models.families import layer_of
from permille.package.reader import Package

State = TypeVar("State")
Groups = list[list[int]]
"""Groups of variants. A variant is given by its row in `values_VK`.

The variants of one group have had the same values in every layer so far, so they share one state.
"""
Spans = tuple[tuple[slice, ...], ...]
"""For each decoder layer, the slices of the package's values that belong to it."""


class DecoderPass(Protocol[State]):
    """An engine's pass of some sequences through the decoder layers."""

    def keep(self, state: State) -> State:
        """Return a state that later passes do not overwrite."""

    def fork(self, state: State, source_G: list[int], values_GK: NDArray[np.float32]) -> State:
        """Return the state of new groups, and set their values for the next layers.

        Args:
            state: the state of the groups so far.
            source_G: for each new group, the index of the old group that it was part of. Because
                `source_G[i] <= i`, an engine can copy in place if it starts with the last group.
            values_GK: the values of each new group.
        """

    def run_layer(self, number: int, state: State) -> State:
        """Return the state after a decoder layer."""


def layer_spans(package: Package) -> Spans:
    """Return, for each decoder layer, the slices of the package's values that belong to it."""
    found: list[list[slice]] = [[] for _ in range(int(package.config["num_hidden_layers"]))]
    start = 0
    for info in package.manifest.tensors:
        if info.count:
            # `layer_of` never returns None here, because all tensors of a manifest belong to a layer.
            found[layer_of(info.name) or 0].append(slice(start, start + info.count))
        start += info.count
    return tuple(tuple(spans) for spans in found)


def first_masked(spans: Spans) -> int:
    """Return the lowest layer with a trained value, or the number of layers if none has one."""
    return next((number for number, own in enumerate(spans) if own), len(spans))


def run_variants(
    decoder: DecoderPass[State], values_VK: NDArray[np.float32], spans: Spans, state: State, *, room: int
) -> Iterator[tuple[Groups, State]]:
    """Yield groups of variants with the same values, and the state of each group after the last layer.

    Args:
        decoder: the engine's pass.
        values_VK: the values of all variants.
        spans: the result of `layer_spans`.
        state: the state of a single group, before the lowest layer with a trained value.
        room: the largest number of groups that go through a layer together. If there are more groups, they
            are processed in parts of at most `room` groups. Each part starts from a copy of the state.
    """

    def above(first: int, groups: Groups, state: State) -> Iterator[tuple[Groups, State]]:
        for number in range(first, len(spans)):
            parts = [
                (group, part)
                for group, variants in enumerate(groups)
                for part in agreeing(values_VK, variants, spans[number])
            ]
            # Depth first: `room` groups go through all layers above before the next ones start, so at most
            # `room` states are computed together.
            if len(parts) > room:
                kept = decoder.keep(state)
                for begin in range(0, len(parts), room):
                    yield from above(number, *forked(parts[begin : begin + room], kept))
                return
            # If there are as many parts as groups, no group was split.
            if len(parts) != len(groups):
                groups, state = forked(parts, state)
            state = decoder.run_layer(number, state)
        yield groups, state

    def forked(parts: list[tuple[int, list[int]]], state: State) -> tuple[Groups, State]:
        groups = [part for _, part in parts]
        # Set the values of the first variant of each group. All variants of a group have the same values in
        # the next layer, and a group is split before a layer in which its variants differ.
        chosen_GK = values_VK[[variants[0] for variants in groups]]
        return groups, decoder.fork(state, [group for group, _ in parts], chosen_GK)

    everyone = list(range(len(values_VK)))
    yield from above(first_masked(spans), *forked([(0, everyone)], state))


def agreeing(values_VK: NDArray[np.float32], variants: list[int], spans: Sequence[slice]) -> Groups:
    """Divide variants into groups that have the same values in a layer, bit by bit."""
    if len(variants) == 1:
        return [variants]
    found: dict[bytes, list[int]] = {}
    for variant in variants:
        # Compare bits, so that a NaN equals itself, and 0 differs from -0.
        key = b"".join(values_VK[variant, span].tobytes() for span in spans)
        found.setdefault(key, []).append(variant)
    return list(found.values())

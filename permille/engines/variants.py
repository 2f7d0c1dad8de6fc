"""What variants of the values share: a layer runs once for all that agree in it and in the layers below.

So what lies below the first perturbed layer is computed once a batch, whichever estimator, mask or scope
decides where that is. The light and the torch engine both follow this rule, so they report the same layer
passes.

# Legend: V variants, G groups of them, K masked weights.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from permille.models.families import layer_of
from permille.package.reader import Package

State = TypeVar("State")
Groups = list[list[int]]
"""Variants by their place in a call, those together that are one to the layers so far."""
Spans = tuple[tuple[slice, ...], ...]
"""Where each decoder layer's values are among the package's."""


class DecoderPass(Protocol[State]):
    """An engine's way through the decoder layers with some sequences."""

    def keep(self, state: State) -> State:
        """Return a state that the passes to come do not overwrite."""

    def fork(self, state: State, source_G: list[int], values_GK: NDArray[np.float32]) -> State:
        """Return the state of new groups, and take their values for the layers to come.

        Args:
            source_G: the group of `state` that each comes from; its place is at most the new group's own.
        """

    def run_layer(self, number: int, state: State) -> State:
        """Return the state after a decoder layer."""


def layer_spans(package: Package) -> Spans:
    """Find where each layer's values are."""
    found: list[list[slice]] = [[] for _ in range(int(package.config["num_hidden_layers"]))]
    start = 0
    for info in package.manifest.tensors:
        if info.count:
            found[layer_of(info.name) or 0].append(slice(start, start + info.count))
        start += info.count
    return tuple(tuple(spans) for spans in found)


def first_masked(spans: Spans) -> int:
    """Return the lowest layer with a value, or their number without one."""
    return next((number for number, own in enumerate(spans) if own), len(spans))


def run_variants(
    decoder: DecoderPass[State], values_VK: NDArray[np.float32], spans: Spans, state: State, *, room: int
) -> Iterator[tuple[Groups, State]]:
    """Yield groups of equal variants, and their states after the last layer.

    Args:
        spans: as `layer_spans`.
        state: of one group, what enters the lowest layer with a value.
        room: the most groups that go through a layer together. More go in parts, each from what was
            computed once.
    """

    def above(first: int, groups: Groups, state: State) -> Iterator[tuple[Groups, State]]:
        for number in range(first, len(spans)):
            parts = [
                (group, part)
                for group, variants in enumerate(groups)
                for part in agreeing(values_VK, variants, spans[number])
            ]
            if len(parts) > room:
                kept = decoder.keep(state)
                for begin in range(0, len(parts), room):
                    yield from above(number, *forked(parts[begin : begin + room], kept))
                return
            if len(parts) != len(groups):
                groups, state = forked(parts, state)
            state = decoder.run_layer(number, state)
        yield groups, state

    def forked(parts: list[tuple[int, list[int]]], state: State) -> tuple[Groups, State]:
        groups = [part for _, part in parts]
        chosen_GK = values_VK[[variants[0] for variants in groups]]
        return groups, decoder.fork(state, [group for group, _ in parts], chosen_GK)

    everyone = list(range(len(values_VK)))
    yield from above(first_masked(spans), *forked([(0, everyone)], state))


def agreeing(values_VK: NDArray[np.float32], variants: list[int], spans: Sequence[slice]) -> Groups:
    """Divide variants into those that agree in a layer's values, bit by bit."""
    if len(variants) == 1:
        return [variants]
    found: dict[bytes, list[int]] = {}
    for variant in variants:
        key = b"".join(values_VK[variant, span].tobytes() for span in spans)
        found.setdefault(key, []).append(variant)
    return list(found.values())

"""Which tokens a training step reads: a function of the seed and of how much was read, so runs resume."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from permille.errors import InputError


class Windows:
    """Windows of `length` + 1 tokens from several streams, drawn by share, each stream without repetition.

    A stream's windows come in a random order of their own each epoch, and the grid they are cut on is shifted
    from epoch to epoch. `drawn` (windows read by stream) is all the state there is.
    """

    def __init__(self, folder: Path, mixture: dict[str, float], length: int, seed: int) -> None:
        self.length, self.seed = length, seed
        self.streams: dict[str, NDArray[np.uint16]] = {}
        for group in mixture:
            stream = np.load(folder / f"{group}.npy", mmap_mode="r")
            if len(stream) < 2 * (length + 1):
                raise InputError(f"expected at least {2 * (length + 1)} tokens in {group}, got {len(stream)}")
            self.streams[group] = stream
        shares = np.asarray(list(mixture.values()))
        self.shares = shares / shares.sum()
        self.drawn = dict.fromkeys(mixture, 0)
        self._order: dict[str, tuple[int, int, NDArray[np.int64]]] = {}

    def batch(self, step: int, count: int) -> NDArray[np.int64]:
        """The windows (count, length + 1) of one step; advances `drawn`."""
        return np.stack([self._next(name) for name in self._drawn_from(step, count)])

    def skip(self, step: int, count: int) -> None:
        """Advance `drawn` as `batch` does, and read nothing."""
        for name in self._drawn_from(step, count):
            self.drawn[name] += 1

    def _drawn_from(self, step: int, count: int) -> list[str]:
        rng = np.random.default_rng([self.seed, step])
        names = list(self.streams)
        return [names[index] for index in rng.choice(len(names), size=count, p=self.shares)]

    def _next(self, name: str) -> NDArray[np.int64]:
        stream, number = self.streams[name], self.drawn[name]
        self.drawn[name] = number + 1
        each = len(stream) // self.length - 2
        epoch, place = divmod(number, each)
        if self._order.get(name, (-1,))[0] != epoch:
            rng = np.random.default_rng([self.seed, list(self.streams).index(name), epoch])
            self._order[name] = (epoch, int(rng.integers(self.length)), rng.permutation(each))
        _, shift, order = self._order[name]
        start = int(order[place]) * self.length + shift
        return np.asarray(stream[start : start + self.length + 1], dtype=np.int64)


def grid(stream: NDArray[np.uint16], length: int, count: int) -> NDArray[np.int64]:
    """Up to `count` windows (n, length + 1) spread evenly over a stream, for a loss that can be compared."""
    each = (len(stream) - 1) // length
    picked = np.linspace(0, each - 1, min(count, each)).astype(int)
    return np.stack([np.asarray(stream[i * length : (i + 1) * length + 1], dtype=np.int64) for i in picked])

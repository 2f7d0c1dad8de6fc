"""Splitting and adding of Fisher sums in shards. It needs neither torch nor a model.

Sequences are summed in shards by their number; the sums of the shards are added in their order, in float32.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from permille.errors import InputError
from permille.sensitivity.scores import Scores, load_scores, zero_scores

SHARD_SEQUENCES = 16
_MOST_SHARDS = 64  # each leaves an array as large as the scores, until they are added
_FLOPS = 8  # a token and weight: forward 2, backward 4, the forward again for recomputed activations 2


def fisher_work(tokens: int, parameters: int) -> float:
    """Floating-point operations that scoring takes, roughly."""
    return float(_FLOPS) * tokens * parameters


def shard_ranges(sequences: int) -> list[range]:
    """The shards of a job of so many sequences: a function of the number alone, not of who does the work.

    Shards of 16 sequences; of more than 1,024 sequences, 64 shards of a multiple of 16.

    Raises:
        InputError: no sequence.
    """
    if sequences < 1:
        raise InputError(f"expected at least 1 sequence, got {sequences}")
    size = SHARD_SEQUENCES * max(1, -(-sequences // (SHARD_SEQUENCES * _MOST_SHARDS)))
    return [range(start, min(start + size, sequences)) for start in range(0, sequences, size)]


def join_shards(paths: Sequence[Path], sequences: int, *, spill_dir: Path | None = None) -> Scores:
    """Scores of the sums in files, one a shard and in their order: the bits of `fisher_scores`.

    Raises:
        PackageError, InputError: a file holds no such sums, or those of other tensors.
    """
    total = zero_scores(load_scores(paths[0]).shapes, spill_dir=spill_dir)
    for path in paths:
        partial = load_scores(path)
        if partial.shapes != total.shapes:
            raise InputError(f"expected sums of {len(total.shapes)} tensors in {path.name}, got other ones")
        merge(total, partial)
    divide(total, sequences)
    return total


def merge(total: Scores, partial: Scores) -> None:
    """total += partial, in float32; call it in the order of the shards, the first onto zeros."""
    for name in total:
        sum_NK = total[name]
        np.add(sum_NK, partial[name], out=sum_NK)


def divide(total: Scores, sequences: int) -> None:
    """The sum of squares becomes their mean: one float32 division a score."""
    for name in total:
        mean_NK = total[name]
        np.divide(mean_NK, np.float32(sequences), out=mean_NK)

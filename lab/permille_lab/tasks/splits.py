"""Train, validation and test examples by seed. No group is in two of them.

Groups (passages or texts) are ordered by a hash of their name and the seed. Test is filled first, then
validation, then train. If a group is larger than the rest of its part, its remaining examples are dropped. If
there is a test file, all test examples come from it, and its groups are left out of train and validation.
(8 % of the passages of BoolQ's validation file occur more than once.)

The seed decides train and validation. Test examples are the same for every seed. Choices that are made with
one seed, such as a step size, thus never depend on another seed's test examples.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from permille.errors import InputError
from permille_lab.tasks.examples import Example

_TEST = "test"
PAPER_SIZES = (1000, 500, 1000)
"""Numbers of train, validation and test examples in the papers, after MeZO."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Splits:
    """The examples of one seed."""

    train: Sequence[Example]
    validation: Sequence[Example]
    test: Sequence[Example]


def split(
    pool: Sequence[Example],
    seed: int,
    *,
    test_pool: Sequence[Example] | None = None,
    sizes: tuple[int, int, int] = PAPER_SIZES,
) -> Splits:
    """Return splits of at most these sizes. A small pool is divided in proportion to them.

    Args:
        pool: labelled examples for train and validation, and for test if there is no `test_pool`.
        seed: decides which groups are in train and which in validation.
        test_pool: examples of a separate labelled file, for test.
        sizes: numbers of examples of train, validation and test.

    Raises:
        InputError: a part would be empty.
    """
    train_size, validation_size, test_size = sizes
    if test_pool is None:
        wanted = _scaled((test_size, validation_size, train_size), len(pool))
        (test,) = _fill(_ordered(pool, _TEST), wanted[:1])
        kept_out = {example.group for example in test}
    else:
        test = _ordered(test_pool, _TEST)[:test_size]
        kept_out = {example.group for example in test_pool}
    rest = [example for example in pool if example.group not in kept_out]
    validation, train = _fill(_ordered(rest, str(seed)), _scaled((validation_size, train_size), len(rest)))
    splits = Splits(train=train, validation=validation, test=test)
    if not (train and validation and test):
        raise InputError(
            f"expected examples for train, validation and test, got {len(train)}, {len(validation)} "
            f"and {len(test)}"
        )
    return splits


def _ordered(pool: Sequence[Example], seed: str) -> list[Example]:
    """Order examples by the hash of their group. Within a group they keep their order."""
    keys = {example.group: _position(example.group, seed) for example in pool}
    return sorted(pool, key=lambda example: keys[example.group])


def _position(group: str, seed: str) -> bytes:
    return hashlib.sha256(f"permille-task-split-1\0{seed}\0{group}".encode()).digest()


def _scaled(sizes: tuple[int, ...], available: int) -> tuple[int, ...]:
    total = sum(sizes)
    return sizes if available >= total else tuple(size * available // total for size in sizes)


def _fill(ordered: Sequence[Example], sizes: tuple[int, ...]) -> list[list[Example]]:
    """Fill the parts in order. If a group exceeds its part, the rest of the group is dropped."""
    parts: list[list[Example]] = [[] for _ in sizes]
    part, last_group = 0, None
    for example in ordered:
        if part < len(sizes) and len(parts[part]) >= sizes[part] and example.group != last_group:
            part += 1
        if part == len(sizes):
            break
        if len(parts[part]) < sizes[part]:
            parts[part].append(example)
        last_group = example.group
    return parts

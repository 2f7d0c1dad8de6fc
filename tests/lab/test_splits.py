"""Tests of splits by seed: groups stay together, sizes are as requested, and a seed repeats its split."""

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from permille.errors import InputError
from permille_lab.tasks.examples import Example
from permille_lab.tasks.splits import Splits, split


def example(group: int, number: int) -> Example:
    return Example(
        prompt=f"{number}", candidates=("a", "b"), label=number % 2, group=f"g{group}", name=f"f:{number}"
    )


def pool(groups: list[int]) -> list[Example]:
    return [example(group, number) for number, group in enumerate(groups)]


def groups_of(splits: Splits) -> list[set[str]]:
    return [{e.group for e in part} for part in (splits.train, splits.validation, splits.test)]


@given(st.lists(st.integers(0, 40), min_size=60, max_size=200), st.integers(0, 5))
def test_no_group_stands_on_two_sides(groups: list[int], seed: int) -> None:
    try:
        splits = split(pool(groups), seed, sizes=(20, 10, 20))
    except InputError:
        reject()  # one or two groups hold nearly all examples
    train, validation, test = groups_of(splits)
    assert not (train & validation or train & test or validation & test)
    assert 0 < len(splits.test) <= 20
    names = [e.name for part in (splits.train, splits.validation, splits.test) for e in part]
    assert len(names) == len(set(names))


def test_the_seed_decides_and_the_order_of_the_file_does_not() -> None:
    examples = pool(list(range(100)))
    once, again = split(examples, 0, sizes=(40, 20, 40)), split(examples[::-1], 0, sizes=(40, 20, 40))
    assert groups_of(once) == groups_of(again)
    assert groups_of(once) != groups_of(split(examples, 1, sizes=(40, 20, 40)))
    assert [len(part) for part in groups_of(once)] == [40, 20, 40]


def test_a_small_pool_is_divided_in_proportion() -> None:
    splits = split(pool(list(range(50))), 0, sizes=(1000, 500, 1000))
    assert [len(splits.train), len(splits.validation), len(splits.test)] == [20, 10, 20]


def test_every_seed_has_the_same_test_items() -> None:
    """So no seed tunes step sizes on another seed's test items."""
    examples = pool(list(range(100)))
    tests = [{e.name for e in split(examples, seed, sizes=(40, 20, 40)).test} for seed in range(3)]
    assert tests[0] == tests[1] == tests[2]
    trains = [{e.name for e in split(examples, seed, sizes=(40, 20, 40)).train} for seed in range(2)]
    assert trains[0] != trains[1]


def test_groups_of_a_test_file_are_kept_out_of_training() -> None:
    examples, tests = pool(list(range(100))), [example(group, 1000 + group) for group in range(0, 200, 2)]
    splits = split(examples, 0, test_pool=tests, sizes=(30, 20, 60))
    assert len(splits.test) == 60
    assert {e.name for e in splits.test} <= {e.name for e in tests}
    assert not {e.group for e in (*splits.train, *splits.validation)} & {e.group for e in tests}


def test_a_pool_of_one_group_is_refused() -> None:
    with pytest.raises(InputError, match="expected examples for train, validation and test"):
        split(pool([7] * 30), 0, sizes=(10, 10, 10))

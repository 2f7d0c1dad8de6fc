"""Directions: the published generator, the pinned vectors, and independence of how they are asked for."""

import hashlib
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from permille.errors import InputError
from permille.zo.directions import Distribution, direction, direction_slice, sigma
from permille.zo.philox import philox4x32_10
from tests.unit.zo import reference

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "directions.json").read_text())

# Random123, tests/kat_vectors, philox4x32 10
KNOWN_ANSWERS = [
    ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_known_answers_of_random123(
    counter: list[int], key: list[int], expected: list[int]
) -> None:
    words = philox4x32_10((counter[0], counter[1], counter[2], counter[3]), key[0] | key[1] << 32)
    assert [int(word) for word in words] == expected
    assert reference.philox(counter, key) == expected


@pytest.mark.parametrize("vector", GOLDEN["vectors"])
def test_directions_match_the_golden_vectors(vector: dict[str, object]) -> None:
    z_K = direction(
        seed=int(str(vector["seed"]), 16),
        step=int(str(vector["step"])),
        query=int(str(vector["query"])),
        counts=GOLDEN["counts"],
        distribution=Distribution(str(vector["distribution"])),
    )
    assert z_K.dtype == np.int8
    assert z_K[:12].tolist() == vector["first"]
    assert int(z_K.sum()) == vector["sum"]
    assert hashlib.sha256(z_K.tobytes()).hexdigest() == vector["sha256"]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1),
    step=st.integers(0, 2**32 - 1),
    query=st.integers(0, 2**32 - 1),
    tensor_id=st.integers(0, 2**32 - 1),
    start=st.integers(0, 2**31),
    size=st.integers(0, 6),
    distribution=st.sampled_from(Distribution),
)
def test_any_slice_equals_the_reference(
    seed: int, step: int, query: int, tensor_id: int, start: int, size: int, distribution: Distribution
) -> None:
    z_N = direction_slice(
        seed=seed,
        step=step,
        query=query,
        tensor_id=tensor_id,
        start=start,
        stop=start + size,
        distribution=distribution,
    )
    expected = [
        reference.element(seed, step, query, tensor_id, rank, distribution)
        for rank in range(start, start + size)
    ]
    assert z_N.tolist() == expected


@settings(max_examples=40, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 1000), max_size=8),
    counts=st.lists(st.integers(0, 400), min_size=1, max_size=4),
    distribution=st.sampled_from(Distribution),
)
def test_z_does_not_depend_on_the_chunks_it_is_made_in(
    cuts: list[int], counts: list[int], distribution: Distribution
) -> None:
    whole_K = direction(seed=3, step=5, query=1, counts=counts, distribution=distribution)
    pieces = []
    for tensor_id, count in enumerate(counts):
        edges = sorted({0, count, *(cut for cut in cuts if cut < count)})
        for start, stop in pairwise(edges):
            pieces.append(
                direction_slice(
                    seed=3,
                    step=5,
                    query=1,
                    tensor_id=tensor_id,
                    start=start,
                    stop=stop,
                    distribution=distribution,
                )
            )
    assert np.concatenate([whole_K[:0], *pieces]).tolist() == whole_K.tolist()


@pytest.mark.parametrize("distribution", Distribution)
def test_elements_have_mean_zero_and_the_stated_deviation(distribution: Distribution) -> None:
    z_K = direction(seed=11, step=0, query=0, counts=[200_000], distribution=distribution).astype(np.float64)
    standard_error = sigma(distribution) / np.sqrt(len(z_K))
    assert abs(z_K.mean()) < 5 * standard_error
    assert z_K.std() == pytest.approx(sigma(distribution), rel=0.01)


@pytest.mark.parametrize("changed", ["seed", "step", "query", "tensor"])
def test_directions_that_differ_in_one_number_are_uncorrelated(changed: str) -> None:
    numbers = {"seed": 7, "step": 7, "query": 7, "tensor": 7}
    others = numbers | {changed: 8}
    first, second = (
        direction_slice(
            seed=n["seed"],
            step=n["step"],
            query=n["query"],
            tensor_id=n["tensor"],
            start=0,
            stop=100_000,
            distribution=Distribution.RADEMACHER,
        ).astype(np.float64)
        for n in (numbers, others)
    )
    assert abs(float(first @ second)) / 100_000 < 5 / np.sqrt(100_000)


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": -1},
        {"seed": 2**64},
        {"step": 2**32},
        {"query": -1},
        {"tensor_id": 2**32},
        {"start": 5, "stop": 4},
    ],
)
def test_numbers_that_do_not_fit_their_counter_word_are_refused(changes: dict[str, int]) -> None:
    numbers = {"seed": 0, "step": 0, "query": 0, "tensor_id": 0, "start": 0, "stop": 8} | changes
    with pytest.raises(InputError, match="expected"):
        direction_slice(
            seed=numbers["seed"],
            step=numbers["step"],
            query=numbers["query"],
            tensor_id=numbers["tensor_id"],
            start=numbers["start"],
            stop=numbers["stop"],
            distribution=Distribution.RADEMACHER,
        )


def test_negative_counts_are_refused() -> None:
    with pytest.raises(InputError, match="counts"):
        direction(seed=0, step=0, query=0, counts=[4, -1], distribution=Distribution.RADEMACHER)

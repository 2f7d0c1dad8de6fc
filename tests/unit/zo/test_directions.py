"""Tests of directions: the published generator, golden vectors, and independence of the order of calls."""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from permille.choices import EstimatorKind
from permille.zo.directions import direction
from permille.zo.estimators import directions_of
from permille.zo.header import LogHeader
from permille.zo.philox import philox4x32_10
from tests.unit.zo import reference
from tests.unit.zo.logs import header_kinds, kind_fields, make_header

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "directions.json").read_text())

# From Random123, tests/kat_vectors, philox4x32 10.
KNOWN_ANSWERS = [
    ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]
WORDS = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_known_answers_of_random123(
    counter: list[int], key: list[int], expected: list[int]
) -> None:
    words = philox4x32_10((counter[0], counter[1], counter[2], counter[3]), key[0] | key[1] << 32)
    assert [int(word) for word in words] == expected
    assert reference.philox(counter, key) == expected


@given(seed=st.integers(0, 2**64 - 1), block=WORDS, tensor=WORDS, step=WORDS, query=WORDS)
def test_philox_equals_the_reference(seed: int, block: int, tensor: int, step: int, query: int) -> None:
    words = philox4x32_10((block, tensor, step, query), seed)
    expected = reference.philox([block, tensor, step, query], [seed % 2**32, seed // 2**32])
    assert [int(word) for word in words] == expected


@pytest.mark.parametrize("vector", [vector for vector in GOLDEN["vectors"] if not vector["groups"]])
def test_directions_match_the_golden_vectors(vector: dict[str, Any]) -> None:
    kind = kind_fields(EstimatorKind.SPLIT if vector["split"] else EstimatorKind.SPSA)
    header = make_header(
        **{"queries": 8 if vector["query"] < 8 else 1} | kind,
        seed=int(vector["seed"], 16),
        counts=(5, 0, 129, 40),
    )
    if vector["query"] < header.queries:
        z_K = directions_of(header, vector["step"])[vector["query"]]
    else:  # more queries than a header may have
        z_K = direction(seed=header.seed, step=vector["step"], query=vector["query"], counts=header.counts)
    assert z_K.dtype == np.int8
    assert z_K[:12].tolist() == vector["first"]
    assert int(z_K.sum()) == vector["sum"]
    assert hashlib.sha256(z_K.astype("<i4").tobytes()).hexdigest() == vector["sha256"]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1),
    step=WORDS,
    query=WORDS,
    counts=st.lists(st.integers(0, 150), min_size=1, max_size=4),
)
def test_any_direction_equals_the_reference(seed: int, step: int, query: int, counts: list[int]) -> None:
    z_K = direction(seed=seed, step=step, query=query, counts=counts)
    expected = [
        reference.sign(seed, step, query, tensor, rank)
        for tensor, count in enumerate(counts)
        for rank in range(count)
    ]
    assert z_K.tolist() == expected


def test_elements_have_mean_zero_and_unit_deviation() -> None:
    z_K = direction(seed=11, step=0, query=0, counts=[200_000]).astype(np.float64)
    assert abs(z_K.mean()) < 5 / math.sqrt(len(z_K))
    assert set(np.unique(z_K).tolist()) == {-1, 1}


@pytest.mark.parametrize("changed", ["seed", "step", "query", "tensor"])
def test_directions_that_differ_in_one_number_are_uncorrelated(changed: str) -> None:
    numbers = {"seed": 7, "step": 7, "query": 7, "tensor": 7}
    first, second = (
        direction(seed=n["seed"], step=n["step"], query=n["query"], counts=[0] * n["tensor"] + [100_000])
        for n in (numbers, numbers | {changed: 8})
    )
    assert abs(int(first.astype(int) @ second)) / 100_000 < 5 / math.sqrt(100_000)


@pytest.mark.parametrize("header", header_kinds((70, 0, 60)))
def test_no_element_is_beyond_1_and_sigma_is_the_root_mean_square(header: LogHeader) -> None:
    z_DK = np.concatenate([directions_of(header, step) for step in range(400)])
    assert np.abs(z_DK).max() == 1
    if header.split is None:
        assert not z_DK[:, : header.moving.start].any()
        moving_DK = z_DK[:, header.moving].astype(float)
        assert math.sqrt((moving_DK**2).mean()) == pytest.approx(header.sigma)
    else:
        assert not z_DK[0::3, 70:].any()
        assert not z_DK[1::3, :70].any()

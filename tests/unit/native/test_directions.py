"""Directions, perturbed values, updates and replay: the integers and the bits of numpy, on every path."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from permille.errors import InputError
from permille.native import directions as native
from permille.native import library
from permille.native.replay import replay_sums
from permille.zo import lattice
from permille.zo.bit_sums import bit_sums
from permille.zo.directions import BlockLayout, Distribution, direction
from permille.zo.directions import direction_slice as by_numpy
from permille.zo.steps import apply_record
from permille.zo.replay import replay
from tests.unit.zo import reference
from tests.unit.zo.logs import make_header, make_records

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "directions.json").read_text())
COUNTS = (5, 0, 129, 40, 8193, 1)


@pytest.mark.parametrize("vector", GOLDEN["vectors"])
def test_golden_vectors_hold_on_every_path(path: str, vector: dict[str, object]) -> None:
    z_K = direction(
        seed=int(str(vector["seed"]), 16),
        step=int(str(vector["step"])),
        query=int(str(vector["query"])),
        counts=GOLDEN["counts"],
        distribution=Distribution(str(vector["distribution"])),
    )
    assert hashlib.sha256(z_K.tobytes()).hexdigest() == vector["sha256"]


@pytest.mark.parametrize("distribution", Distribution)
@pytest.mark.parametrize("seed", [0, 2**63 + 5, 2**64 - 1])
def test_directions_are_those_of_the_slices(path: str, distribution: Distribution, seed: int) -> None:
    numbers = {"seed": seed, "step": 2**32 - 1, "query": 1023}
    z_K = direction(**numbers, counts=COUNTS, distribution=distribution)
    slices = [
        by_numpy(**numbers, tensor_id=tensor, start=0, stop=count, distribution=distribution)
        for tensor, count in enumerate(COUNTS)
    ]
    assert np.array_equal(z_K, np.concatenate(slices))


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64])
def test_perturbed_values_and_updates_have_numpys_bits(
    path: str, dtype: type[np.int8], monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    k, limit = 1500, np.iinfo(dtype).max >> 2
    w_K = rng.normal(size=k).astype(np.float32)
    w_K[:4] = [-0.0, 1e-45, 3.4e38, -1]
    s_K = rng.integers(-(2**52), 2**52, k)
    s_K[:4] = 0
    z_QK = rng.integers(-limit, limit, (3, k)).astype(dtype)
    scale = 1e-3 if dtype == np.int8 else 1e-12
    pairs_VK = lattice.perturbed_pairs(w_K, s_K, -58, z_QK, scale)
    singles_VK = np.stack(
        [lattice.perturbed(w_K, s_K, -58, z_K, sign * scale) for z_K in z_QK for sign in (1, -1)]
    )
    moved_K = s_K.copy()
    lattice.add_scaled(moved_K, -(2**20) + 1, z_QK[0])
    monkeypatch.setenv(library.VARIABLE, "off")
    expected_VK = np.stack(
        [lattice.perturbed(w_K, s_K, -58, z_K, sign * scale) for z_K in z_QK for sign in (1, -1)]
    )
    assert np.array_equal(pairs_VK.view(np.uint32), expected_VK.view(np.uint32))
    assert np.array_equal(singles_VK.view(np.uint32), expected_VK.view(np.uint32))
    assert np.array_equal(moved_K, s_K + (-(2**20) + 1) * z_QK[0].astype(np.int64))


@pytest.mark.parametrize("directions", [0, 1, 7, 8, 17, 1100])
@pytest.mark.parametrize("size", [1, 4095, 4100, 2**31 - 1, 2**50])
def test_replay_sums_are_exact_for_coefficients_of_every_size(
    compiled: library.Library, directions: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(directions)
    layout = BlockLayout((700, 0, 1, 129), 1)
    step_D, query_D = rng.integers(0, 2**32, directions), rng.integers(0, 1024, directions)
    c_D = rng.integers(-size, size + 1, directions)
    c_D[:4] = [size, -size, size, size][:directions]
    sums = replay_sums(
        compiled,
        seed=2**64 - 3,
        block_B=layout.block_B,
        tensor_B=layout.tensor_B,
        step_D=step_D,
        query_D=query_D,
        coefficient_D=c_D,
    )
    monkeypatch.setenv(library.VARIABLE, "off")
    expected = bit_sums(
        seed=2**64 - 3,
        block_B=layout.block_B,
        tensor_B=layout.tensor_B,
        steps=step_D.tolist(),
        queries=query_D.tolist(),
        coefficients=c_D,
    )
    assert np.array_equal(sums, expected)


@pytest.mark.parametrize("distribution", Distribution)
def test_a_log_replays_to_the_reference_on_every_path(path: str, distribution: Distribution) -> None:
    header = make_header(distribution=distribution, counts=(9, 0, 12))
    rows = np.random.default_rng(1).integers(-(2**31) + 1, 2**31, (17, 2)).tolist()
    expected = reference.state(header.seed, rows, header.counts, distribution, start=0)
    assert replay(header, np.array(rows)).tolist() == expected
    s_K = np.zeros(header.k, dtype=np.int64)
    for record in make_records(rows):
        apply_record(s_K, record, header)
    assert s_K.tolist() == expected


def test_many_large_coefficients_of_one_sign_do_not_overflow(compiled: library.Library) -> None:
    step_D = np.zeros(4096, np.int64)  # always the same direction, so sums are as large as they can be
    for c in (4095, 32767, 2**31 - 1, -(2**31) + 1):
        sums = replay_sums(
            compiled, **_blocks(128), step_D=step_D, query_D=step_D, coefficient_D=np.full(4096, c)
        )
        assert set(sums.tolist()) == {0, 4096 * c}


def test_what_does_not_fit_never_reaches_a_pointer(compiled: library.Library) -> None:
    w_K, s_K, z_K = np.zeros(4, np.float32), np.zeros(4, np.int64), np.zeros(4, np.int8)
    out_K, numbers = np.empty(4, np.float32), {"seed": 1, "step": 0, "query": 0}
    blocks = _blocks(4)
    with pytest.raises(InputError, match="expected out as contiguous int8"):
        native.direction_into(compiled, z_K, **numbers, counts=[5], bits=1)
    with pytest.raises(InputError, match="expected counts from 0"):
        native.direction_into(compiled, z_K, **numbers, counts=[5, -1], bits=1)
    with pytest.raises(InputError, match="got 8 bits"):
        native.direction_into(compiled, z_K, **numbers, counts=[4], bits=8)
    with pytest.raises(InputError, match="expected z as contiguous"):
        native.perturbed_into(compiled, out_K, w_K, s_K, 0, z_K[:3], 1.0)
    with pytest.raises(InputError, match="expected the state as contiguous int64"):
        native.perturbed_into(compiled, out_K, w_K, s_K.astype(np.int32), 0, z_K, 1.0)
    with pytest.raises(InputError, match="expected out as contiguous float32"):
        native.perturbed_pairs_into(compiled, out_K[None], w_K, s_K, 0, z_K[None], 1.0)
    with pytest.raises(InputError, match="expected z as contiguous"):
        native.add_scaled(compiled, s_K, 1, z_K[::2])
    with pytest.raises(InputError, match="expected steps as contiguous int64"):
        replay_sums(compiled, **blocks, step_D=s_K[:1], query_D=s_K[:2], coefficient_D=s_K[:2])
    with pytest.raises(InputError, match="expected coefficients within"):
        replay_sums(compiled, **blocks, step_D=s_K, query_D=s_K, coefficient_D=s_K + 2**60)


def _blocks(count: int) -> dict[str, Any]:
    layout = BlockLayout((count,), 1)
    return {"seed": 1, "block_B": layout.block_B, "tensor_B": layout.tensor_B}

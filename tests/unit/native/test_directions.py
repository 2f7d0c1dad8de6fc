"""Tests of directions, perturbed values, updates and replay: every path gives the bits of numpy."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from permille.choices import EstimatorKind
from permille.errors import InputError
from permille.native import library
from permille.zo import lattice
from permille.zo.directions import Combination, direction
from permille.zo.groups import group_sums, grouping
from permille.zo.replay import replay
from permille.zo.steps import apply_record
from tests.unit.zo import reference
from tests.unit.zo.logs import fields_of, header_kinds, kind_fields, make_header, make_records

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "directions.json").read_text())
COUNTS = (5, 0, 129, 40, 8193, 1)


def test_golden_vectors_hold_on_every_path(path: str) -> None:
    for vector in GOLDEN["vectors"][:10]:  # the vectors without a split and without groups
        seed, step, query = int(vector["seed"], 16), vector["step"], vector["query"]
        z_K = direction(seed=seed, step=step, query=query, counts=(5, 0, 129, 40))
        assert (z_K[:12].tolist(), int(z_K.sum())) == (vector["first"], vector["sum"])


@pytest.mark.parametrize("seed", [0, 2**63 + 5, 2**64 - 1])
def test_directions_are_those_of_numpy(path: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = {"seed": seed, "step": 2**32 - 1, "query": 1023}
    z_K = direction(**numbers, counts=COUNTS)
    monkeypatch.setenv(library.VARIABLE, "off")
    assert np.array_equal(z_K, direction(**numbers, counts=COUNTS))


def test_perturbed_values_and_updates_have_numpys_bits(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    k, scale = 1500, 1e-3
    w_K = rng.normal(size=k).astype(np.float32)
    w_K[:4] = [-0.0, 1e-45, 3.4e38, -1]
    s_K = rng.integers(-(2**52), 2**52, k)
    s_K[:4] = 0
    z_QK = rng.integers(-1, 2, (3, k)).astype(np.int8)
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
def test_sums_are_exact_for_coefficients_of_every_size(
    compiled: library.Library, directions: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(directions)
    step_D, query_D = rng.integers(0, 2**32, directions), rng.integers(0, 1024, directions)
    c_D = rng.integers(-size, size + 1, directions)
    c_D[:4] = [size, -size, size, size][:directions]
    combination = Combination(seed=2**64 - 3, step_D=step_D, query_D=query_D, c_D=c_D)
    counts = (700, 0, 1, 129)
    found_K = combination.over(counts, slice(0, 4))
    monkeypatch.setenv(library.VARIABLE, "off")
    assert np.array_equal(found_K, combination.over(counts, slice(0, 4)))


def test_a_log_replays_to_the_reference_on_every_path(path: str) -> None:
    rows = np.random.default_rng(1).integers(-(2**31) + 1, 2**31, (17, 3)).tolist()
    for header in header_kinds((9, 0, 12)):
        expected = reference.state(fields_of(header), rows)
        assert replay(header, np.array(rows)).tolist() == expected
        s_K = np.zeros(header.k, dtype=np.int64)
        for record in make_records(rows):
            apply_record(s_K, record, header)
        assert s_K.tolist() == expected


@pytest.mark.parametrize("steps", [1, 2, 9])
@pytest.mark.parametrize("size", [3, 2**31 - 1])
def test_groups_and_their_sums_are_those_of_numpy(
    path: str, steps: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"counts": (1025, 0, 3, 2048), "queries": 300, "seed": 2**64 - 5}
    header = make_header(**fields | kind_fields(EstimatorKind.GRADIENT))
    c_TQ = np.random.default_rng(steps).integers(-size, size + 1, (steps, 300))
    found, sums_K = grouping(header, 2**24), [group_sums(header, c_TQ, start=11, threads=n) for n in (1, 3)]
    monkeypatch.setenv(library.VARIABLE, "off")
    expected = grouping(header, 2**24)
    assert np.array_equal(found.group_K, expected.group_K)
    assert np.array_equal(found.sign_K, expected.sign_K)
    assert all(np.array_equal(part_K, group_sums(header, c_TQ, start=11)) for part_K in sums_K)


def test_many_large_coefficients_of_one_sign_do_not_overflow(compiled: library.Library) -> None:
    step_D = np.zeros(4096, np.int64)  # the same direction 4096 times gives the largest sums
    for c in (4095, 32767, 2**31 - 1, -(2**31) + 1):
        sums = Combination(seed=1, step_D=step_D, query_D=step_D, c_D=np.full(4096, c))
        assert set(sums.over((128,), slice(0, 1)).tolist()) == {-4096 * c, 4096 * c}


W, S, Z = np.zeros(4, np.float32), np.zeros(4, np.int64), np.zeros(4, np.int8)
GRADIENT = make_header(**kind_fields(EstimatorKind.GRADIENT))


@pytest.mark.parametrize(
    "call",
    [
        lambda: direction(seed=1, step=0, query=0, counts=[5, -1]),
        lambda: lattice.perturbed(W, S, 0, Z[:3], 1.0),
        lambda: lattice.perturbed(W, S.astype(np.int32), 0, Z, 1.0),
        lambda: lattice.perturbed(W.astype(np.float64), S, 0, Z, 1.0),
        lambda: lattice.perturbed(W, S, 0, Z.astype(np.int64), 1.0),
        lambda: lattice.perturbed_pairs(W, S, 0, Z[None, :3], 1.0),
        lambda: lattice.perturbed_pairs(W, S[:3], 0, Z[None], 1.0),
        lambda: lattice.add_scaled(S, 1, Z[:3]),
        lambda: lattice.add_scaled(np.zeros(8, np.int64)[::2], 1, Z),
        lambda: Combination(seed=1, step_D=S[:1], query_D=S, c_D=S),
        lambda: group_sums(GRADIENT, np.zeros((2, GRADIENT.queries + 1), np.int64)),
        lambda: group_sums(GRADIENT, np.zeros((2, GRADIENT.queries), np.int32)),
    ],
)
def test_what_does_not_fit_never_reaches_a_pointer(path: str, call: Any) -> None:
    with pytest.raises(InputError, match="expected"):
        call()

"""Tests of sparse changes as low-rank matrices: the product is the change, and the rank is the smallest."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from permille.engines.low_rank import exact_factors

NUMBERS = st.one_of(st.just(0.0), st.floats(-(2.0**120), 2.0**120, width=32))
CHANGES = arrays.arrays(np.float32, arrays.array_shapes(min_dims=2, max_dims=2, max_side=9), elements=NUMBERS)
SMALL = arrays.arrays(np.float32, (4, 4), elements=st.sampled_from([0.0, 0.0, 0.0, 1.0]))


@given(CHANGES)
def test_the_product_is_the_change(change_NK: NDArray[np.float32]) -> None:
    a_RK, b_NR = exact_factors(change_NK)
    assert a_RK.dtype == b_NR.dtype == np.float32
    np.testing.assert_array_equal(b_NR @ a_RK, change_NK)


@given(SMALL)
def test_no_smaller_set_of_rows_and_columns_covers_the_changes(change_NK: NDArray[np.float32]) -> None:
    def covers(nodes: tuple[int, ...]) -> bool:
        rest_NK = change_NK.copy()
        rest_NK[[node for node in nodes if node < 4]] = 0
        rest_NK[:, [node - 4 for node in nodes if node >= 4]] = 0
        return not rest_NK.any()

    smallest = next(size for size in range(5) if any(map(covers, itertools.combinations(range(8), size))))
    assert len(exact_factors(change_NK)[0]) == smallest

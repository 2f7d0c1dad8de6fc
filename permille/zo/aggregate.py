"""Several devices' logs as one state: the weighted mean of their models, without building any of them.

For plain descent from one package the mean of the personalised models is the package moved by every log's
steps, scaled by the log's share (zeroth-order federated averaging; DeComFL's rule with shared seeds,
FedSPZO's with own ones). `c * n_c / N` is no integer, so it is rounded once, on a unit `guard_bits` finer
than the finest of the logs: `c' = rint(c * 2**(e_c - e) * n_c / N)`, half to even, in exact integer
arithmetic. What is rounded is published, so the result replays exactly as a log does.

Not here: who may contribute, how stale a round may be, privacy. Logs of other packages or masks are refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from permille.errors import InputError, PackageError
from permille.zo.exponents import Exponents
from permille.zo.header import LogHeader
from permille.zo.lattice import STATE_LIMIT, check_step_unit_exponent
from permille.zo.replay import replay

GUARD_BITS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """One device's log and its weight, a count (tokens, or 1 for the plain mean)."""

    header: LogHeader
    coefficients_TQ: NDArray[np.int64]
    weight: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregate:
    """A state on its own unit: `w = w_base + 2**step_unit_exponent * s`."""

    s_K: NDArray[np.int64]
    step_unit_exponent: int


def aggregate(
    contributions: Sequence[Contribution],
    exponents: Exponents | None = None,
    *,
    guard_bits: int = GUARD_BITS,
    threads: int = 1,
) -> Aggregate:
    """The weighted mean of the logs' models, as a state.

    Args:
        exponents: of the logs' package, as far as any of their headers needs them.

    Raises:
        InputError: no contribution, a weight below 1, or a unit outside the format's range.
        PackageError: `log-binding` (another package, mask or exponents), `log-duplicate` (the same run
            twice) or `log-limit` (the sum leaves the exact range).
    """
    _check(contributions, exponents)
    exponent = check_step_unit_exponent(min(c.header.step_unit_exponent for c in contributions) - guard_bits)
    total = sum(c.weight for c in contributions)
    scaled = [scaled_coefficients(c, total_weight=total, step_unit_exponent=exponent) for c in contributions]
    # In exact arithmetic: c' may be larger than any integer type
    reach = sum(sum(map(abs, rows)) * c.header.bound for c, rows in zip(contributions, scaled, strict=True))
    if reach > STATE_LIMIT:
        raise PackageError("log-limit", f"expected sum |c| * max |z| within 2**53, got {reach}")
    s_K = np.zeros(contributions[0].header.k, dtype=np.int64)
    for contribution, rows in zip(contributions, scaled, strict=True):
        coefficients_TQ = np.array(rows, dtype=np.int64).reshape(contribution.coefficients_TQ.shape)
        s_K += replay(contribution.header, coefficients_TQ, exponents, threads=threads)
    return Aggregate(s_K=s_K, step_unit_exponent=exponent)


def scaled_coefficients(
    contribution: Contribution, *, total_weight: int, step_unit_exponent: int
) -> list[int]:
    """`rint(c * 2**(e_c - e) * weight / total)`, half to even, step by step and query by query.

    Raises:
        InputError: the unit is coarser than the log's own.
    """
    shift = contribution.header.step_unit_exponent - step_unit_exponent
    if shift < 0:
        raise InputError(
            f"expected a unit of at most 2**{step_unit_exponent + shift}, got 2**{step_unit_exponent}"
        )
    factor = contribution.weight << shift
    return [
        _divide_half_even(c * factor, total_weight) for c in contribution.coefficients_TQ.reshape(-1).tolist()
    ]


def _divide_half_even(numerator: int, denominator: int) -> int:
    quotient, rest = divmod(numerator, denominator)
    if 2 * rest > denominator or (2 * rest == denominator and quotient % 2):
        quotient += 1
    return quotient


def _check(contributions: Sequence[Contribution], exponents: Exponents | None) -> None:
    if not contributions:
        raise InputError("expected at least one log, got none")
    first = contributions[0].header
    for contribution in contributions:
        if contribution.weight < 1:
            raise InputError(f"expected a weight of at least 1, got {contribution.weight}")
        contribution.header.check_binding(
            package_digest=first.package_digest, mask_digest=first.mask_digest, counts=first.counts
        )
        contribution.header.needed_exponents(exponents)
    if len({contribution.header.digest for contribution in contributions}) < len(contributions):
        raise PackageError(
            "log-duplicate", f"expected {len(contributions)} different runs, got one of them twice"
        )

"""Slow, obvious versions of what `permille.zo` computes, written from FORMAT.md without its code."""

from collections.abc import Sequence

BITS = {"rademacher": 1, "binomial4": 4, "binomial16": 16, "binomial64": 64}


def philox(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """Philox4x32-10 on Python integers (Salmon et al., 2011)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product_0, product_1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (
            (product_1 >> 32) ^ c1 ^ k0,
            product_1 % 2**32,
            (product_0 >> 32) ^ c3 ^ k1,
            product_0 % 2**32,
        )
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [c0, c1, c2, c3]


def element(seed: int, step: int, query: int, tensor_id: int, rank: int, distribution: str) -> int:
    """One element of z by FORMAT 6.2 and 6.3, bit by bit."""
    bits = BITS[distribution]
    ones = 0
    for position in range(rank * bits, (rank + 1) * bits):
        words = philox([position // 128, tensor_id, step, query], [seed % 2**32, seed // 2**32])
        ones += (words[position % 128 // 32] >> (position % 32)) & 1
    return 2 * ones - 1 if bits == 1 else ones - bits // 2


def z(seed: int, step: int, query: int, counts: Sequence[int], distribution: str) -> list[int]:
    """A whole direction in flat order."""
    return [
        element(seed, step, query, tensor_id, rank, distribution)
        for tensor_id, count in enumerate(counts)
        for rank in range(count)
    ]


def state(
    seed: int, rows: Sequence[Sequence[int]], counts: Sequence[int], distribution: str, start: int = 0
) -> list[int]:
    """FORMAT 7.5 on Python integers."""
    total = [0] * sum(counts)
    for row, coefficients in enumerate(rows):
        for query, c in enumerate(coefficients):
            direction = z(seed, start + row, query, counts, distribution)
            total = [s + c * element for s, element in zip(total, direction, strict=True)]
    return total


Split = tuple[int, int]
"""First upper tensor and lower queries."""


def layered_z(
    seed: int,
    step: int,
    query: int,
    counts: Sequence[int],
    distribution: str,
    *,
    u: Sequence[Sequence[int]] | None = None,
    basis_steps: int = 0,
    exponents: Sequence[int] | None = None,
    split: Split | None = None,
) -> list[int]:
    """A whole direction by FORMAT 6.5 to 6.7."""
    if u is not None and step < basis_steps:
        b = [element(seed, step, query, 2**32 - 1, rank, "rademacher") for rank in range(len(u[0]))]
        found = [sum(x * y for x, y in zip(row, b, strict=True)) for row in u]
    else:
        found = z(seed, step, query, counts, distribution)
        if exponents is not None:
            found = [value * 2**exponent for value, exponent in zip(found, exponents, strict=True)]
    if split is not None:
        below = sum(counts[: split[0]])
        if query < split[1]:
            found = [value if index < below else 0 for index, value in enumerate(found)]
        else:
            found = [value if index >= below else 0 for index, value in enumerate(found)]
    return found


def layered_state(
    seed: int,
    rows: Sequence[Sequence[int]],
    counts: Sequence[int],
    distribution: str,
    start: int = 0,
    *,
    u: Sequence[Sequence[int]] | None = None,
    basis_steps: int = 0,
    exponents: Sequence[int] | None = None,
    split: Split | None = None,
) -> list[int]:
    """FORMAT 7.5 for such directions."""
    total = [0] * sum(counts)
    for row, coefficients in enumerate(rows):
        for query, c in enumerate(coefficients):
            direction = layered_z(
                seed,
                start + row,
                query,
                counts,
                distribution,
                u=u,
                basis_steps=basis_steps,
                exponents=exponents,
                split=split,
            )
            total = [s + c * value for s, value in zip(total, direction, strict=True)]
    return total

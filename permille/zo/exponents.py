"""Scale directions by a power of two for each weight: `z' = 2**d * z` (FORMAT 4.6, 6.4).

The powers come from a layer of the package, as an array with its digest. A log's header says which layer it
needs and the few integers that bound the lattice and define sigma, so that a log's range can be checked
before any layer is read. What it says is compared with the layer before anything is replayed: a header that
understates a bound could otherwise leave the exact range.

Shapes: K = masked weights.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from permille.digests import is_digest
from permille.errors import InputError
from permille.package.limits import MAX_EXPONENT, Role
from permille.package.reader import Package


@dataclass(frozen=True, slots=True, kw_only=True)
class ExponentsUse:
    """What the header of a log says of the exponents that scale its directions (FORMAT 8.1).

    Attributes:
        digest: of the package's layer `exponents`.
        largest: the largest d; the smallest is 0.
        sum_of_squares: sum of `4**d`; sigma is multiplied by `sqrt(sum_of_squares / k)`.

    Raises:
        InputError: a field is outside the limits of FORMAT 8.1.
    """

    digest: str
    largest: int
    sum_of_squares: int

    def __post_init__(self) -> None:
        if not is_digest(self.digest):
            raise InputError(f"expected exponents.digest as sha256:<64 hex digits>, got {self.digest!r}")
        if type(self.largest) is not int or not 1 <= self.largest <= MAX_EXPONENT:
            raise InputError(f"expected exponents.largest from 1 to {MAX_EXPONENT}, got {self.largest!r}")
        if type(self.sum_of_squares) is not int:
            raise InputError(f"expected exponents.sum_of_squares as an integer, got {self.sum_of_squares!r}")


class Exponents:
    """Powers of two, int8 [k], from 0 to 15.

    Raises:
        InputError: not int8 [k], outside of the range, the smallest not 0, or nothing but zeros.
    """

    __slots__ = ("digest", "e_K", "use")

    def __init__(self, e_K: NDArray[np.int8], digest: str) -> None:
        if e_K.dtype != np.int8 or e_K.ndim != 1 or not len(e_K):
            raise InputError(f"expected exponents int8 [k], got {e_K.dtype} {e_K.shape}")
        least, most = int(e_K.min()), int(e_K.max())
        if least != 0 or not 1 <= most <= MAX_EXPONENT:
            raise InputError(f"expected exponents from 0 to at most {MAX_EXPONENT}, got {least} to {most}")
        self.e_K = e_K
        self.digest = digest
        numbers = enumerate(np.bincount(e_K).tolist())
        self.use = ExponentsUse(
            digest=digest, largest=most, sum_of_squares=sum(count << 2 * d for d, count in numbers)
        )


def exponents_of(package: Package) -> Exponents | None:
    """The package's exponents; None where it has none, or where all are 0 and scale nothing.

    Raises:
        PackageError: `blob-digest`, or the layer breaks a rule of FORMAT 4.6.
    """
    e_K = package.exponents()
    if e_K is None or not e_K.any():
        return None
    return Exponents(e_K, package.manifest.layer(Role.EXPONENTS).digest)

"""The package's layers that directions may be made with: learned directions and scaling exponents.

They are handed in as arrays with their digests, so that this room knows no package and no file. What a log's
header claims of a layer is compared with the layer itself before anything is replayed: a header that
understates a bound could otherwise leave the exact range.

Shapes: K = masked weights, R = rank of the basis.
"""

import numpy as np
from numpy.typing import NDArray

from permille.errors import InputError, PackageError
from permille.zo.header import LogHeader
from permille.zo.header_parts import MAX_EXPONENT, MAX_RANK, BasisUse, ExponentsUse

_ROWS = 1 << 16


class Basis:
    """Learned directions `U`, int8 [k, r], with what a header says of them.

    Raises:
        InputError: not int8 [k, r], a rank outside of 1 to 256, or nothing but zeros.
    """

    __slots__ = ("bound", "digest", "sum_squares", "u_KR")

    def __init__(self, u_KR: NDArray[np.int8], digest: str) -> None:
        if u_KR.dtype != np.int8 or u_KR.ndim != 2 or not 1 <= u_KR.shape[1] <= MAX_RANK:
            raise InputError(f"expected a basis int8 [k, 1 to 256], got {u_KR.dtype} {u_KR.shape}")
        self.u_KR = u_KR
        self.digest = digest
        self.bound = 0
        self.sum_squares = 0
        for first in range(0, len(u_KR), _ROWS):
            rows_KR = u_KR[first : first + _ROWS].astype(np.int64)
            self.bound = max(self.bound, int(np.abs(rows_KR).sum(axis=1).max()))
            self.sum_squares += int((rows_KR * rows_KR).sum())
        if not self.bound:
            raise InputError("expected a basis with a direction in it, got zeros")

    @property
    def rank(self) -> int:
        """Columns of U."""
        return int(self.u_KR.shape[1])

    def use(self, *, steps: int, epsilon: float, learning_rate: float) -> BasisUse:
        """What the header of a log says that begins with so many steps along these directions."""
        return BasisUse(
            digest=self.digest,
            rank=self.rank,
            steps=steps,
            bound=self.bound,
            sum_squares=self.sum_squares,
            epsilon=epsilon,
            learning_rate=learning_rate,
        )


class Exponents:
    """Powers of two, int8 [k], 0 to 15, with what a header says of them.

    Raises:
        InputError: not int8 [k], outside of the range, the smallest not 0, or nothing but zeros.
    """

    __slots__ = ("digest", "e_K", "largest", "sum_squares")

    def __init__(self, e_K: NDArray[np.int8], digest: str) -> None:
        if e_K.dtype != np.int8 or e_K.ndim != 1 or not len(e_K):
            raise InputError(f"expected exponents int8 [k], got {e_K.dtype} {e_K.shape}")
        least, most = int(e_K.min()), int(e_K.max())
        if least != 0 or not 1 <= most <= MAX_EXPONENT:
            raise InputError(f"expected exponents from 0 to at most {MAX_EXPONENT}, got {least} to {most}")
        self.e_K = e_K
        self.digest = digest
        self.largest = most
        self.sum_squares = sum(
            int(number) << 2 * exponent for exponent, number in enumerate(np.bincount(e_K).tolist())
        )

    def use(self) -> ExponentsUse:
        """What the header of a log says whose plain directions are scaled by these."""
        return ExponentsUse(digest=self.digest, largest=self.largest, sum_squares=self.sum_squares)


class DirectionLayers:
    """The layers of one package; each may be absent."""

    __slots__ = ("basis", "exponents")

    def __init__(self, *, basis: Basis | None = None, exponents: Exponents | None = None) -> None:
        self.basis = basis
        self.exponents = exponents

    def check(self, header: LogHeader) -> None:
        """Refuse a log that needs a layer which is absent or another one (FORMAT 9.3).

        Raises:
            PackageError: `log-binding`.
        """
        if (needed := header.basis) is not None:
            if self.basis is None:
                raise PackageError("log-binding", f"expected the basis {needed.digest} of the log, got none")
            known = self.basis.use(
                steps=needed.steps, epsilon=needed.epsilon, learning_rate=needed.learning_rate
            )
            _check_same("basis", known, needed, len(self.basis.u_KR), header.k)
        if header.exponents is not None:
            if self.exponents is None:
                digest = header.exponents.digest
                raise PackageError("log-binding", f"expected the exponents {digest} of the log, got none")
            scaling = self.exponents.use()
            _check_same("exponents", scaling, header.exponents, len(self.exponents.e_K), header.k)

    def basis_of(self, header: LogHeader) -> Basis | None:
        """The basis where the log uses it."""
        self.check(header)
        return None if header.basis is None else self.basis

    def exponents_of(self, header: LogHeader) -> Exponents | None:
        """The exponents where the log uses them."""
        self.check(header)
        return None if header.exponents is None else self.exponents


NO_LAYERS = DirectionLayers()
"""What logs of version 1 need."""


def _check_same(
    name: str, known: BasisUse | ExponentsUse, needed: BasisUse | ExponentsUse, rows: int, k: int
) -> None:
    if rows != k:
        raise PackageError("log-binding", f"expected the {name} of {k} weights, got {rows}")
    if known != needed:
        raise PackageError("log-binding", f"expected the {name} {known}, got a log with {needed}")

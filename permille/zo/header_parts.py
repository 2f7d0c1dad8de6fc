"""The parts of a version 2 header (FORMAT 8.1): learned directions, scaled directions, two blocks.

Each part names what it needs by digest and holds the few integers that bound the lattice and define sigma,
so that a log's range can be checked, and its perturbations scaled, before any layer is read. Whether the
integers are the layer's is checked when the layer is there (`permille.zo.layers`).
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from permille.errors import InputError

MAX_RANK = 256
MAX_EXPONENT = 15

_SQUARE = 1 << 14
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class BasisUse:
    """Learned directions `z = U b` for the first steps of a log (FORMAT 6.5).

    Attributes:
        digest: of the package's layer `basis`, U.
        rank: columns of U.
        steps: how many steps, from 0 on.
        bound: the largest sum of absolute values of a row of U, and so the largest |z|.
        sum_squares: of all elements of U; sigma is `sqrt(sum_squares / k)`.
        epsilon, learning_rate: of those steps.

    Raises:
        InputError: a field is outside the limits of FORMAT 8.1.
    """

    digest: str
    rank: int
    steps: int
    bound: int
    sum_squares: int
    epsilon: float
    learning_rate: float

    def __post_init__(self) -> None:
        check_digest("basis.digest", self.digest)
        check_range("basis.rank", self.rank, 1, MAX_RANK)
        check_range("basis.bound", self.bound, 1, 128 * self.rank)
        check_positive("basis.epsilon", self.epsilon)
        check_positive("basis.learning_rate", self.learning_rate)

    def check(self, *, k: int, total_steps: int) -> None:
        """Refuse what does not fit the rest of the header (InputError)."""
        check_range("basis.steps", self.steps, 1, total_steps)
        check_range("basis.sum_squares", self.sum_squares, 1, _SQUARE * self.rank * k)

    def fields(self) -> dict[str, Any]:
        """As in the canonical JSON."""
        return {
            "digest": self.digest,
            "rank": self.rank,
            "steps": self.steps,
            "bound": self.bound,
            "sum_squares": self.sum_squares,
            "epsilon": float(self.epsilon).hex(),
            "learning_rate": float(self.learning_rate).hex(),
        }

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> "BasisUse":
        """Inverse of `fields`; keys that are missing or of another type raise what Python raises."""
        return cls(
            digest=fields["digest"],
            rank=fields["rank"],
            steps=fields["steps"],
            bound=fields["bound"],
            sum_squares=fields["sum_squares"],
            epsilon=float.fromhex(fields["epsilon"]),
            learning_rate=float.fromhex(fields["learning_rate"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExponentsUse:
    """Directions scaled by a power of two per weight, `z' = 2**d * z` (FORMAT 6.6).

    Attributes:
        digest: of the package's layer `exponents`.
        largest: the largest d; the smallest is 0.
        sum_squares: sum of `4**d`; sigma is multiplied by `sqrt(sum_squares / k)`.

    Raises:
        InputError: a field is outside the limits of FORMAT 8.1.
    """

    digest: str
    largest: int
    sum_squares: int

    def __post_init__(self) -> None:
        check_digest("exponents.digest", self.digest)
        check_range("exponents.largest", self.largest, 1, MAX_EXPONENT)

    def check(self, *, k: int) -> None:
        """Refuse what does not fit the rest of the header (InputError)."""
        check_range("exponents.sum_squares", self.sum_squares, k, k << 2 * MAX_EXPONENT)

    def fields(self) -> dict[str, Any]:
        """As in the canonical JSON."""
        return {"digest": self.digest, "largest": self.largest, "sum_squares": self.sum_squares}

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> "ExponentsUse":
        """Inverse of `fields`."""
        return cls(digest=fields["digest"], largest=fields["largest"], sum_squares=fields["sum_squares"])


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSplit:
    """Two blocks of tensors with directions of their own (FORMAT 6.7; FedSPZO's f1 and f2).

    Attributes:
        first_upper_tensor: tensor id where the upper block begins.
        lower_queries: P_1, the directions of the lower block; the other P_2 are the upper block's.
    """

    first_upper_tensor: int
    lower_queries: int

    def check(self, *, counts: tuple[int, ...], queries: int) -> None:
        """Refuse what does not fit the rest of the header (InputError)."""
        check_range("split.first_upper_tensor", self.first_upper_tensor, 1, len(counts) - 1)
        check_range("split.lower_queries", self.lower_queries, 1, queries - 1)
        lower = sum(counts[: self.first_upper_tensor])
        if not 0 < lower < sum(counts):
            raise InputError(f"expected masked weights in both blocks, got {lower} of {sum(counts)} below")
        if (queries - self.lower_queries) % (2 * self.lower_queries):
            raise InputError(
                f"expected a multiple of {2 * self.lower_queries} upper queries, "
                f"got {queries - self.lower_queries}"
            )

    def fields(self) -> dict[str, Any]:
        """As in the canonical JSON."""
        return {"first_upper_tensor": self.first_upper_tensor, "lower_queries": self.lower_queries}

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> "BlockSplit":
        """Inverse of `fields`."""
        return cls(first_upper_tensor=fields["first_upper_tensor"], lower_queries=fields["lower_queries"])


def root_mean_square(sum_squares: int, k: int) -> float:
    """`sqrt(sum_squares / k)` in binary64, the same bits on every machine (FORMAT 6.8)."""
    return math.sqrt(float(sum_squares) / float(k))


def check_digest(name: str, digest: object) -> None:
    """Refuse what is not a digest's text (InputError)."""
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise InputError(f"expected {name} as sha256:<64 hex digits>, got {digest!r}")


def check_range(name: str, number: object, least: int, most: int) -> None:
    """Refuse what is not an integer from `least` to `most` (InputError)."""
    if type(number) is not int or not least <= number <= most:
        raise InputError(f"expected {name} as an integer from {least} to {most}, got {number!r}")


def check_positive(name: str, number: float) -> None:
    """Refuse what is not a positive finite number (InputError)."""
    if not (math.isfinite(number) and number > 0):
        raise InputError(f"expected a positive finite {name}, got {number}")

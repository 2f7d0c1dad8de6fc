"""The header and the step records that both forms of the log share (FORMAT 8.1).

The header says everything that replay needs besides the package. It is written as canonical JSON: sorted
keys, no spaces, real numbers as C99 hexadecimal strings, the seed as 16 hexadecimal digits. A header has
exactly one byte form.
"""

import hashlib
import json
import math
import re
from dataclasses import dataclass
from enum import IntFlag, StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from permille.errors import InputError, PackageError
from permille.zo.directions import GENERATOR, GENERATOR_VERSION, Distribution, largest
from permille.zo.lattice import MAX_COEFFICIENT, STATE_LIMIT, check_step_unit_exponent
from permille.zo.schedule import Schedule

FORMAT = "permille-log"
VERSION = 1
MAX_HEADER_BYTES = 1 << 20
MAX_QUERIES = 1024
MAX_STEPS = 1 << 24
MAX_TENSORS = 1 << 16
MAX_K = 1 << 32

_ROWS = 1024

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


class EstimatorKind(StrEnum):
    """How the scalars of a step were estimated. Replay does not depend on it."""

    SPSA = "spsa"
    FORWARD = "forward"


class StepFlag(IntFlag):
    """What the guards did to a step."""

    NONE = 0
    CLIPPED = 1
    REJECTED = 2


KNOWN_FLAGS = int(StepFlag.CLIPPED | StepFlag.REJECTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogHeader:
    """What a log is bound to and how its integers become weights.

    Attributes:
        total_steps: the most steps the log may hold; the linear schedule ends there.
        counts: masked weights per tensor, in tensor order.

    Raises:
        InputError: a field is outside the limits of FORMAT 8.1.
    """

    package_digest: str
    mask_digest: str
    seed: int
    distribution: Distribution
    estimator: EstimatorKind
    queries: int
    epsilon: float
    learning_rate: float
    schedule: Schedule
    total_steps: int
    step_unit_exponent: int
    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("package_digest", "mask_digest"):
            if not _DIGEST.fullmatch(getattr(self, name)):
                raise InputError(f"expected {name} as sha256:<64 hex digits>, got {getattr(self, name)!r}")
        _check_range("seed", self.seed, 0, (1 << 64) - 1)
        _check_range("queries", self.queries, 1, MAX_QUERIES)
        _check_range("total_steps", self.total_steps, 1, MAX_STEPS)
        _check_range("number of tensors", len(self.counts), 1, MAX_TENSORS)
        for count in self.counts:
            _check_range("count", count, 0, (1 << 32) - 1)
        _check_range("k", sum(self.counts), 1, MAX_K)
        check_step_unit_exponent(self.step_unit_exponent)
        for name in ("epsilon", "learning_rate"):
            number = getattr(self, name)
            if not (math.isfinite(number) and number > 0):
                raise InputError(f"expected a positive finite {name}, got {number}")

    @property
    def k(self) -> int:
        """Number of masked weights."""
        return sum(self.counts)

    @property
    def digest(self) -> str:
        """sha256 of the header's canonical bytes."""
        return f"sha256:{hashlib.sha256(self.to_bytes()).hexdigest()}"

    def to_bytes(self) -> bytes:
        """Canonical JSON of the header (FORMAT 8.1)."""
        fields: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "generator": GENERATOR,
            "generator_version": GENERATOR_VERSION,
            "package_digest": self.package_digest,
            "mask_digest": self.mask_digest,
            "seed": f"{self.seed:016x}",
            "distribution": self.distribution.value,
            "estimator": self.estimator.value,
            "queries": self.queries,
            "epsilon": float(self.epsilon).hex(),
            "learning_rate": float(self.learning_rate).hex(),
            "schedule": self.schedule.value,
            "total_steps": self.total_steps,
            "step_unit_exponent": self.step_unit_exponent,
            "counts": list(self.counts),
        }
        return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode("ascii")

    @classmethod
    def from_bytes(cls, data: bytes) -> "LogHeader":
        """Read a header, refusing every byte string that `to_bytes` would not have made.

        Raises:
            PackageError: `log-header`, with what is wrong.
        """
        if len(data) > MAX_HEADER_BYTES:
            raise PackageError("log-header", f"expected at most {MAX_HEADER_BYTES} bytes, got {len(data)}")
        try:
            fields = json.loads(data)
            header = cls(
                package_digest=fields["package_digest"],
                mask_digest=fields["mask_digest"],
                seed=int(fields["seed"], 16),
                distribution=Distribution(fields["distribution"]),
                estimator=EstimatorKind(fields["estimator"]),
                queries=fields["queries"],
                epsilon=float.fromhex(fields["epsilon"]),
                learning_rate=float.fromhex(fields["learning_rate"]),
                schedule=Schedule(fields["schedule"]),
                total_steps=fields["total_steps"],
                step_unit_exponent=fields["step_unit_exponent"],
                counts=tuple(fields["counts"]),
            )
            canonical = header.to_bytes()
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError, InputError) as exc:
            raise PackageError("log-header", f"expected the header of a log, got {exc!r}") from exc
        if canonical != data:
            raise PackageError("log-header", "expected the canonical bytes of a version 1 header, got others")
        return header

    def check_binding(self, *, package_digest: str, mask_digest: str, counts: tuple[int, ...]) -> None:
        """Refuse a log of another package.

        Raises:
            PackageError: `log-binding`.
        """
        if self.package_digest != package_digest:
            raise PackageError("log-binding", f"expected package {package_digest}, got {self.package_digest}")
        if self.mask_digest != mask_digest or self.counts != counts:
            raise PackageError(
                "log-binding", f"expected mask {mask_digest}, got {self.mask_digest} or other counts"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step as applied.

    Attributes:
        coefficients: one integer per query, all 0 where the step was rejected.
        loss: mean of the step's losses; stays on the device (the canonical log does not hold it).
    """

    step: int
    coefficients: tuple[int, ...]
    loss: float
    flags: StepFlag = StepFlag.NONE


def check_record(record: StepRecord, header: LogHeader, *, expected_step: int) -> None:
    """Refuse a record that does not continue the log of `header` at `expected_step` (FORMAT 8.2).

    Raises:
        InputError: the rule that is broken.
    """
    if record.step != expected_step:
        raise InputError(f"expected step {expected_step}, got {record.step}")
    if record.step >= header.total_steps:
        raise InputError(f"expected at most {header.total_steps} steps, got step {record.step}")
    if len(record.coefficients) != header.queries:
        raise InputError(f"expected {header.queries} coefficients, got {len(record.coefficients)}")
    if any(abs(c) > MAX_COEFFICIENT for c in record.coefficients):
        raise InputError(f"expected coefficients within {MAX_COEFFICIENT}, got {record.coefficients}")
    if not 0 <= int(record.flags) <= KNOWN_FLAGS:
        raise InputError(f"expected flags of FORMAT 8.2, got {int(record.flags)}")
    if StepFlag.REJECTED in record.flags and any(record.coefficients):
        raise InputError(f"expected zero coefficients in a rejected step, got {record.coefficients}")


def weight_of(record: StepRecord, header: LogHeader) -> int:
    """How much a step adds to the bound on |s|: `sum |c| * max |z|` (FORMAT 7.3)."""
    return sum(abs(c) for c in record.coefficients) * largest(header.distribution)


def weight_of_rows(coefficients_TQ: NDArray[np.int64], distribution: Distribution) -> int:
    """The same for many steps: exact within the limit of FORMAT 7.3, beyond it wherever the truth is."""
    total = 0
    for first in range(0, len(coefficients_TQ), _ROWS):
        rows_TQ = coefficients_TQ[first : first + _ROWS]
        # In float64 first: the int64 sum of hostile coefficients may wrap
        if np.abs(rows_TQ.astype(np.float64)).sum() > STATE_LIMIT:
            return 2 * STATE_LIMIT
        total += int(np.abs(rows_TQ).sum())
        if total > STATE_LIMIT:
            break
    return total * largest(distribution)


def check_weight(weight: int) -> None:
    """Refuse a log whose state could leave the exact range (FORMAT 7.3).

    Raises:
        InputError: the bound is passed.
    """
    if weight > STATE_LIMIT:
        raise InputError(f"expected sum |c| * max |z| within 2**53, got {weight}")


def _check_range(name: str, number: object, least: int, most: int) -> None:
    if type(number) is not int or not least <= number <= most:
        raise InputError(f"expected {name} as an integer from {least} to {most}, got {number!r}")

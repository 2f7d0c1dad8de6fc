"""The header that both forms of the log begin with (FORMAT 8.1).

The header says everything that replay needs besides the package and its layers. It is written as canonical
JSON: sorted keys, no spaces, real numbers as C99 hexadecimal strings, the seed as 16 hexadecimal digits. A
header has exactly one byte form: version 2 only where an estimator or a part needs it, else version 1.
"""

import hashlib
import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from permille.errors import InputError, PackageError
from permille.zo.directions import GENERATOR, GENERATOR_VERSION, Distribution, largest, sigma
from permille.zo.header_parts import (
    BasisUse,
    BlockSplit,
    ExponentsUse,
    check_digest,
    check_positive,
    check_range,
    root_mean_square,
)
from permille.zo.lattice import check_step_unit_exponent
from permille.zo.schedule import Schedule, learning_rate_at

FORMAT = "permille-log"
MAX_HEADER_BYTES = 1 << 20
MAX_QUERIES = 1024
MAX_STEPS = 1 << 24
MAX_TENSORS = 1 << 16
MAX_K = 1 << 32


class EstimatorKind(StrEnum):
    """How the scalars of a step were estimated. Replay depends on it only through the blocks of `SPLIT`."""

    SPSA = "spsa"
    FORWARD = "forward"
    ONE_SIDED = "one_sided"
    SPLIT = "split"


_OF_VERSION_1 = frozenset({EstimatorKind.SPSA, EstimatorKind.FORWARD})


@dataclass(frozen=True, slots=True, kw_only=True)
class LogHeader:
    """What a log is bound to and how its integers become weights.

    Attributes:
        queries: coefficients a step; of both blocks together where there are two.
        total_steps: the most steps the log may hold; the linear schedule ends there.
        counts: masked weights per tensor, in tensor order.
        basis: learned directions for the first steps, or None.
        exponents: powers of two that scale the plain directions, or None.
        split: the two blocks of `EstimatorKind.SPLIT`; None for every other kind.

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
    basis: BasisUse | None = None
    exponents: ExponentsUse | None = None
    split: BlockSplit | None = None

    def __post_init__(self) -> None:
        for name in ("package_digest", "mask_digest"):
            check_digest(name, getattr(self, name))
        check_range("seed", self.seed, 0, (1 << 64) - 1)
        one_sided = self.estimator is EstimatorKind.ONE_SIDED
        check_range("queries", self.queries, 2 if one_sided else 1, MAX_QUERIES)
        check_range("total_steps", self.total_steps, 1, MAX_STEPS)
        check_range("number of tensors", len(self.counts), 1, MAX_TENSORS)
        for count in self.counts:
            check_range("count", count, 0, (1 << 32) - 1)
        check_range("k", sum(self.counts), 1, MAX_K)
        check_step_unit_exponent(self.step_unit_exponent)
        for name in ("epsilon", "learning_rate"):
            check_positive(name, getattr(self, name))
        self._check_parts()

    def _check_parts(self) -> None:
        if self.basis is not None:
            self.basis.check(k=self.k, total_steps=self.total_steps)
        if self.exponents is not None:
            self.exponents.check(k=self.k)
        if (self.split is not None) != (self.estimator is EstimatorKind.SPLIT):
            raise InputError(f"expected two blocks for split and only there, got {self.estimator.value}")
        if self.split is not None:
            self.split.check(counts=self.counts, queries=self.queries)

    @property
    def k(self) -> int:
        """Number of masked weights."""
        return sum(self.counts)

    @property
    def version(self) -> int:
        """Version of the header's one byte form: 2 where anything in it needs that, else 1."""
        plain = self.estimator in _OF_VERSION_1 and self.basis is None and self.exponents is None
        return 1 if plain else 2

    @property
    def basis_steps(self) -> int:
        """How many steps, from 0 on, are along learned directions."""
        return 0 if self.basis is None else self.basis.steps

    @property
    def digest(self) -> str:
        """sha256 of the header's canonical bytes."""
        return f"sha256:{hashlib.sha256(self.to_bytes()).hexdigest()}"

    def sigma_at(self, step: int) -> float:
        """Root mean square of z in `step` (FORMAT 6.3, 6.5, 6.6)."""
        if self.basis is not None and step < self.basis.steps:
            return root_mean_square(self.basis.sum_squares, self.k)
        scale = 1.0 if self.exponents is None else root_mean_square(self.exponents.sum_squares, self.k)
        return sigma(self.distribution) * scale

    def bound_at(self, step: int) -> int:
        """Largest |z| in `step` (FORMAT 6.3, 6.5, 6.6)."""
        if self.basis is not None and step < self.basis.steps:
            return self.basis.bound
        return largest(self.distribution) << (0 if self.exponents is None else self.exponents.largest)

    def epsilon_at(self, step: int) -> float:
        """Perturbation scale of `step`."""
        return self.basis.epsilon if self.basis and step < self.basis.steps else self.epsilon

    def learning_rate_at(self, step: int) -> float:
        """Learning rate of `step`: that of its kind of directions, falling by the schedule."""
        start = self.basis.learning_rate if self.basis and step < self.basis.steps else self.learning_rate
        return learning_rate_at(self.schedule, learning_rate=start, step=step, total_steps=self.total_steps)

    def blocks(self) -> tuple[tuple[slice, slice], ...]:
        """The queries and the tensors of each block: one block, or the two of a split."""
        if self.split is None:
            return ((slice(0, self.queries), slice(0, len(self.counts))),)
        tensor, query = self.split.first_upper_tensor, self.split.lower_queries
        return (
            (slice(0, query), slice(0, tensor)),
            (slice(query, self.queries), slice(tensor, len(self.counts))),
        )

    def weights_of(self, tensors: slice) -> slice:
        """Where the masked weights of consecutive tensors are in flat order."""
        return slice(sum(self.counts[: tensors.start]), sum(self.counts[: tensors.stop]))

    def to_bytes(self) -> bytes:
        """Canonical JSON of the header (FORMAT 8.1)."""
        fields: dict[str, Any] = {
            "format": FORMAT,
            "version": self.version,
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
        if self.version == 2:
            for name in ("basis", "exponents", "split"):
                part = getattr(self, name)
                fields[name] = None if part is None else part.fields()
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
                basis=None if fields.get("basis") is None else BasisUse.from_fields(fields["basis"]),
                exponents=(
                    None if fields.get("exponents") is None else ExponentsUse.from_fields(fields["exponents"])
                ),
                split=None if fields.get("split") is None else BlockSplit.from_fields(fields["split"]),
            )
            canonical = header.to_bytes()
        except (
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
            OverflowError,
            RecursionError,
            InputError,
        ) as exc:
            raise PackageError("log-header", f"expected the header of a log, got {exc!r}") from exc
        if canonical != data:
            raise PackageError(
                "log-header", f"expected the canonical bytes of a version {header.version} header, got others"
            )
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

"""The header at the start of both forms of the log, the journal and the canonical log (FORMAT 8.1).

Replay needs only the header and the coefficients of the steps. The package is needed only to turn the
state into weights. The header is canonical JSON: sorted keys, no spaces, real numbers as C99 hexadecimal
strings, the seed as 16 hexadecimal digits. So a header has exactly one byte form.

To add an estimator or a kind of direction, add a member to its enum. If it needs more fields, put them
into a record of their own, like `BlockSplit`. The record is null in the headers of all other kinds.
"""

import json
import math
from dataclasses import asdict, dataclass, replace
from enum import StrEnum

from permille.choices import EstimatorKind, choice_of
from permille.digests import canonical_json, is_digest
from permille.errors import InputError, PackageError
from permille.zo.lattice import MAX_STEP_UNIT_EXPONENT, MIN_STEP_UNIT_EXPONENT, step_unit_exponent_for
from permille.zo.philox import GENERATOR, GENERATOR_VERSION

FORMAT = "permille-log"
VERSION = 1
# The limits of FORMAT 8.1.
MAX_HEADER_BYTES = 1 << 20
MAX_QUERIES = 1024
MAX_GROUPS = 8192
MAX_STEPS = 1 << 24
MAX_TENSORS = 1 << 16
MAX_K = 1 << 32


class DirectionKind(StrEnum):
    """Kind of the directions.

    - RADEMACHER: all elements of a direction are signs (FORMAT 6.3).
    - GROUPS: the elements of one group of weights are signs, and all others are 0 (FORMAT 6.6).
    """

    RADEMACHER = "rademacher"
    GROUPS = "groups"


class Schedule(StrEnum):
    """Schedule of the learning rate over a run."""

    CONSTANT = "constant"
    LINEAR = "linear"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSplit:
    """Two blocks of tensors with their own directions (FORMAT 6.5; f1 and f2 of FedSPZO).

    Attributes:
        first_upper_tensor: the tensor id where the upper block begins.
        lower_queries: P_1, the number of directions of the lower block. The others are the upper block's.
    """

    first_upper_tensor: int
    lower_queries: int

    @classmethod
    def halving(
        cls, counts: tuple[int, ...], decoder_layers: int, lower_queries: int, first_layer: int = 0
    ) -> "BlockSplit":
        """Split the tensors halfway between the first and the last decoder layer with masked weights.

        Layers before `first_layer` are ignored.

        Raises:
            InputError: fewer than two decoder layers are masked.
        """
        size = len(counts) // decoder_layers
        masked = [
            layer
            for layer in range(first_layer, decoder_layers)
            if any(counts[layer * size : (layer + 1) * size])
        ]
        if size * decoder_layers != len(counts) or len(masked) < 2:
            raise InputError(
                f"A split needs masks in two decoder layers or more, and there are {len(masked)}. "
                "Choose another estimator."
            )
        middle = (masked[0] + masked[-1] + 1) // 2
        return cls(first_upper_tensor=middle * size, lower_queries=lower_queries)

    def check(self, *, counts: tuple[int, ...], queries: int) -> None:
        """Raise InputError if the split does not fit the rest of the header."""
        check_range("split.first_upper_tensor", self.first_upper_tensor, 1, len(counts) - 1)
        check_range("split.lower_queries", self.lower_queries, 1, queries - 1)
        lower = sum(counts[: self.first_upper_tensor])
        if not 0 < lower < sum(counts):
            raise InputError(
                f"Both blocks of a split need masked weights. The lower one has {lower} of {sum(counts)}."
            )
        # FORMAT 8.1: each lower direction and sign has the same number of upper directions.
        if (queries - self.lower_queries) % (2 * self.lower_queries):
            raise InputError(
                f"The upper queries of this split must be a multiple of {2 * self.lower_queries}, "
                f"not {queries - self.lower_queries}."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LogHeader:
    """Header of a log: the package and mask it belongs to, and the constants that turn integers into weights.

    Attributes:
        queries: the number of coefficients of a step, those of both blocks if there are two.
        total_steps: the largest number of steps in the log. The linear schedule reaches 0 after this many.
        counts: the number of masked weights of each tensor, in tensor order.
        split: the two blocks of `EstimatorKind.SPLIT`, else None.
        first_tensor: the first tensor that is trained. Masked weights of earlier tensors do not move.
        basis_steps: the number of first steps whose directions are columns of the package's basis.

    Raises:
        InputError: a field is outside the limits of FORMAT 8.1.
    """

    package_digest: str
    mask_digest: str
    seed: int
    directions: DirectionKind = DirectionKind.RADEMACHER
    estimator: EstimatorKind
    queries: int
    epsilon: float
    learning_rate: float
    schedule: Schedule
    total_steps: int
    step_unit_exponent: int
    counts: tuple[int, ...]
    split: BlockSplit | None = None
    first_tensor: int = 0
    basis_steps: int = 0

    def __post_init__(self) -> None:
        for name, kind in (
            ("directions", DirectionKind),
            ("estimator", EstimatorKind),
            ("schedule", Schedule),
        ):
            # A header that comes from JSON has strings in place of the enums. Replace the strings in spite of
            # `frozen`.
            object.__setattr__(
                self, name, choice_of(kind, getattr(self, name), f"a {name.replace('_', ' ')}")
            )
        for name, digest in (("package_digest", self.package_digest), ("mask_digest", self.mask_digest)):
            if not is_digest(digest):
                raise InputError(f"expected {name} as sha256:<64 hex digits>, got {digest!r}")
        check_range("seed", self.seed, 0, (1 << 64) - 1)
        groups = self.directions is DirectionKind.GROUPS
        # The estimator `gradient` takes only groups, and `one-sided` takes either kind. All others take only
        # signs.
        if self.estimator is not EstimatorKind.ONE_SIDED and groups != (
            self.estimator is EstimatorKind.GRADIENT
        ):
            raise InputError(
                f"The estimator {self.estimator.value} does not take directions of the kind "
                f"{self.directions.value}."
            )
        # One-sided compares each loss with the mean of the others (FORMAT 8.1), so it needs two queries.
        least = 2 if self.estimator is EstimatorKind.ONE_SIDED else 1
        check_range("queries", self.queries, least, MAX_GROUPS if groups else MAX_QUERIES)
        check_range("total_steps", self.total_steps, 1, MAX_STEPS)
        check_range("number of tensors", len(self.counts), 1, MAX_TENSORS)
        for count in self.counts:
            check_range("count", count, 0, (1 << 32) - 1)
        check_range("k", self.k, 1, MAX_K)
        exponent = self.step_unit_exponent
        check_range("step_unit_exponent", exponent, MIN_STEP_UNIT_EXPONENT, MAX_STEP_UNIT_EXPONENT)
        for name, number in (("epsilon", self.epsilon), ("learning_rate", self.learning_rate)):
            if not (math.isfinite(number) and number > 0):
                raise InputError(f"{name} must be positive and finite, not {number}.")
        if (self.split is not None) != (self.estimator is EstimatorKind.SPLIT):
            raise InputError(
                "The estimator split needs the field split. For all other estimators, it must be null. "
                f"The estimator is {self.estimator.value}."
            )
        if self.split is not None:
            self.split.check(counts=self.counts, queries=self.queries)
        last = (len(self.counts) if self.split is None else self.split.first_upper_tensor) - 1
        gradient = self.estimator is EstimatorKind.GRADIENT
        # A gradient moves all masked weights. With other estimators, at least one tensor must move, and in a
        # split, at least one of the lower block.
        check_range("first_tensor", self.first_tensor, 0, 0 if gradient else last)
        # A column has an element for each masked weight, so no tensor may be left out. The steps in the basis
        # and the later steps share one estimator.
        fits = self.estimator is EstimatorKind.ONE_SIDED and groups and not self.first_tensor
        check_range("basis_steps", self.basis_steps, 0, self.total_steps if fits else 0)
        if any(not sum(self.counts[tensors]) for _, tensors in self.blocks()):
            raise InputError(
                f"No weight from tensor {self.first_tensor} on is masked. Train from an earlier layer."
            )

    @property
    def k(self) -> int:
        """Number of masked weights."""
        return sum(self.counts)

    @property
    def sigma(self) -> float:
        """Return the root mean square of a direction's elements (FORMAT 6.3, 6.6). It has the same bits
        on every machine.
        """
        return math.sqrt(1.0 / self.queries) if self.directions is DirectionKind.GROUPS else 1.0

    def learning_rate_at(self, step: int) -> float:
        """Return the learning rate of a step. Steps count from 0.

        The rate is constant, or falls linearly to 0 at `total_steps`.
        """
        if self.schedule is Schedule.CONSTANT:
            return self.learning_rate
        # Python floats are IEEE 754 binary64, so every device computes the same rate.
        return self.learning_rate * max(0.0, 1.0 - step / self.total_steps)

    def blocks(self) -> tuple[tuple[slice, slice], ...]:
        """Return the queries and the tensors of each block: one block, or the two of a split."""
        if self.split is None:
            return ((slice(0, self.queries), slice(self.first_tensor, len(self.counts))),)
        tensor, query = self.split.first_upper_tensor, self.split.lower_queries
        return (
            (slice(0, query), slice(self.first_tensor, tensor)),
            (slice(query, self.queries), slice(tensor, len(self.counts))),
        )

    @property
    def moving(self) -> slice:
        """Return the range of the trained masked weights in flat order."""
        return self.weights_of(slice(self.first_tensor, len(self.counts)))

    def weights_of(self, tensors: slice) -> slice:
        """Return the range of the masked weights of consecutive tensors in flat order."""
        return slice(sum(self.counts[: tensors.start]), sum(self.counts[: tensors.stop]))

    def with_lengths(self, perturbation: float, step: float) -> "LogHeader":
        """Return this header with the epsilon, the rate and the unit of these Euclidean lengths.

        Args:
            perturbation: the length of a perturbation of the trained weights.
            step: the length of the first step, whose projected gradients have a root mean square of 1.
        """
        spread = 0.0
        for queries, tensors in self.blocks():
            weights = self.weights_of(tensors)
            # The mean of q independent directions is sqrt(q) times shorter than one of them.
            spread += (weights.stop - weights.start) / (queries.stop - queries.start)
        epsilon = perturbation / math.sqrt(self.moving.stop - self.moving.start)
        return replace(self, epsilon=epsilon, learning_rate=step / math.sqrt(spread)).with_step_unit()

    def with_step_unit(self) -> "LogHeader":
        """Return this header with the unit that fits normalised steps of its learning rate."""
        # The block with the most directions has the smallest coefficients.
        widest = max(queries.stop - queries.start for queries, _ in self.blocks())
        unit = step_unit_exponent_for(self.learning_rate, 1.0, widest, self.sigma)
        return replace(self, step_unit_exponent=unit)

    def to_bytes(self) -> bytes:
        """Return the canonical JSON of the header (FORMAT 8.1)."""
        fields = asdict(self) | {
            "format": FORMAT,
            "version": VERSION,
            # Name the generator of the directions, because another one would give other weights.
            "generator": GENERATOR,
            "generator_version": GENERATOR_VERSION,
            "seed": f"{self.seed:016x}",
            "epsilon": float(self.epsilon).hex(),
            "learning_rate": float(self.learning_rate).hex(),
        }
        return canonical_json(fields)

    @classmethod
    def from_bytes(cls, data: bytes) -> "LogHeader":
        """Read a header. Refuse bytes that `to_bytes` would not have written.

        Raises:
            PackageError: `log-header`. The message says what is wrong.
        """
        # Check the size before parsing, because the service does not trust the device that sends the log.
        if len(data) > MAX_HEADER_BYTES:
            raise PackageError(
                "log-header",
                f"The header has {len(data)} bytes, and at most {MAX_HEADER_BYTES} are accepted.",
            )
        try:
            fields = json.loads(data)
            for name in ("format", "version", "generator", "generator_version"):
                del fields[name]  # constants; to_bytes adds them, and the bytes are compared below
            split = fields.pop("split")
            # An unknown field is a TypeError here, so nothing is ignored silently.
            header = cls(
                **fields
                | {
                    "seed": int(fields["seed"], 16),
                    "epsilon": float.fromhex(fields["epsilon"]),
                    "learning_rate": float.fromhex(fields["learning_rate"]),
                    "counts": tuple(fields["counts"]),
                    "split": None if split is None else BlockSplit(**split),
                }
            )
            # Floats that overflow, or other spellings of a number, fail here or in the comparison.
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
            raise PackageError("log-header", f"The header of the log is malformed: {exc!r:.300}") from exc
        if canonical != data:
            raise PackageError(
                "log-header", f"expected the canonical bytes of a version {VERSION} header, got others"
            )
        return header

    def check_binding(self, *, package_digest: str, mask_digest: str, counts: tuple[int, ...]) -> None:
        """Check that the log belongs to this package and mask.

        Raises:
            PackageError: `log-binding`.
        """
        if self.package_digest != package_digest:
            raise PackageError(
                "log-binding", f"The log belongs to package {self.package_digest}, not to {package_digest}."
            )
        if self.mask_digest != mask_digest or self.counts != counts:
            raise PackageError(
                "log-binding",
                f"The log belongs to mask {self.mask_digest}, not to {mask_digest}, or has other counts.",
            )


def check_range(name: str, number: object, least: int, most: int) -> None:
    """Raise InputError if `number` is not an integer from `least` to `most`. A bool is refused, too."""
    # `isinstance` would accept a bool as an integer.
    if type(number) is not int or not least <= number <= most:
        raise InputError(f"{name} must be an integer from {least} to {most}, not {number!r}.")

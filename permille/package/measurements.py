"""What `measurements.json` says of precision (FORMAT 3.3), written strictly and read with doubt.

The numbers are informative: a device may begin with what they suggest and checks it for itself. So a row that
is not of this form is passed over, and the others count.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

PRECISION = "precision"
FLOAT32 = "float32"
MAX_ROWS = 256
MAX_NUMBER = 1 << 40
MAX_TEXT = 200
ERROR_DIGITS = 3
EPSILON_DIGITS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionRow:
    """The error of two-sided differences of one engine in one compute type at one epsilon.

    Attributes:
        version: of the engine and its libraries, as it names them.
        relative_error: rms of the error over rms of the exact directional derivative; None where an estimate
            was not finite. An error of 1 knows nothing.
        cosine: between the perturbation that float32 values carry and the intended one.
        bfloat16_cosine: the same if the values were rounded to bfloat16.
        directions: that the rms was taken over.
        tokens: whose prediction counted, of all sequences together.
    """

    engine: str
    version: str
    compute_dtype: str
    epsilon: float
    relative_error: float | None
    cosine: float
    bfloat16_cosine: float
    directions: int
    tokens: int


def precision_measurements(rows: Iterable[PrecisionRow]) -> dict[str, Any]:
    """What to hand to `add_measurements`: errors to 3 significant digits, so that the noise of a machine's
    last bits seldom shows."""
    return {PRECISION: [_plain(row) for row in rows]}


def precision_rows(measurements: Mapping[str, Any] | None) -> tuple[PrecisionRow, ...]:
    """The rows that are of the form, at most 256 of them; nothing that JSON can hold makes this fail."""
    found = (measurements or {}).get(PRECISION)
    rows = found[:MAX_ROWS] if isinstance(found, list) else []
    return tuple(read for row in rows if isinstance(row, dict) and (read := _row(row)) is not None)


def best_epsilon(rows: Iterable[PrecisionRow], compute_dtype: str = FLOAT32) -> float | None:
    """The epsilon of the smallest error in this compute type, the larger one of two; None: none was measured
    with an error below 1."""
    usable = [
        (row.relative_error, -row.epsilon)
        for row in rows
        if row.compute_dtype == compute_dtype and row.relative_error is not None and row.relative_error < 1
    ]
    return -min(usable)[1] if usable else None


def rounded(number: float, digits: int) -> float:
    """The nearest number of so many significant decimal digits."""
    return float(f"{number:.{digits}g}")


def _plain(row: PrecisionRow) -> dict[str, Any]:
    error = row.relative_error
    return asdict(row) | {
        "relative_error": None if error is None else rounded(error, ERROR_DIGITS),
        "cosine": rounded(row.cosine, ERROR_DIGITS),
        "bfloat16_cosine": rounded(row.bfloat16_cosine, ERROR_DIGITS),
    }


def _row(found: Mapping[str, Any]) -> PrecisionRow | None:
    """The row, if everything in it is of the form; keys that this version does not know are passed over."""
    try:
        error = found["relative_error"]
        row = PrecisionRow(
            engine=_text(found["engine"]),
            version=_text(found["version"]),
            compute_dtype=_text(found["compute_dtype"]),
            epsilon=_number(found["epsilon"]),
            relative_error=None if error is None else _number(error),
            cosine=_number(found["cosine"]),
            bfloat16_cosine=_number(found["bfloat16_cosine"]),
            directions=_count(found["directions"]),
            tokens=_count(found["tokens"]),
        )
    except (KeyError, ValueError):
        return None
    in_range = row.epsilon > 0 and (row.relative_error or 0) >= 0
    return row if in_range and max(abs(row.cosine), abs(row.bfloat16_cosine)) <= 1 else None


def _text(value: object) -> str:
    """A short printable text. Raises ValueError."""
    if not isinstance(value, str) or not 0 < len(value) <= MAX_TEXT or not value.isprintable():
        raise ValueError
    return value


def _number(value: object) -> float:
    """A number that is not absurd. JSON's integers have no bound, and true is not 1. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < MAX_NUMBER:
        raise ValueError
    return float(value)


def _count(value: object) -> int:
    """A positive integer. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < MAX_NUMBER:
        raise ValueError
    return value

"""The time left of long work, in words and in the lines of progress that a pipe gets."""

from typing import Final

LINE_EVERY_S: Final = 30.0
"""Seconds between two lines of progress."""
LEAST: Final = 0.05
"""Fraction that must be done before the time left is told. The first steps, such as loading, tell little."""
_SPANS: Final = ((86_400.0, "days"), (3_600.0, "h"), (60.0, "min"))


class TimeLeft:
    """Estimate of the time left, from the reports of the fraction that is done.

    The estimate uses the pace since the report with the lowest fraction, usually the first one. Work that an
    earlier attempt has done therefore does not count.
    """

    def __init__(self) -> None:
        # The time and fraction of the report from which the pace is measured.
        self._first: tuple[float, float] | None = None
        # The time and fraction of the last report with a higher fraction than before.
        self._risen: tuple[float, float] = (0.0, 0.0)

    def seen(self, at_s: float, fraction: float) -> float | None:
        """Note a report, and return the seconds left. Return None before the fraction has risen by `LEAST`.

        The pace is measured up to the last report that raised the fraction. Reports with an unchanged
        fraction therefore do not change the pace.
        """
        # A fraction below the first one means that the work has started again. Measure the pace from here.
        if self._first is None or fraction < self._first[1]:
            self._first = self._risen = (at_s, fraction)
        elif fraction > self._risen[1]:
            self._risen = (at_s, fraction)
        (started_s, lowest), (rose_s, _) = self._first, self._risen
        if fraction - lowest < LEAST:
            return None
        return max(0.0, (rose_s - started_s) * (1.0 - fraction) / (fraction - lowest) - (at_s - rose_s))


def left(left_s: float | None) -> str:
    """Describe the time left. None is unknown, and gives an empty string.

    Example:
        >>> left(42.0)
        '42 s left'
    """
    return "" if left_s is None else f"{span(left_s)} left"


def progress_line(what: str, fraction: float, left_s: float | None) -> str:
    """Return a line of progress.

    Example:
        >>> progress_line("mask: fisher 9/32", 0.29, 170.0)
        'mask: fisher 9/32: 29 % done, 3 min left'
    """
    return ", ".join(filter(None, (f"{what}: {100 * fraction:.0f} % done", left(left_s))))


def span(seconds: float) -> str:
    """Format a duration in its largest unit.

    Example:
        >>> span(5400.0)
        '2 h'
    """
    for size, unit in _SPANS:
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"

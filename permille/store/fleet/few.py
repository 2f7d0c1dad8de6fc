"""Hide counts of few devices from operators who may not see single devices.

If only one group were hidden, its count would follow from the total. So groups are hidden from the
smallest up, until the hidden groups together are large enough. This holds even if no group is small:
otherwise, a group that disappears would tell that one device is now in a small group. For the same reason,
0 is hidden like any other count of few devices.

Two views at different times must not reveal what one device did in between. So counts are rounded
to multiples of ten, and measured values to two digits. A single device seldom changes such a
number. When it does, a viewer learns only that a count passed a boundary.
"""

from collections.abc import Mapping
from typing import Final, TypeVar

# Smaller counts are hidden from operators who may not see single devices.
LEAST: Final = 10
Key = TypeVar("Key")


def hide(counts: Mapping[Key, int], least: int) -> dict[Key, int | None]:
    """Return the counts of disjoint groups, with None for hidden groups.

    Example:
        >>> hide({"1.0": 40, "1.1": 12, "1.2": 3}, least=10)
        {'1.0': 40, '1.1': None, '1.2': None}
        >>> hide({"1.0": 40, "1.1": 12, "1.2": 0}, least=10)
        {'1.0': 40, '1.1': None, '1.2': None}
        >>> hide({"1.0": 40, "1.1": 3}, least=0)
        {'1.0': 40, '1.1': 3}
    """
    shown: dict[Key, int | None] = {key: rounded(count, least) for key, count in counts.items()}
    hidden = 0
    for key, count in sorted(counts.items(), key=lambda item: item[1]):
        # Hide one more group while the hidden groups together are too small. Anyone can compute their sum:
        # the total less the shown counts.
        if hidden >= least and count >= least:
            break
        shown[key] = None
        hidden += count
    return shown


def rounded(count: int, least: int) -> int | None:
    """Round a count to a multiple of `least`, or return None below it.

    With `least` 0, return the exact count.

    Example:
        >>> rounded(47, 10), rounded(7, 10), rounded(0, 10), rounded(7, 0)
        (50, None, None, 7)
    """
    if not least:
        return count
    return None if count < least else (count + least // 2) // least * least


def coarse(value: float, least: int) -> float:
    """Round a median to two digits, since it is the value of a single device.

    With `least` 0, do not round.

    Example:
        >>> coarse(0.12345, 10)
        0.12
    """
    return float(f"{value:.2g}") if least else value

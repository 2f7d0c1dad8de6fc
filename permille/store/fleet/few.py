"""Counts of so few devices that they speak of single ones are not told to who may not see each device.

A group that is hidden alone could be had by taking the others off the whole. So groups are hidden from the
smallest up, until those that are hidden are enough together.

Two looks must not tell what one device did meanwhile, either: counts are told in tens and measured values by
two digits, so that one device seldom moves what is told. Where it does move it, that one count passed a
boundary is what is learned.
"""

from collections.abc import Mapping
from typing import Final, TypeVar

# Fewer devices are not counted in front of who may not see each.
LEAST: Final = 10
Key = TypeVar("Key")


def hide(counts: Mapping[Key, int], least: int) -> dict[Key, int | None]:
    """The counts of groups that are apart, None for those that are not told. Nobody is no secret."""
    shown: dict[Key, int | None] = {key: rounded(count, least) for key, count in counts.items()}
    hidden = 0
    for key, count in sorted(counts.items(), key=lambda item: item[1]):
        if count == 0 or (count >= least and not 0 < hidden < least):
            continue
        shown[key] = None
        hidden += count
    return shown


def rounded(count: int, least: int) -> int | None:
    """A count as it is told: as a multiple of `least`, None below it; any where `least` is 0."""
    if not least or not count:
        return count
    return None if count < least else (count + least // 2) // least * least


def coarse(value: float, least: int) -> float:
    """A median as it is told: it is the value of one device, so only two digits of it."""
    return float(f"{value:.2g}") if least else value

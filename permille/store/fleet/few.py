"""Counts of so few devices that they speak of single ones are not told to who may not see each device.

A group that is hidden alone could be had by taking the others off the whole. So groups are hidden from the
smallest up, until those that are hidden are enough together.
"""

from collections.abc import Mapping
from typing import Final, TypeVar

LEAST: Final = 10
"""Fewer devices are not counted in front of who may not see each."""
Key = TypeVar("Key")


def hide(counts: Mapping[Key, int], least: int) -> dict[Key, int | None]:
    """The counts of groups that are apart, None for those that are not told. Nobody is no secret."""
    shown: dict[Key, int | None] = dict(counts)
    hidden = 0
    for key, count in sorted(counts.items(), key=lambda item: item[1]):
        if count == 0 or (count >= least and not 0 < hidden < least):
            continue
        shown[key] = None
        hidden += count
    return shown

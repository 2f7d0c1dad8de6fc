"""The time after which a server allows the next request, as its headers state it."""

import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Final

LONGEST_S: Final = 24 * 3600.0
"""A longer wait is reduced to this value."""
# In drafts of the header `RateLimit`: `"api";r=0;t=55`, and before `limit=100, remaining=0, reset=55`.
_RESET: Final = re.compile(r"\b(?:t|reset)\s*=\s*(\d+)", re.ASCII)
_RESET_HEADERS: Final = ("ratelimit-reset", "x-ratelimit-reset", "x-rate-limit-reset")
# A reset after more seconds than this is a time since 1970.
_EPOCH_FROM_S: Final = 1e9


def stated_wait_s(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that a server asks to wait, at most a day, or None if it does not say.

    `Retry-After` (RFC 9110) counts first, then the headers of rate limits that hubs and proxies send.

    Args:
        headers: the headers of an answer. Their names are in lower case, or compared without case.

    Example:
        >>> stated_wait_s({"retry-after": "120"})
        120.0
        >>> stated_wait_s({"ratelimit": '"api";r=0;t=55'})
        55.0
    """
    # The clock of this machine may be wrong, so the date of the server is preferred.
    now = _date(headers.get("date", "")) or datetime.now(UTC)
    text = headers.get("retry-after", "")
    until = _date(text)
    wait_s = _seconds(text) if until is None else (until - now).total_seconds()
    if wait_s is None and (found := _RESET.search(headers.get("ratelimit", ""))):
        wait_s = float(found[1])
    for name in _RESET_HEADERS:
        if wait_s is None and (wait_s := _seconds(headers.get(name, ""))) and wait_s > _EPOCH_FROM_S:
            wait_s -= now.timestamp()
    return None if wait_s is None else min(LONGEST_S, max(0.0, wait_s))


def _seconds(text: str) -> float | None:
    try:
        seconds = float(text)
    except ValueError:
        return None
    return 0.0 if math.isnan(seconds) else seconds


def _date(text: str) -> datetime | None:
    try:
        date = parsedate_to_datetime(text)
    except (ValueError, TypeError, OverflowError):  # OverflowError: a number of many digits
        return None
    return date if date.tzinfo else date.replace(tzinfo=UTC)

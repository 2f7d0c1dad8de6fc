"""Rounding of the numbers that reach the service.

A run is deterministic, and the service has the package. So an exact loss would confirm a guess of the user's
text, and exact counts of tokens would add up what a tokenizer was made to count. All numbers of a report are
rounded here, before the report is queued:

- Losses are rounded to 0.01 nats per token. Differences of losses are rounded, too: the second loss is the
  first one and their rounded difference. So a gain has the same error as a loss.
- Other floats, and counts, are rounded to two significant digits.
- The begin is cut to the minute, so that the time between begin and end is no exact measure of the text. The
  end, which orders runs, is cut to the second.
"""

import math
from datetime import datetime
from typing import Any, Final

from permille.schemas.runs import RunMetrics

LOSS_DIGITS: Final = 2
# These numbers belong to the package or the options, or are steps of a scale that both sides must read alike.
_EXACT: Final = frozenset({"version", "k", "queries", "strength", "step_unit_exponent"})
# The first loss, and the loss that is compared with it.
_COMPARED: Final = (("loss_base", "loss_personal"), ("general_loss_base", "general_loss_personal"))


def rounded(metrics: RunMetrics) -> RunMetrics:
    """Return the metrics as the service may see them. A second call changes nothing."""
    changes = {name: _rounded(name, value) for name, value in metrics if name not in _EXACT}
    for first, second in _COMPARED:
        exact, compared = getattr(metrics, first), getattr(metrics, second)
        if exact is not None and compared is not None and math.isfinite(compared - exact):
            changes[second] = _loss(changes[first] + _loss(compared - exact))
    return metrics.model_copy(update=changes)


def rounded_difference(nats: float, part: float) -> float:
    """Round a difference of losses up or down at random, so that a mean over devices keeps its value.

    Args:
        nats: the exact difference.
        part: a random number from 0 to 1.

    Example:
        >>> rounded_difference(0.0125, 0.3), rounded_difference(0.0125, 0.9)
        (0.01, 0.02)
    """
    return _loss(math.floor(nats * 10**LOSS_DIGITS + part) / 10**LOSS_DIGITS)


def _rounded(name: str, value: Any) -> Any:
    if isinstance(value, datetime):
        return value.replace(second=0 if name == "began_at" else value.second, microsecond=0)
    if type(value) is float:
        is_loss = "loss" in name or name.startswith("improvement")
        return _loss(value) if is_loss else float(f"{value:.2g}")
    # `type`, because members of enums and True are no counts.
    return int(float(f"{value:.2g}")) if type(value) is int else value


def _loss(nats: float) -> float:
    return round(nats, LOSS_DIGITS) + 0.0  # -0.0 becomes 0.0

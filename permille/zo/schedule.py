"""The learning rate of each step, a function of the header alone."""

from enum import StrEnum


class Schedule(StrEnum):
    """How the learning rate falls over a run."""

    CONSTANT = "constant"
    LINEAR = "linear"


def learning_rate_at(schedule: Schedule, *, learning_rate: float, step: int, total_steps: int) -> float:
    """Learning rate of `step` (0 first): constant, or falling linearly to 0 at `total_steps`."""
    if schedule is Schedule.CONSTANT:
        return learning_rate
    return learning_rate * max(0.0, 1.0 - step / total_steps)

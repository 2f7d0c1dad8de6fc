"""What the policy asks of the machine, read once: power, battery, load."""

import os

import psutil

from permille_agent.daemon.policy import Machine


def read_machine() -> Machine:
    """Power and load now. A machine that reports no battery counts as plugged in."""
    battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    return Machine(
        on_ac=battery is None or battery.power_plugged is not False,
        battery=None if battery is None else float(battery.percent),
        load=_load(),
    )


def _load() -> float | None:
    try:
        return float(psutil.getloadavg()[0]) / (os.cpu_count() or 1)
    except OSError:
        return None

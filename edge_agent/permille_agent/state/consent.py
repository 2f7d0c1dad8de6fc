"""Whether training logs may leave the device: the user's choice, made on this device, off until then.

Nothing that a server sends is ever written here. A log together with its package is the personalised model:
sharing one is sharing personal data. A choice counts at once, for a run that is under way, too, so writing it
needs no lock.
"""

from datetime import datetime
from pathlib import Path

from permille_agent.state.home import Home, read_state, write_state


def shares_log(home: Home) -> bool:
    """True only where the user switched sharing on and it is on still."""
    state = read_state(home.consent) or {}
    return state.get("share_log") is True


def set_share_log(home: Home, share: bool, *, now: datetime) -> None:
    """Store the user's choice."""
    write_state(home.consent, {"share_log": share, "changed_at_s": now.timestamp()})


def is_withdrawn(home: Home, file: Path) -> bool:
    """Whether the user switched sharing off after `file` was written: what it stands for is then not shared.

    A run that shares its log by its own flag, begun after that, is not meant.
    """
    state = read_state(home.consent) or {}
    if state.get("share_log") is not False:
        return False
    return float(state.get("changed_at_s", 0.0)) >= file.stat().st_mtime

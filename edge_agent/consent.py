"""Whether training logs may leave the device: the user's choice, made on this device, off until then.

Nothing that a server sends is ever written here. A log together with its package is the personalised model,
so sharing one is sharing personal data.
"""

from datetime import datetime

from edge_agent.home import Home, read_state, write_state


def shares_log(home: Home) -> bool:
    """True only where the user switched sharing on and it is on still."""
    state = read_state(home.consent) or {}
    return state.get("share_log") is True


def set_share_log(home: Home, share: bool, *, now: datetime) -> None:
    """Store the user's choice."""
    write_state(home.consent, {"share_log": share, "changed_at": now.isoformat(timespec="seconds")})

"""The part of rollouts for the agent."""

from collections.abc import Iterator
from typing import Final

from permille_agent.link.extension import AgentExtension, Line
from permille_agent.state.home import Home
from permille_rollouts.agent import participation
from permille_rollouts.agent.participation import read_standing


def packages(home: Home) -> Iterator[str]:
    """Yield the package from before the rollout, to which the device may return."""
    part = read_standing(home).part
    if part is not None and part.before is not None:
        yield part.before.manifest_digest


def status(home: Home) -> Line | None:
    """Return the line about this device's part in a rollout."""
    part = read_standing(home).part
    if part is None:
        return None
    ended = "waits for training" if part.installed else f"{part.attempts} attempts failed"
    return Line(
        words=f"version {part.version} in rollout {part.rollout}: {part.code or ended}",
        document={
            "id": part.rollout,
            "version": part.version,
            "installed": part.installed,
            "code": part.code,
            "attempts": part.attempts,
        },
    )


EXTENSION: Final = AgentExtension(
    name="rollout", title="rollout", status=status, versions=participation, packages=packages
)

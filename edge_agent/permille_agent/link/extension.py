"""The part of an extension for the agent: a choice of versions, packages to keep, and lines of the status."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from permille.errors import PermilleError
from permille.extensions import extensions
from permille_agent.link.api import DeviceApi
from permille_agent.link.enrolment import Enrolment
from permille_agent.link.trust import TrustedReleases
from permille_agent.state.home import Home


class Chosen(Protocol):
    """A version that a pull installs instead of the version of the alias."""

    @property
    def version(self) -> int: ...


class Versions(Protocol):
    """Choice of the version to install. A module can implement this with its functions."""

    def take_part(
        self, home: Home, api: DeviceApi, trusted: TrustedReleases, enrolment: Enrolment, *, now_s: float
    ) -> Chosen | None:
        """Return the version that this pull installs, or None to follow the alias."""

    def note_installed(self, home: Home, api: DeviceApi) -> None:
        """Record that the chosen version is installed."""

    def note_failure(self, home: Home, error: PermilleError, *, now_s: float, is_crash: bool = False) -> None:
        """Record that the installation of the chosen version, or a training on it, has failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line of `permille-agent status`: its words, and its value in the output of `--json`."""

    words: str
    document: dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentExtension:
    """Parts of an extension for the agent. An entry point in `permille.agent` names one.

    Attributes:
        name: the name of the line in the status.
        status: reads this line from the home folder, or returns None if there is nothing to tell.
        versions: the choice of versions, or None if the extension chooses none.
        packages: reads the digests of the packages that must stay on the disk.
    """

    name: str
    status: Callable[[Home], Line | None]
    versions: Versions | None = None
    packages: Callable[[Home], Iterable[str]] = lambda _home: ()


def agent_extensions() -> tuple[AgentExtension, ...]:
    """Return the parts of the installed extensions for the agent."""
    return extensions("agent", AgentExtension)


def version_choices() -> list[Versions]:
    """Return the choices of versions of the installed extensions."""
    return [extension.versions for extension in agent_extensions() if extension.versions is not None]

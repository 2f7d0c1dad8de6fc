"""The part of an extension for the agent: choices of versions, trainings, choices of the user, status."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from permille.errors import PermilleError
from permille.extensions import extensions
from permille_agent.link.api import BlobSource, DeviceApi
from permille_agent.link.enrolment import Enrolment
from permille_agent.link.trust import TrustedReleases
from permille_agent.state.home import Home
from permille_agent.training.options import RunContext


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
class Assignment:
    """A training that the service has asked for, and to which the user has agreed.

    Attributes:
        name: its name in the log.
        order: the text by which the process that trains finds it.
        is_wanted: returns False when the training should end, for example because the user withdrew.
        fail: notes an error that a repetition would meet again.
    """

    name: str
    order: str
    is_wanted: Callable[[], bool]
    fail: Callable[[PermilleError], None]


class Assignments(Protocol):
    """Trainings that the service asks for. A module can implement this with its functions."""

    def exchange(self, home: Home, api: DeviceApi, *, now: datetime, has_text: bool) -> None:
        """Send results, and fetch news. A training may run meanwhile, so the writers' lock is not held."""

    def waiting(self, home: Home, *, now: datetime) -> Assignment | None:
        """Return the next training, or None."""

    def train(self, home: Home, order: str, data_paths: Sequence[Path], context: RunContext) -> bool:
        """Train, in a process of its own. Return False if this was stopped and can be resumed.

        The caller holds the writers' lock.
        """


class Choices(Protocol):
    """Choices of the user to share something. A module can implement this with its functions."""

    def withdraw(self, home: Home) -> Mapping[Path, bool]:
        """Withdraw all choices. Return their files, and whether the service must still be told.

        `forget` erases the other files.
        """

    def tell_service(self, home: Home) -> bool:
        """Tell the service what was withdrawn. Return False if the daemon must do it later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line of `permille-agent status`.

    Attributes:
        words: the line, or an empty string for no line.
        document: its value in the output of `--json`.
        damaged: the errors of files that cannot be read.
    """

    words: str
    document: object
    damaged: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentExtension:
    """Parts of an extension for the agent. An entry point in `permille.agent` names one.

    Attributes:
        name: the key of the line in the output of `status --json`.
        title: the title of this line.
        status: reads this line from the home folder, or returns None if there is nothing to tell.
        versions: the choice of versions, or None if the extension chooses none.
        packages: reads the digests of the packages that must stay on the disk.
        assignments: trainings that the service asks for, or None.
        choices: choices of the user that `forget` withdraws, or None.
        blobs: opens the source of packages' files that the user has chosen, or returns None for the service.
        sent: describes what has left the device, for the page of a run.
        embedded: what `permille_agent.embed` offers to other programs, by its name there.
    """

    name: str
    title: str
    status: Callable[[Home], Line | None]
    versions: Versions | None = None
    packages: Callable[[Home], Iterable[str]] = lambda _home: ()
    assignments: Assignments | None = None
    choices: Choices | None = None
    blobs: Callable[[Home], AbstractContextManager[BlobSource] | None] = lambda _home: None
    sent: Callable[[Home], str] = lambda _home: ""
    embedded: Mapping[str, Any] = field(default_factory=dict)


def agent_extensions() -> tuple[AgentExtension, ...]:
    """Return the parts of the installed extensions for the agent."""
    return extensions("agent", AgentExtension)


def version_choices() -> list[Versions]:
    """Return the choices of versions of the installed extensions."""
    return [extension.versions for extension in agent_extensions() if extension.versions is not None]


def assignments() -> dict[str, Assignments]:
    """Return what assigns trainings, by the names of the extensions."""
    return {one.name: one.assignments for one in agent_extensions() if one.assignments is not None}


def choices() -> list[Choices]:
    """Return the choices of the user in the installed extensions."""
    return [extension.choices for extension in agent_extensions() if extension.choices is not None]


def blob_source(home: Home, api: DeviceApi) -> AbstractContextManager[BlobSource]:
    """Open the source of packages' files: what an extension names, else the service."""
    found = (extension.blobs(home) for extension in agent_extensions())
    return next(filter(None, found), nullcontext(api))

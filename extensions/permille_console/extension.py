"""The part of an extension for the console: pages, links to them, and actions."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import APIRouter
from fastapi.routing import APIRoute

from permille.extensions import extensions

if TYPE_CHECKING:
    from permille_console.actions import Action


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleExtension:
    """Pages that an extension adds. An entry point in `permille.console` names one.

    Attributes:
        router: the routes of the pages. Its prefix is `/ui`, and its class of routes is `PageRoute`.
        templates: the folder with the templates of the pages.
        views: the pages to list in the navigation, each with its path below `/ui` and its name.
        actions: the actions that a page can start, by the name in their path.
    """

    router: APIRouter
    templates: Path
    views: tuple[tuple[str, str], ...] = ()
    actions: Mapping[str, "Action"] = field(default_factory=dict)

    @property
    def shown(self) -> set[str]:
        """The collections of the API whose objects have a page here, such as `rollouts`."""
        return {route.path.split("/")[2] for route in self.router.routes if isinstance(route, APIRoute)}


def console_extensions() -> tuple[ConsoleExtension, ...]:
    """Return the parts of the installed extensions for the console."""
    return extensions("console", ConsoleExtension)

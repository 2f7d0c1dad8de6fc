"""The registry's part for the agent.

The agent loads this module at each start, so the source of blobs is imported when it is needed.
"""

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final

from permille_agent.link.extension import AgentExtension, Line
from permille_agent.state.home import Home

if TYPE_CHECKING:
    from permille_agent.link.api import BlobSource


def status(home: Home) -> Line | None:
    """Return the line about the chosen registry."""
    from permille_registry.agent.source import read_choice

    chosen = read_choice(home)
    return None if chosen is None else Line(words=chosen.address, document={"address": chosen.address})


def _blobs(home: Home) -> "AbstractContextManager[BlobSource] | None":
    from permille_registry.agent.source import blobs

    return blobs(home)


EXTENSION: Final = AgentExtension(name="registry", title="files from", status=status, blobs=_blobs)

"""The settings of one agent process: made once in `main`, validated, passed down.

What belongs to the user (policy, consent, data references) or to the enrolment is in the home folder, not
here.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from permille.errors import InputError

HOME_VARIABLE = "PERMILLE_AGENT_HOME"
LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """Where the agent keeps its files and how much it says.

    Attributes:
        home: folder of everything the agent keeps; made on first use, readable by its owner only.
        log_level: one of `LOG_LEVELS`; the log goes to standard error.
    """

    home: Path
    log_level: str = "info"


def read_settings(
    home: Path | None = None, log_level: str = "info", environment: Mapping[str, str] = os.environ
) -> AgentSettings:
    """Settings from the command line, else the environment, else the platform's data folder.

    Raises:
        InputError: the home is not an absolute path or the log level is not known.
    """
    if log_level not in LOG_LEVELS:
        raise InputError(f"expected a log level of {', '.join(LOG_LEVELS)}, got {log_level!r}")
    if home is None and (named := environment.get(HOME_VARIABLE)):
        home = Path(named)
    if home is None:
        home = platformdirs.user_data_path("permille-agent", appauthor=False)
    return AgentSettings(home=home.expanduser().absolute(), log_level=log_level)

"""The pages of rollouts in the console."""

from pathlib import Path
from typing import Final

from permille_console.extension import ConsoleExtension
from permille_rollouts.console import pages

EXTENSION: Final = ConsoleExtension(
    router=pages.router,
    templates=Path(__file__).with_name("templates"),
    views=(("rollouts", "Rollouts"),),
    actions={"rollout": pages.ACTION},
)

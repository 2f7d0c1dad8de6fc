"""The pages of rounds in the console."""

from pathlib import Path
from typing import Final

from permille_console.extension import ConsoleExtension
from permille_rounds.console import pages

EXTENSION: Final = ConsoleExtension(
    router=pages.router,
    templates=Path(__file__).with_name("templates"),
    views=(("federations", "Federations"),),
)

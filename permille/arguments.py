"""Parsers of command-line arguments that the programs share."""

from pathlib import Path

import typer


def named_path(name: str) -> Path:
    """Return the path of an argument. An empty one, as of an unset variable, would be the current folder."""
    if not name:
        raise typer.BadParameter("The name is empty. Name a file or folder.")
    return Path(name)

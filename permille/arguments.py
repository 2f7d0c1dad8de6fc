"""Parsers of command-line arguments that the programs share."""

import os
from pathlib import Path

import typer

_MOST_BYTES = 255  # of the name of a file, on all usual file systems


def named_path(name: str) -> Path:
    """Return the path of an argument. An empty one, as of an unset variable, would be the current folder."""
    if not name:
        raise typer.BadParameter("The name is empty. Name a file or folder.")
    if any(len(os.fsencode(part)) > _MOST_BYTES for part in Path(name).parts):
        raise typer.BadParameter("The name is too long for a path. Give a path, not the text itself.")
    return Path(name)

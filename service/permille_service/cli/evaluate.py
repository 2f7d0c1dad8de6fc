"""`permille evaluate`: a sweep over methods and tasks, in a process of its own, since it needs torch."""

import importlib.util
import signal
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from permille_service.cli.exits import CommandError, Exit

_NEEDED = ("torch", "transformers", "scipy", "peft")


def evaluate(
    sweep: Annotated[
        Path, typer.Argument(help="TOML file; docs/guide/evaluate.md.", exists=True, dir_okay=False)
    ],
    results: Annotated[
        Path | None, typer.Option(help="JSON lines, one a finished cell. Default: beside the sweep.")
    ] = None,
    table: Annotated[Path | None, typer.Option(help="Where to write the tables. Default: printed.")] = None,
) -> None:
    """Compare methods on tasks, here and now. Stop it when you like: the same command goes on.

    Examples:

      permille evaluate sweep.toml --table table.md
    """
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        raise CommandError(
            f'expected {", ".join(missing)} to be installed: pip install "permille[evaluate]"', Exit.USAGE
        )
    options = {"--results": results, "--table": table}
    chosen = [text for name, path in options.items() if path is not None for text in (name, str(path))]
    status = _run([sys.executable, "-m", "permille_lab.evaluate", str(sweep), *chosen])
    if status:
        if status in (-signal.SIGINT, -signal.SIGTERM):  # before it could say so itself
            status = 130
        raise typer.Exit(status if status > 0 else int(Exit.FAILED))


def _run(command: list[str]) -> int:
    """Exit status of a process that is told to end when this one is; it keeps what is done, and says so."""
    process = subprocess.Popen(command)
    former = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:  # from a terminal the process had it too, and takes it once
                process.terminate()
    finally:
        signal.signal(signal.SIGTERM, former)

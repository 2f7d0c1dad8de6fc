"""Output and exit codes of all commands: one JSON document or a readable text."""

import json
from collections.abc import Callable, Mapping
from enum import IntEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from permille.choices import EngineName
from permille.errors import InputError, OperatorError, PackageError, PermilleError, RetryableError
from permille.plain_console import PlainConsole
from permille.plain_text import echo
from permille_agent.state.home import Home, open_home

# Panels of commands and options in `--help`.
START, PERSONALISE, USE = "Start here", "Personalise", "Use the model"
DEVICE, SHARING = "This device", "Rounds, reports and privacy"
COMPUTING, SAMPLING = "How to compute", "How to sample"

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
EngineOption = Annotated[
    EngineName,
    typer.Option(
        "--engine",
        envvar="PERMILLE_AGENT_ENGINE",
        help="What computes. Auto takes light, which needs no torch, if it knows the model.",
        rich_help_panel=COMPUTING,
    ),
]

TEXT_FILES = ".txt, .md, .jsonl, .html, .eml, .mbox, .pdf, .docx, ChatGPT's conversations.json"
UNWRAPPED = 4096  # columns, where there is no terminal


class ExitCode(IntEnum):
    """Exit codes of `permille-agent`; scripts may rely on them."""

    OK = 0
    BUG = 1
    USAGE = 2
    INPUT_REFUSED = 3
    PACKAGE_REFUSED = 4
    TRY_LATER = 5
    OPERATOR = 6
    KEPT_BASE = 7
    INTERRUPTED = 130


EXIT_CODE_HELP = (
    "Exit codes: 0 done; 1 a bug; 2 wrong usage; 3 input refused; 4 package refused; 5 try later; "
    "6 a person must act; 7 trained, but the model in use is kept; 130 interrupted, or you answered no."
)


def exit_code_of(error: PermilleError) -> ExitCode:
    """Choose the exit code that tells a script what to do about `error`."""
    match error:
        case PackageError():
            return ExitCode.PACKAGE_REFUSED
        case RetryableError():
            return ExitCode.TRY_LATER
        case OperatorError():
            return ExitCode.OPERATOR
        case InputError():
            return ExitCode.INPUT_REFUSED
    return ExitCode.BUG


def home_of(context: typer.Context) -> Home:
    """Open the home folder of this command; it is made on first use."""
    root: Path = context.obj
    return open_home(root)


def output_console() -> Console:
    """Open where text goes. What is no terminal has no edge: digests and paths must not be cut in two."""
    console = PlainConsole()
    return console if console.is_terminal else PlainConsole(width=UNWRAPPED)


def show(
    document: Mapping[str, object],
    *,
    as_json: bool,
    render: Callable[[Console], None] | None = None,
    then: str = "",
) -> None:
    """Print `document`: as JSON, or by `render`, or as a table of two columns; `then` is what usually comes
    next."""
    if as_json:
        echo(json.dumps(document, indent=2, sort_keys=True, allow_nan=False, default=str))
        return
    console = output_console()
    if render is not None:
        render(console)
        return
    table = Table(show_header=False, box=None)
    table.add_column()
    table.add_column(overflow="fold")
    for key, value in document.items():
        told = decimal(value) if isinstance(value, int) and key.endswith("bytes") else _words(value)
        table.add_row(key.removesuffix("_bytes").replace("_", " "), Text(told))
    console.print(table)
    if then:
        console.print(f"next: {then}", highlight=False)


def _words(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):  # of a list: a block of lines, and an empty one
        lines = [f"{key.replace('_', ' ')}: {_words(part)}" for key, part in value.items()]
        return "\n".join([*lines, ""])
    if isinstance(value, list | tuple):
        return "\n".join(map(_words, value)) or "none"
    return "-" if value is None else str(value)


def show_error(error: PermilleError, *, as_json: bool) -> None:
    """Print `error` on standard error, as JSON where the command was asked for JSON."""
    code = exit_code_of(error)
    if as_json:
        document = {"error": {"kind": code.name.lower(), "message": str(error), "exit_code": int(code)}}
        echo(json.dumps(document, indent=2), err=True)
    else:
        kind = "you must act" if code is ExitCode.OPERATOR else code.name.lower().replace("_", " ")
        PlainConsole(stderr=True).print(f"[red]error[/red] ({kind}):", end=" ")
        echo(str(error), err=True)
        if isinstance(error, PackageError) and _is_damage(error):
            echo("`permille-agent verify --repair` finds and mends what the disk damaged", err=True)


def _is_damage(error: PackageError) -> bool:
    from permille_agent.state.models import DAMAGED  # here, so that `--help` does not wait for it

    return error.code in DAMAGED

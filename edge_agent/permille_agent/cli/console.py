"""Output, options and exit codes that all commands share."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from permille.choices import EngineName
from permille.errors import InputError, OperatorError, PackageError, PermilleError, RetryableError
from permille.exits import ExitCode
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
        help="Engine that computes. Auto uses light, which needs no torch, if light supports the model.",
        rich_help_panel=COMPUTING,
    ),
]

TEXT_FILES = "notes, mail, PDF, Word, .jsonl, exports of ChatGPT, WhatsApp and Telegram"
UNWRAPPED = 4096  # columns per line of output that does not go to a terminal


EXIT_CODE_HELP = (
    "Exit codes: 0 done; 1 a bug; 2 wrong usage; 3 input refused; 4 package refused; 5 try later; "
    "6 a person must act; 7 trained, but the model in use is kept; 130 interrupted, or you answered no."
)


def exit_code_of(error: PermilleError) -> ExitCode:
    """Return the exit code of an error.

    Example:
        >>> exit_code_of(RetryableError("The service does not answer")).name
        'TRY_LATER'
    """
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
    """Open the home folder of a command.

    The default folder, and that of the environment, is created on first use. If `--home` names a new folder,
    only `enroll` creates it.

    Raises:
        OperatorError: there is no such folder. Its name may be misspelt, or its disk is not mounted.
    """
    root: Path = context.obj
    source = context.find_root().get_parameter_source("home")
    is_typed = source is not None and source.name == "COMMANDLINE"
    if is_typed and context.info_name != "enroll" and not root.exists():
        raise OperatorError(f"There is no folder {root}. Check --home, or enrol there first.")
    return open_home(root)


def output_console() -> Console:
    """Open the console for text on standard output."""
    # Without a terminal, lines are not wrapped, so that programs find digests and paths in one piece.
    console = PlainConsole()
    return console if console.is_terminal else PlainConsole(width=UNWRAPPED)


def agrees(question: str, *, declined: str) -> bool:
    """Ask a question on standard error. Ctrl-C and the end of the input mean no.

    Args:
        question: the question, for a command that has the option --yes.
        declined: what to say after a no, such as "Nothing was erased."
    """
    try:
        agreed = typer.confirm(question, err=True)
    except typer.Abort as exc:
        agreed = False
        # The context of the exception tells the end of the input from Ctrl-C.
        if isinstance(exc.__context__, EOFError):
            declined += " There was no answer. Use --yes to run this without a question."
        declined = f"\n{declined}"  # the line of the question has no end yet
    if not agreed:
        echo(declined, err=True)
    return agreed


def show(
    document: Mapping[str, object],
    *,
    as_json: bool,
    render: Callable[[Console], None] | None = None,
    then: str = "",
) -> None:
    """Print a document as JSON, by `render`, or as a table of two columns.

    For example, `show({"deleted": 2}, as_json=False)` prints "deleted 2".

    Args:
        document: the names and values to print.
        as_json: whether to print JSON.
        render: function that prints the readable form.
        then: command that the user probably needs next. The table of two columns ends with it.
    """
    if as_json:
        # Python would write NaN, which is not JSON.
        echo(json.dumps(document, indent=2, sort_keys=True, allow_nan=False, default=str))
        return
    console = output_console()
    if render is not None:
        render(console)
        return
    table = Table(show_header=False, box=None)
    table.add_column()
    # Fold long digests and paths. By default rich cuts them.
    table.add_column(overflow="fold")
    for key, value in document.items():
        words = decimal(value) if isinstance(value, int) and key.endswith("bytes") else _words(value)
        # Pass a `Text`, because rich would read brackets in a string as markup.
        table.add_row(key.removesuffix("_bytes").replace("_", " "), Text(words))
    console.print(table)
    if then:
        console.print(f"next: {then}", highlight=False)


def sentences(*lines: str) -> Callable[[Console], None]:
    """Return a function for `show` that prints these lines, without empty ones."""
    return lambda console: console.print(*filter(None, lines), sep="\n", markup=False, highlight=False)


def _words(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        # Mappings are items of lists. The empty line separates an item from the next one.
        lines = [f"{key.replace('_', ' ')}: {_words(part)}" for key, part in value.items()]
        return "\n".join([*lines, ""])
    if isinstance(value, list | tuple):
        return "\n".join(map(_words, value)) or "none"
    return "-" if value is None else str(value)


def show_error(error: PermilleError, *, as_json: bool) -> None:
    """Print an error on standard error, as text or JSON."""
    code = exit_code_of(error)
    if as_json:
        document = {"error": {"kind": code.name.lower(), "message": str(error), "exit_code": int(code)}}
        # Standard output stays empty, so a script never parses an error as a result.
        echo(json.dumps(document, indent=2), err=True)
    else:
        kind = "you must act" if code is ExitCode.OPERATOR else code.name.lower().replace("_", " ")
        PlainConsole(stderr=True).print(f"[red]error[/red] ({kind}):", end=" ")
        # Print the message by `echo`, because rich would read brackets in it as markup.
        echo(str(error), err=True)
        if isinstance(error, PackageError):
            from permille_agent.state.models import DAMAGED  # here, so that `--help` does not wait for it

            if error.code in DAMAGED:
                echo("Run `permille-agent verify --repair` to repair damage on the disk.", err=True)

"""`permille-agent`: the command line of the device. Importing it loads no torch and no network library."""

import inspect
import logging
import re
import sys
from enum import StrEnum
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

import typer

from permille.arguments import named_path
from permille.command_names import AGENT_ENTRY_POINTS, ProgramGroup
from permille.errors import PermilleError
from permille.exits import ExitCode
from permille.plain_text import echo, log_to_stderr
from permille.version import __version__
from permille_agent.cli import daemon, device, local, service, train
from permille_agent.cli.console import EXIT_CODE_HELP, SHARING, exit_code_of, show_error
from permille_agent.state.home import HOME_VARIABLE, default_root, telling_disk


class LogLevel(StrEnum):
    """Levels of the log, which goes to standard error."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


app = typer.Typer(
    name="permille-agent",
    cls=ProgramGroup,
    no_args_is_help=True,
    rich_markup_mode="rich",
    epilog=EXIT_CODE_HELP,
    pretty_exceptions_enable=False,
    help="Personalise a language model on this device. Your text never leaves it.",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        echo(f"permille-agent {__version__}")
        raise typer.Exit


@app.callback()
def _settings(
    context: typer.Context,
    home: Annotated[
        Path | None,
        typer.Option(parser=named_path, envvar=HOME_VARIABLE, help="Folder for all files of the agent."),
    ] = None,
    log_level: Annotated[LogLevel, typer.Option(help="Least severe messages to log.")] = LogLevel.INFO,
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    # --log-level is for permille's own messages. Libraries log only warnings and errors.
    log_to_stderr(logging.WARNING, "%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("permille").setLevel(log_level.upper())
    # Make the path absolute, because a service file and child processes name this folder.
    context.obj = (home or default_root()).expanduser().absolute()


# `--help` lists panels in the order in which their first command is registered.
for register in (
    service.register,
    train.register,
    local.register,
    daemon.register,
    device.register,
    service.register_upkeep,
):
    register(app)
# An entry point is a function with options for typer, or a group of commands. It is imported at each start,
# so it must import heavy modules only when it runs.
for _entry in sorted(entry_points(group=AGENT_ENTRY_POINTS), key=lambda entry: entry.name):
    if isinstance(_found := _entry.load(), typer.Typer):
        app.add_typer(_found, name=_entry.name, rich_help_panel=SHARING)
    else:
        app.command(_entry.name, rich_help_panel=SHARING)(_found)


def _unwrap(group: typer.Typer) -> None:
    """Join the lines of each help text. Typer would keep the line breaks of the docstring."""
    for command in group.registered_commands:
        text = inspect.getdoc(command.callback) or ""
        command.help = re.sub(r"(?<=\S)\n(?=\S)", " ", text)
    for inner in group.registered_groups:
        if inner.typer_instance is not None:
            _unwrap(inner.typer_instance)


_unwrap(app)


def main(arguments: list[str] | None = None) -> int:
    """Run a command, and return its exit code. For example, `main(["status", "--json"])`."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        # This converts an OSError that no command has converted, such as that of a full disk.
        with telling_disk():
            app(args=arguments, prog_name="permille-agent")
    except PermilleError as exc:
        # Look for --json in the raw arguments, because the parsed options of the command are gone here.
        show_error(exc, as_json="--json" in arguments)
        return int(exit_code_of(exc))
    except SystemExit as end:
        # typer ends every command by SystemExit. If it has no code, the command was a success.
        return end.code if isinstance(end.code, int) else int(ExitCode.OK)
    return int(ExitCode.OK)

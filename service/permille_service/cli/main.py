"""`permille`: the operator's command line. `permille up` starts the service. Most other commands call it."""

import functools
import logging
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from permille.command_names import ENTRY_POINTS, ProgramGroup
from permille.errors import InputError
from permille.exits import CommandError, Exit
from permille.extras import install_line
from permille.plain_text import echo, log_to_stderr
from permille.version import __version__
from permille_service.cli import fleet, inputs
from permille_service.cli.commands import ADMINISTRATION, DEVICES, INPUTS, PACKAGES, START, AsJson
from permille_service.cli.output import make_output, print_json
from permille_service.cli.session import GlobalOptions
from permille_service.cli.tables import figures_of, table_of
from permille_service.cli.trust import trust
from permille_service.cli.work import FIGURES, add_work, jobs

EXIT_HELP = (
    "Exit codes: 0 done; 1 the job or the service failed; 2 wrong usage; 3 input refused; 4 not found; "
    "5 try again later; 6 no access; 8 trained, but not written; 130 interrupted."
)

app = typer.Typer(
    name="permille",
    cls=ProgramGroup,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    epilog=EXIT_HELP,
    help="Turn a language model into packages, and serve them to devices that personalise them.",
)


def plugin(entry: EntryPoint) -> Callable[..., Any]:
    """Load a command of another package, such as `personalise`.

    If the command needs a module that is not installed, it fails with a message that says what to install.
    """
    run: Callable[..., Any] = entry.load()

    @functools.wraps(run)
    def checked(*arguments: object, **options: object) -> object:
        try:
            return run(*arguments, **options)
        except ModuleNotFoundError as exc:
            extra = entry.module.partition(".")[0].removeprefix("permille_")
            missing = f"`permille {entry.name}` needs {exc.name}. Run {install_line(extra)}."
            raise CommandError(missing, Exit.USAGE) from exc

    return checked


def _show_version(wanted: bool) -> None:
    if wanted:
        echo(f"permille {__version__}")
        raise typer.Exit


@app.callback()
def _place(
    context: typer.Context,
    url: Annotated[
        str | None,
        typer.Option(envvar="PERMILLE_URL", help="URL of the service. Default: read from the data folder."),
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(envvar="PERMILLE_TOKEN", help="Operator token. Default: read from the data folder."),
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(
            envvar="PERMILLE_DATA_DIR", help="Data folder of the service. Default: ~/.local/share/permille."
        ),
    ] = None,
    ca_file: Annotated[
        Path | None,
        typer.Option(
            envvar="PERMILLE_CA_FILE", help="PEM file of the authority that signed the service's certificate."
        ),
    ] = None,
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    context.obj = GlobalOptions(url=url, token=token, data_dir=data_dir, ca_file=ca_file)


@app.command("up", rich_help_panel=START)
def start(
    context: typer.Context,
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder of the database, the blobs, the keys and the token.")
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(
            envvar="PERMILLE_HOST",
            help="Address to listen on. Any address but loopback needs TLS. Default: 127.0.0.1.",
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            envvar="PERMILLE_PORT",
            min=0,
            max=65_535,
            help="Port to listen on. With 0, the system chooses a free port. Default: 8321.",
        ),
    ] = None,
    port_file: Annotated[
        Path | None, typer.Option(help="File to which the port is written when the service answers.")
    ] = None,
    model_root: Annotated[
        Path | None, typer.Option(resolve_path=True, help="Folder below which models can be registered.")
    ] = None,
    corpus_root: Annotated[
        Path | None, typer.Option(resolve_path=True, help="Folder below which texts can be registered.")
    ] = None,
    tls_certificate: Annotated[
        Path | None,
        typer.Option(resolve_path=True, help="PEM file of the certificate chain.", rich_help_panel="TLS"),
    ] = None,
    tls_key: Annotated[
        Path | None,
        typer.Option(resolve_path=True, help="PEM file of the private key.", rich_help_panel="TLS"),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(help="Host name that requests may use. Repeatable.", rich_help_panel="TLS"),
    ] = None,
    worker: Annotated[
        bool, typer.Option("--worker/--no-worker", help="Whether to start a worker as well.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Start the service (API and worker). It runs until Ctrl-C or SIGTERM.

    Examples:

      permille up

      permille up --data-dir ./data --model-root ./models --corpus-root ./texts --port 0 --port-file port.txt
    """
    from permille.store.settings import explain
    from permille_service.cli.up import run
    from permille_service.settings import load

    folder = data_dir or context.ensure_object(GlobalOptions).folder
    for flag, root in (("--model-root", model_root), ("--corpus-root", corpus_root)):
        if root is not None and not root.is_dir():
            raise CommandError(f"{flag}: there is no folder {root}. Make it first.", Exit.USAGE)
    given = {
        "host": host,
        "port": port,
        "model_root": model_root,
        "corpus_root": corpus_root,
        "tls_certificate": tls_certificate,
        "tls_key": tls_key,
        "allowed_hosts": tuple(allow_host) if allow_host else None,
    }
    chosen = {name: value for name, value in given.items() if value is not None}
    try:
        settings = load(data_dir=folder.absolute(), **chosen)
    except ValueError as exc:
        raise CommandError(explain(exc), Exit.USAGE) from exc
    new = {root for root in (settings.model_root, settings.corpus_root) if not root.exists()}
    output = make_output(as_json=as_json)
    log_to_stderr(logging.WARNING, "%(asctime)s %(name)s %(levelname)s %(message)s")

    def announce(url: str) -> None:
        if as_json:
            print_json({"url": url, "token_file": str(settings.token_path), "docs": f"{url}/docs"})
            sys.stdout.flush()
        output.say(f"permille {__version__} at {url}")
        output.say(f"page     {url}/")
        output.say(f"docs     {url}/docs")
        output.say(f"token    {settings.token_path}")
        for what, root, command in (
            ("models ", settings.model_root, "models add NAME --gguf FILE"),
            ("texts  ", settings.corpus_root, "corpora add NAME --file FILE"),
        ):  # a mistyped root is created, too, so tell the user which roots are new
            output.say(f"{what}  below {root}{' (a new folder)' if root in new else ''}: permille {command}")
        output.say("Press Ctrl-C to stop it.")

    run(settings, with_worker=worker, port_file=port_file, announce=announce)


app.add_typer(inputs.models, name="models", rich_help_panel=INPUTS)
app.add_typer(inputs.corpora, name="corpora", rich_help_panel=INPUTS)
app.add_typer(jobs, name="jobs", rich_help_panel=INPUTS)
add_work(app)
app.add_typer(fleet.releases, name="releases", rich_help_panel=DEVICES)
app.add_typer(trust, name="trust", rich_help_panel=DEVICES)
app.add_typer(fleet.invitations, name="invitations", rich_help_panel=DEVICES)
app.add_typer(fleet.devices, name="devices", rich_help_panel=DEVICES)
app.add_typer(fleet.runs, name="runs", rich_help_panel=DEVICES)
fleet.add_fleet(app)
# An entry point is a function with options for typer, or a group of commands. It is imported at each start of
# `permille`, so it must import heavy modules only when it runs. `PANEL` of a module is its panel in `--help`.
_added = sorted(entry_points(group=ENTRY_POINTS), key=lambda entry: entry.name)
_groups = {entry.name: found for entry in _added if isinstance(found := entry.load(), typer.Typer)}
for _name, _group in _groups.items():
    app.add_typer(_group, name=_name, rich_help_panel=DEVICES)
app.add_typer(fleet.tokens, name="tokens", rich_help_panel=ADMINISTRATION)
app.add_typer(fleet.tenants, name="tenants", rich_help_panel=ADMINISTRATION)
app.add_typer(fleet.audit, name="audit", rich_help_panel=ADMINISTRATION)
app.add_typer(fleet.retention, name="retention", rich_help_panel=ADMINISTRATION)
app.add_typer(fleet.blobs, name="blobs", rich_help_panel=ADMINISTRATION)
for _entry in _added:
    if _entry.name not in _groups:
        _panel = getattr(import_module(_entry.module), "PANEL", PACKAGES)
        app.command(_entry.name, rich_help_panel=_panel)(plugin(_entry))


def main(arguments: list[str] | None = None) -> int:
    """Run one command, and return the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        app(args=arguments, prog_name="permille")
    except InputError as exc:  # from commands that work on files without a service
        error = CommandError(str(exc), Exit.REFUSED)
    except OSError as exc:  # from a file or folder that the user named, or from a full disk
        error = CommandError(f"The system refused a file: {exc}", Exit.FAILED)
    except CommandError as exc:
        error = exc
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(Exit.DONE)
    else:
        return int(Exit.DONE)
    _show_error(error, as_json="--json" in arguments)
    return int(error.code)


def _show_error(error: CommandError, *, as_json: bool) -> None:
    if as_json:
        print_json({"error": str(error), "exit_code": int(error.code), "problem": error.problem})
        return
    console = make_output(as_json=False).errors
    console.print(f"[red]permille:[/red] {escape(str(error))}", highlight=False, soft_wrap=True)
    figures = (error.problem or {}).get("figures")
    if isinstance(figures, list):
        console.print(table_of(figures_of(figures), FIGURES))


if __name__ == "__main__":
    sys.exit(main())

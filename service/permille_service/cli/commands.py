"""Commands as functions, and the commands that all collections share (`list`, `show`, `create`).

The function of a command gets a session and the options. Its result is printed. A user names a record by its
name, by its id, or by the first characters of its id, if no other id begins with them.
"""

import inspect
import textwrap
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final, Literal

import typer

from permille_service.cli.references import singular
from permille_service.cli.session import Session, connect
from permille_service.forms import Form, RequestOption

# The panels by which `--help` groups commands.
START, INPUTS, PACKAGES = "Start here", "Models, texts and jobs", "Packages"
DEVICES, ADMINISTRATION = "Releases and devices", "Access and storage"

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")]
NoWait = Annotated[bool, typer.Option("--no-wait", help="Do not wait for the job.")]
Key = Annotated[
    str | None,
    typer.Option(
        "--idempotency-key",
        help="Key of your choice. For a day, a repetition of the command with the same key creates nothing "
        "new.",
    ),
]
Rows = Annotated[int, typer.Option("--limit", min=1, help="Maximum number of rows.")]

_WIDEST_CHOICES: Final = 12
_Run = Callable[..., Any]


def command(
    group: typer.Typer,
    name: str,
    text: str | None = None,
    *,
    form: Form | None = None,
    panel: str | None = None,
) -> Callable[[_Run], _Run]:
    """Return a decorator that makes a function a command of a group.

    The command opens a session, calls the function with it, and shows the result.

    Args:
        text: the help text. By default, it is the function's docstring.
        form: options to add to the command. The function gets the request, made from these options, as its
            argument `body`.
        panel: the panel in which the group's `--help` lists the command.
    """

    def register(run: _Run) -> _Run:
        def called(context: typer.Context, as_json: AsJson, **given: Any) -> None:
            with connect(context, as_json=as_json) as session:
                filled = {} if form is None else {"body": form.body(given, session.id_of)}
                answer = run(session, **filled, **given)
                if answer is not None:
                    session.output.show(answer)

        context, as_json, _ = inspect.signature(called).parameters.values()
        own = [
            one for one in inspect.signature(run).parameters.values() if one.name not in ("session", "body")
        ]
        options = [] if form is None else parameters_of(form)
        made = (context, *options, *own, as_json.replace(default=False))
        signature = inspect.Signature([one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in made])
        called.__signature__ = signature  # type: ignore[attr-defined]
        group.command(name, help=text or inspect.getdoc(run), rich_help_panel=panel)(called)
        return run

    return register


def parameters_of(form: Form) -> list[inspect.Parameter]:
    """Return the parameters that typer needs for a form. The value of an option that is not given is None."""
    return [_parameter(option, form.arguments) for option in form.options]


def add_list(group: typer.Typer, collection: str, columns: Sequence[str]) -> None:
    """Give a group the command `list`. `columns` are the dotted names of the fields that its table shows."""

    @command(group, "list", f"List {collection}, newest first.")
    def show_rows(session: Session, limit: Rows = 100) -> None:
        session.output.show(session.client.pages(f"/v1/{collection}", limit=limit), columns)


def add_show(group: typer.Typer, collection: str) -> None:
    """Give a group the command `show`, which shows one record."""

    @command(group, "show", f"Show one {singular(collection)}.")
    def show_row(session: Session, row: _row(collection)) -> Any:  # type: ignore[valid-type]
        return session.client.get(f"/v1/{collection}/{session.id_of(collection, row)}")


def add_create(group: typer.Typer, collection: str, form: Form, text: str) -> None:
    """Give a group the command `create`, which creates a record from the options of a form."""

    @command(group, "create", text, form=form)
    def create(session: Session, body: dict[str, Any]) -> Any:
        return session.client.post(f"/v1/{collection}", body)


def add_action(group: typer.Typer, collection: str, action: str, text: str) -> None:
    """Give a group a command that posts to `/v1/<collection>/<id>/<action>`."""

    @command(group, action, text)
    def act(session: Session, row: _row(collection)) -> Any:  # type: ignore[valid-type]
        row_id = session.id_of(collection, row)
        return session.client.post(f"/v1/{collection}/{row_id}/{action}") or {f"{action}d": row_id}


def add_deletion(group: typer.Typer, collection: str, name: str, text: str, *, part: str = "") -> None:
    """Give a group a command that deletes a record, or the part of it at the path `part`."""

    @command(group, name, text)
    def delete(session: Session, row: _row(collection)) -> Any:  # type: ignore[valid-type]
        row_id = session.id_of(collection, row)
        session.client.delete(f"/v1/{collection}/{row_id}{part}")
        return {f"{name.partition('-')[0]}d": row_id}


def _row(collection: str) -> Any:
    return Annotated[
        str,
        typer.Argument(
            metavar=singular(collection).upper(), help="Name or id, or the first characters of the id."
        ),
    ]


def _parameter(option: RequestOption, arguments: tuple[str, ...]) -> inspect.Parameter:
    # The service applies the defaults. The help only shows them.
    told = "" if option.default is None or option.default is False else f" Default: {option.default}."
    text = f"{option.help[:1].upper()}{option.help[1:]}".strip().removesuffix(".") + f".{told}"
    chosen: Any = (
        Literal[option.choices] if option.choices and option.value_type is str else option.value_type
    )
    panel = f"{option.place[0].capitalize()} options" if option.place[1:] else None
    if option.many:
        chosen = list[chosen]
    marker: Any = typer.Option(option.flag, help=text, metavar=_folded(option), rich_help_panel=panel)
    if option.parameter in arguments:
        marker = typer.Argument(help=text)
    return inspect.Parameter(
        option.parameter,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if option.required else None,
        annotation=Annotated[chosen if option.required else chosen | None, marker],
    )


def _folded(option: RequestOption) -> str | None:
    """Fold the choices into short lines. Long lines would leave too little room for the option's name."""
    if not option.choices or option.value_type is not str:
        return None
    lines = textwrap.wrap(f"<{'| '.join(option.choices)}>", _WIDEST_CHOICES, break_on_hyphens=False)
    return "\n".join(lines).replace("| ", "|")

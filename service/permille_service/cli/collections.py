"""The commands that every collection of the API has alike: `list` and `show`."""

from collections.abc import Sequence
from typing import Annotated

import typer

from permille_service.cli.session import AsJson, Rows, connect


def add_list(group: typer.Typer, path: str, columns: Sequence[str], text: str) -> None:
    """Give a group the command `list`.

    Args:
        path: of the collection.
        columns: dotted names of the fields that a table has.
        text: what the command says of itself.
    """

    @group.command("list", help=text)
    def show_rows(context: typer.Context, limit: Rows = 100, as_json: AsJson = False) -> None:
        with connect(context, as_json=as_json) as session:
            session.output.show(session.client.pages(path, limit=limit), columns)


def add_show(group: typer.Typer, path: str, name: str, text: str) -> None:
    """Give a group the command `show`, for one row of the collection.

    Args:
        name: of the argument, as the help shows it.
    """

    @group.command("show", help=text)
    def show_row(
        context: typer.Context,
        row_id: Annotated[str, typer.Argument(metavar=name)],
        as_json: AsJson = False,
    ) -> None:
        with connect(context, as_json=as_json) as session:
            session.output.show(session.client.get(f"{path}/{row_id}"))

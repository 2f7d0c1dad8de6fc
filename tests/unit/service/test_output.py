"""What the command line prints is what the service said: brackets are no markup, lines are not cut."""

import io

import pytest
from rich.console import Console

from permille_service.cli.exits import CommandError, Exit
from permille_service.cli.main import _show_error
from permille_service.cli.output import fields_of, table_of

TEXT = "[a-z0-9]{1,63} [bold]not bold[/bold] [/]"


def printed(renderable: object) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_brackets_are_printed_in_rows_and_fields() -> None:
    assert TEXT in printed(table_of([{"name": TEXT}], ("name",)))
    assert TEXT in printed(fields_of({"name": TEXT}))


def test_an_error_is_one_line_with_its_brackets(capsys: pytest.CaptureFixture[str]) -> None:
    message = (
        f"expected {TEXT}, got something else that makes this line longer than any terminal is wide: 123"
    )
    _show_error(CommandError(message, Exit.REFUSED), as_json=False)
    assert capsys.readouterr().err == f"permille: {message}\n"

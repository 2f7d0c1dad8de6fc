"""Write the pages of the command lines in docs/reference: `make commands`.

    python -m scripts.commands

The pages are generated from the help texts, arguments and options of the commands. A test fails if a page is
not up to date.
"""

import inspect
import re
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, get_args

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from permille_agent.cli.main import app as agent
from permille_service.cli.main import app as operator

REFERENCE: Final = Path(__file__).resolve().parents[1] / "docs" / "reference"
_Command = TyperCommand | TyperGroup
_Parameter = TyperArgument | TyperOption
_OF_EVERY_PROGRAM: Final = ("help", "install_completion", "show_completion")
_EXAMPLES: Final = re.compile(r"(\[bold\])?Examples?:?(\[/bold\])?$")


def pages() -> dict[Path, str]:
    """Return each page and its text."""
    return {REFERENCE / f"{app.info.name}.md": _page(app) for app in (operator, agent)}


def _page(app: typer.Typer) -> str:
    root = typer.main.get_command(app)
    assert isinstance(root, _Command)
    name = str(root.name)
    head = [
        f"# {name}",
        "Written by `make commands` from the commands themselves. Every command has `--help`. "
        "Exit codes have [their own page](exit-codes.md).",
        *_text(root),
    ]
    return "\n\n".join([*head, *_options(root), *_commands(root, name)]) + "\n"


def _commands(group: _Command, name: str) -> Iterator[str]:
    """Yield the paragraphs of all commands of a group and of its subgroups."""
    for command in group.commands.values() if isinstance(group, TyperGroup) else ():
        assert isinstance(command, _Command)
        called = f"{name} {command.name}"
        yield f"## {called}"
        yield from _text(command)
        yield from _options(command)
        yield from _commands(command, called)


def _text(command: _Command) -> Iterator[str]:
    """Yield the paragraphs of a help text. The lines of all examples form one code block at the end."""
    examples: list[str] = []
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        if _EXAMPLES.match(paragraph.strip()):
            continue
        if paragraph.startswith("  "):
            examples += [line.strip() for line in paragraph.splitlines()]
        elif paragraph:
            yield re.sub(r"\[/?[a-z]+\]", "", " ".join(paragraph.split()))
    if examples:
        yield "\n".join(("```sh", *examples, "```"))


def _options(command: _Command) -> Iterator[str]:
    """Yield a table of arguments and options for each panel."""
    panels: dict[str, list[_Parameter]] = {}
    for one in command.params:
        assert isinstance(one, _Parameter)
        if one.name not in _OF_EVERY_PROGRAM and not one.hidden:
            panels.setdefault(one.rich_help_panel or "", []).append(one)
    for panel in sorted(panels, key=bool):  # options without a panel come first
        if panel:
            yield f"**{panel}**"
        rows = "".join(f"| {_name(one)} | {_meaning(one)} |\n" for one in panels[panel])
        yield f"| option | meaning |\n|---|---|\n{rows}".rstrip()


def _name(one: _Parameter) -> str:
    if isinstance(one, TyperArgument):
        return f"`{str(one.name).upper()}`"
    names = [*one.opts, *one.secondary_opts]
    return ", ".join(f"`{name}`" for name in names)


def _meaning(one: _Parameter) -> str:
    """Return the help of a parameter with its choices and its environment variable."""
    notes = [" ".join((one.help or "").split())]
    choices = _choices(one.type_descriptor.annotation)
    if choices:
        notes.append("One of " + ", ".join(f"`{choice}`" for choice in choices) + ".")
    if one.required:
        notes.append("Required.")
    if one.envvar:
        notes.append(f"Environment: `{one.envvar}`.")
    return " ".join(note for note in notes if note).replace("|", "\\|")


def _choices(annotation: Any) -> tuple[str, ...]:
    """Return the values of a StrEnum or of a Literal, else nothing."""
    if isinstance(annotation, type):
        return tuple(annotation) if issubclass(annotation, StrEnum) else ()
    return tuple(str(value) for value in get_args(annotation) if isinstance(value, str))


def main() -> None:
    """Write all pages."""
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

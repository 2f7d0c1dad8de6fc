"""The options of a request as parameters of the command that sends it."""

import inspect
import textwrap
from typing import Annotated, Any, Final, Literal

import typer

from permille_service.forms import Form, RequestOption

_WIDEST_CHOICES: Final = 12


def parameters_of(form: Form) -> list[inspect.Parameter]:
    """Return the parameters that typer needs for a form. The value of an option that is not given is None."""
    return [_parameter(option, form.arguments) for option in form.options]


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

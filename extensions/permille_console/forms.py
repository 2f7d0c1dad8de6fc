"""Forms of the console: the options of a request as fields, with the typed values and their errors.

An empty field is left out of the request, so that the service's default applies. Only the request model
checks the values, and the page shows its errors beside the fields.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import TypeAdapter, ValidationError
from sqlalchemy.orm import Session

from permille.schemas.problems import Problem
from permille_console.names import Choice, choices_of, known_names
from permille_service.forms import Form, RequestOption

Typed = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """An option of a form.

    Attributes:
        text: the value that the operator typed.
        choices: the values to choose from. Empty if the field is a text field.
        known: the names that the browser suggests in a text field.
        error: what is wrong with the typed value, or None.
    """

    option: RequestOption
    text: str
    choices: Sequence[Choice]
    known: Sequence[str]
    error: str | None

    @property
    def label(self) -> str:
        """The label of the field: the option of the command line, without its hyphens."""
        return self.option.flag.removeprefix("--").replace("-", " ").capitalize()

    @property
    def default(self) -> str:
        """The value that the service uses for an empty field."""
        value: Any = self.option.default
        if self.option.many:
            return " ".join(map(str, value))
        return "" if value in (None, False) else str(value)


def parse(form: Form, request: Any, typed: Typed) -> Any:
    """Make the request from the typed values. Raises RequestValidationError."""
    given: dict[str, object] = {
        option.parameter: _value(option, typed.get(option.parameter, "").strip()) for option in form.options
    }
    try:
        return TypeAdapter(request).validate_python(form.body(given, lambda _, text: text))
    except ValidationError as exc:
        raise RequestValidationError(exc.errors()) from exc


def fields_of(
    session: Session, tenant_id: str, form: Form, typed: Typed, problem: Problem | None
) -> tuple[list[Field], list[str]]:
    """Return the fields of a form, and the errors that belong to no field."""
    errors, others = _sort_errors(form, problem)
    releases, aliases = known_names(session, tenant_id)
    known = {"release": releases, "name": releases, "alias": aliases}
    fields = [
        Field(
            option=option,
            text=typed.get(option.parameter, ""),
            choices=_choices(session, tenant_id, option, typed.get(option.parameter, "")),
            known=known.get(option.parameter, ()),
            error=errors.get(option.parameter),
        )
        for option in form.options
    ]
    return fields, others


def _choices(session: Session, tenant_id: str, option: RequestOption, text: str) -> Sequence[Choice]:
    found = [(value, value) for value in option.choices]
    if option.names is not None:
        found = choices_of(session, tenant_id, option.names)
    # The list has only the newest objects, so the typed value may be missing.
    if found and text and text not in dict(found):
        found.append((text, text))
    return found


def _value(option: RequestOption, text: str) -> object:
    """Convert a typed text to the type of its option.

    Keep malformed text, because the model refuses it later.
    """
    if not text:
        return None
    if option.many:
        return [_number(option.value_type, one) for one in text.replace(",", " ").split()]
    return text == "true" if option.value_type is bool else _number(option.value_type, text)


def _number(kind: type, text: str) -> object:
    try:
        return kind(text) if kind in (int, float) else text
    except ValueError:
        return text


def _sort_errors(form: Form, problem: Problem | None) -> tuple[dict[str, str], list[str]]:
    """Return the errors by field, and the errors that belong to no field."""
    if problem is None:
        return {}, []
    errors, others = dict[str, str](), list[str]()
    for error in problem.errors or ():
        # Between the names of fields, a location also has names of union members, and positions in lists.
        parts = error.location.split(".")
        fitting = [one for one in form.options if _leads(one.place, parts)]
        if fitting:
            errors.setdefault(max(fitting, key=lambda one: len(one.place)).parameter, error.message)
        else:
            others.append(f"{error.location}: {error.message}".removeprefix(": "))
    return errors, others if problem.errors else [problem.detail]


def _leads(place: Sequence[str], parts: Sequence[str]) -> bool:
    """Return whether all names of `place` occur in `parts`, in this order."""
    rest = iter(parts)
    return all(name in rest for name in place)

"""A request as a form for people: a flat list of options, one for each value of the request.

A request is a Pydantic model. It may be a union of models (one for each method of a mask), and may hold other
models (one for each part of a build). An option takes its name from its field, and its help from the field's
description. Where a field holds an id, the option also accepts the name of the object. The command line
(`permille_service.cli.commands`) and the console (`permille_console.forms`) show the same options.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from permille.schemas.fields import Flag

IdOf = Callable[[str, str], str]
"""A function that returns the id of an object.

Its arguments are a collection, and the object's name or id.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOption:
    """A value of a request.

    Attributes:
        flag: the option on the command line, for example `--density`, or `--corpus` for the field
            `corpus_id`.
        place: the names of the nested fields that lead to the value, from the outermost to the innermost.
        value_type: `str`, `int`, `float` or `bool`. If `many` is set, the type of one element.
        choices: all allowed values, if the field is an enumeration.
        default: the value if none is given. None: the service chooses the value, or needs none.
        required: whether the request needs the value. If the request is a union: whether every member of the
            union needs it.
        names: the collection that the id belongs to, for example `corpora`. None: the field holds no id.
        optional: whether the value belongs to a nested model that is left out if none of its values are
            given.
        many: whether the option may be repeated.
    """

    flag: str
    place: tuple[str, ...]
    value_type: type
    choices: tuple[str, ...]
    default: object
    required: bool
    help: str
    names: str | None
    optional: bool = False
    many: bool = False

    @property
    def parameter(self) -> str:
        """Return the name of the command's parameter. The form field of the page has the same name."""
        return "_".join(self.place)


@dataclass(frozen=True, slots=True)
class Form:
    """The options of a request. On a command line, those in `arguments` are positional."""

    options: tuple[RequestOption, ...]
    arguments: tuple[str, ...] = ()

    def body(self, given: dict[str, object], id_of: IdOf) -> dict[str, Any]:
        """Take the options' values out of `given`, and return the body of the request. Names become ids.

        An enumeration without a value gets its default, because it may select the member of a union. Only
        nested models that are left out as a whole get no defaults.
        """
        body: dict[str, Any] = {}
        values = {option.place: given.pop(option.parameter) for option in self.options}
        named = {place[0] for place, value in values.items() if value is not None}
        for option in self.options:
            value = values[option.place]
            if value is None and option.choices and (not option.optional or option.place[0] in named):
                value = option.default
            if value is not None and option.names is not None:
                value = id_of(option.names, str(value))
            if value is not None:
                part = body
                for name in option.place[:-1]:
                    part = part.setdefault(name, {})
                part[option.place[-1]] = value
        return body


def flag_of(field: str) -> str:
    """Return the usual option of a field, for example `--corpus` for `corpus_id`."""
    return "--" + field.removesuffix("_id").removesuffix("_digest").replace("_", "-")


def form_of(request: Any, *arguments: str) -> Form:
    """Return the options of a request in the order of its fields.

    If several members of a union have the same field, they share one option.
    """
    found: dict[tuple[str, ...], RequestOption] = {}
    for option in _options(request, (), required=True):
        earlier = found.get(option.place, option)
        found[option.place] = replace(
            option,
            choices=tuple(dict.fromkeys((*earlier.choices, *option.choices))),
            default=earlier.default if option.default in (earlier.default, *option.choices) else None,
            required=earlier.required and option.required,
            help=earlier.help or option.help,
        )
    return Form(tuple(found.values()), arguments)


def _options(form: Any, place: tuple[str, ...], *, required: bool) -> Iterator[RequestOption]:
    models = _models(form)
    for model in models:
        for name, info in model.model_fields.items():
            needed = required and info.is_required() and all(name in other.model_fields for other in models)
            if _models(info.annotation):
                absent = not info.is_required() and info.default is None
                for option in _options(info.annotation, (*place, name), required=needed):
                    yield replace(option, optional=option.optional or absent)
            else:
                yield _option(info, (*place, name), required=needed)


def _option(info: FieldInfo, place: tuple[str, ...], *, required: bool) -> RequestOption:
    kind, choices = _value(info.annotation)
    thing, _, suffix = place[-1].rpartition("_")
    of = thing.rpartition("_")[2] if suffix in ("id", "digest") else None
    flag = next((marker.name for marker in info.metadata if isinstance(marker, Flag)), None)
    # A literal field selects the member of a union. If the field is required, its default is its first value.
    first = choices[0] if get_origin(info.annotation) is Literal else None
    default = first if info.is_required() else info.default
    return RequestOption(
        flag=flag or flag_of(place[-1]),
        place=place,
        value_type=kind,
        choices=choices,
        default=default.value if isinstance(default, StrEnum) else default,
        required=required and default is None,
        help=info.description or "",
        names=None if of is None else {"corpus": "corpora"}.get(of, f"{of}s"),
        many=get_origin(info.annotation) is list,
    )


def _models(form: Any) -> tuple[type[BaseModel], ...]:
    """Return the models that an annotation allows. The result is empty for a plain value."""
    if isinstance(form, type):
        return (form,) if issubclass(form, BaseModel) else ()
    return tuple(model for part in _parts(form) for model in _models(part))


def _value(form: Any) -> tuple[type, tuple[str, ...]]:
    """Return the type of a plain value, and its choices."""
    if get_origin(form) is Literal:
        values = get_args(form)
        return (str if isinstance(values[0], str) else type(values[0])), tuple(map(str, values))
    if isinstance(form, type):
        return (str, tuple(form)) if issubclass(form, StrEnum) else (form, ())
    return next(_value(part) for part in _parts(form) if part is not NoneType)


def _parts(form: Any) -> tuple[Any, ...]:
    """Return the inner types of an `Annotated` or a union."""
    return get_args(form) if get_origin(form) in (Union, UnionType) else get_args(form)[:1]

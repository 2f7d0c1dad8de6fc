"""The description of a kind of job, from which the programs make routes, commands and parsers."""

from dataclasses import dataclass
from typing import Any

from permille.schemas.fields import Closed
from permille.schemas.jobs import JobKind


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Additions of the command line to the description of a kind of job.

    Attributes:
        columns: the columns of its table, as dotted names of fields.
        example: the options of the example in the help text.
        then: the command that usually comes next. `{}` stands for the id of the result.
    """

    columns: tuple[str, ...]
    example: str
    then: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of job.

    Attributes:
        request: the pydantic model, or union of models, of the payload.
        collection: the last part of the path below which the result is, such as `masks` in `/v1/masks`, or
            None if no path shows it.
    """

    kind: JobKind
    # `Any`, because a union of models is not a class.
    request: Any
    collection: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkKind(Kind):
    """A kind of job that a request to the REST API starts.

    The request is also the payload. The group of commands has the name of the collection.

    Attributes:
        record: the pydantic model of the result.
        about: a description of the collection.
        starts: a description of the operation that starts such a job.
        shows: a description of the operation that shows the report, or None if there is no report.
        view: what the command line adds to this description.
        key: the path parameter of a single record.
        prefix: the prefix of ids, or None if a digest is the id.
    """

    collection: str
    record: type[Closed]
    about: str
    starts: str
    shows: str | None = None
    view: View
    key: str
    prefix: str | None

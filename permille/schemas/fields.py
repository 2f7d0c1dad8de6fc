"""Small types from which the whole REST contract is built.

Integers are at most 2^53 - 1. Texts contain no control or format characters, and floats are finite. No
record accepts an unknown field. Numbers are strict: `"5"` is not 5.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Generic, TypeVar, get_args

from pydantic import AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

from permille.choices import LEAST_DENSITY, MOST_DENSITY

Item = TypeVar("Item")
Examples = Mapping[str, Mapping[str, object]]
"""Example bodies of a request, by what they ask for."""

# JSON readers disagree about larger integers (RFC 8259, section 6).
MAX_INTEGER = 2**53 - 1

# These patterns are also in the OpenAPI document. So they are anchored, and use no look-around, which some
# readers of the document do not know.
DIGEST_PATTERN = r"^sha256:[0-9a-f]{64}$"
NAME_PATTERN = r"^[a-z0-9][a-z0-9._-]{0,62}$"
ULID_PATTERN = "[0-9a-hjkmnp-tv-z]{26}"
ID_PATTERN = rf"^[a-z]{{2,8}}_{ULID_PATTERN}$"
# No part begins with a dot, so `..` cannot occur.
PATH_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9_.@+-]{0,99}(/[A-Za-z0-9_][A-Za-z0-9_.@+-]{0,99}){0,19}$"
# Control and format characters (Unicode's Cc and Cf) can reverse or hide parts of a line. The ranges are
# written out, since not every reader of the OpenAPI document knows \p{Cf}.
_FORMAT_CHARACTERS = (
    r"\u00ad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u180e\u200b-\u200f\u202a-\u202e\u2060-\u2064"
    r"\u2066-\u206f\ufeff\ufff9-\ufffb"
    "\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0001"
    "\U000e0020-\U000e007f"
)
TEXT_PATTERN = rf"^[^\x00-\x1f\x7f-\x9f{_FORMAT_CHARACTERS}]+$"
EXAMPLE_ULID: Final = "01jd3kq8z7m4n5p6r7s8t9v0wx"
EXAMPLE_DIGEST: Final = "sha256:" + "0123456789abcdef" * 4
# Ids of the examples in the OpenAPI document. No row has them.
EXAMPLE_MODEL: Final = f"model_{EXAMPLE_ULID}"
EXAMPLE_CORPUS: Final = f"corpus_{EXAMPLE_ULID}"


@dataclass(frozen=True, slots=True)
class Flag:
    """The name of a command-line flag that differs from the name of its field."""

    name: str


def _whole(value: object) -> object:
    # JSON has one kind of number, so 5.0 is the integer 5 (JSON Schema). "5" and true are not.
    return int(value) if isinstance(value, float) and value.is_integer() else value


WholeNumber = BeforeValidator(_whole)

Digest = Annotated[str, StringConstraints(pattern=DIGEST_PATTERN), Field(examples=[EXAMPLE_DIGEST])]
Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN), Field(examples=["tiny-llama"])]
Id = Annotated[str, StringConstraints(pattern=ID_PATTERN), Field(examples=["job_01jd3kq8z7m4n5p6r7s8t9v0wx"])]
Count = Annotated[int, Field(strict=True, ge=0, le=MAX_INTEGER, examples=[1]), WholeNumber]
Positive = Annotated[int, Field(strict=True, ge=1, le=MAX_INTEGER, examples=[1]), WholeNumber]
Seed = Annotated[int, Field(strict=True, ge=0, le=MAX_INTEGER, examples=[0]), WholeNumber]
Finite = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Density = Annotated[
    float,
    Field(
        strict=True,
        ge=LEAST_DENSITY,
        le=MOST_DENSITY,
        allow_inf_nan=False,
        examples=[0.001],
        description="Share of the weights to select: 0.001 selects one weight in a thousand.",
    ),
]
# A time without a zone is refused: clients and service may be in different zones.
Timestamp = AwareDatetime


class Closed(BaseModel):
    """An immutable record that refuses unknown fields.

    Attributes:
        examples: examples of a request, for the OpenAPI document. Records that no route takes have none.

    Example:
        >>> Health(status="ok", version="0.1.0").model_dump()
        {'status': 'ok', 'version': '0.1.0'}
    """

    # JSON has neither NaN nor infinity, so a record with one of them is refused.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, ser_json_inf_nan="null")
    examples: ClassVar[Examples] = {}


def examples_of(request: Any) -> Examples:
    """Return the examples of a request, which is a record or a union of records."""
    if isinstance(request, type):
        return request.examples if issubclass(request, Closed) else {}
    return {name: body for part in get_args(request) for name, body in examples_of(part).items()}


class Page(Closed, Generic[Item]):
    """A page of a list, newest first. `next_cursor` is opaque, and null on the last page."""

    items: list[Item]
    next_cursor: str | None = None


class Health(Closed):
    """The answer of a healthy service, with its version."""

    status: str = Field(examples=["ok"])
    version: str = Field(examples=["0.1.0"])

"""Errors of the API: problem details of RFC 9457 with stable type URIs.

A client branches on `type`, never on `title` or `detail`. The list is closed, and a slug keeps its
meaning.
"""

from enum import StrEnum
from typing import Final

from pydantic import Field

from permille.schemas.fields import Closed, Count, Finite

MEDIA_TYPE: Final = "application/problem+json"
# Clients compare these URIs and never open them.
TYPE_BASE: Final = "https://permille.dev/problems/"


class ProblemType(StrEnum):
    """The slugs of the type URIs `https://permille.dev/problems/<slug>`.

    Example:
        >>> ProblemType.NOT_FOUND.uri, ProblemType.NOT_FOUND.status
        ('https://permille.dev/problems/not-found', 404)
    """

    BAD_REQUEST = "bad-request"
    UNAUTHENTICATED = "unauthenticated"
    FORBIDDEN = "forbidden"
    # Also used for objects of another tenant, so that nobody learns that they exist.
    NOT_FOUND = "not-found"
    METHOD_NOT_ALLOWED = "method-not-allowed"
    REQUEST_TIMEOUT = "request-timeout"
    CONFLICT = "conflict"
    IDEMPOTENCY_CONFLICT = "idempotency-conflict"
    ROUND_CLOSED = "round-closed"
    CONTRIBUTION_CONFLICT = "contribution-conflict"
    BUDGET_SPENT = "privacy-budget-spent"
    QUOTA_SPENT = "device-quota-spent"
    PRECONDITION_FAILED = "precondition-failed"
    TOO_LARGE = "too-large"
    UNSUPPORTED_MEDIA_TYPE = "unsupported-media-type"
    RANGE_NOT_SATISFIABLE = "range-not-satisfiable"
    MISDIRECTED = "misdirected-request"
    INVALID = "invalid"
    PREFLIGHT_REFUSED = "preflight-refused"
    PACKAGE_REFUSED = "package-refused"
    TOO_MANY_REQUESTS = "too-many-requests"
    INTERNAL = "internal"
    UNAVAILABLE = "unavailable"

    @property
    def uri(self) -> str:
        """The stable type URI."""
        return TYPE_BASE + self.value

    @property
    def status(self) -> int:
        """The HTTP status of the answer."""
        return _FACTS[self][0]

    @property
    def summary(self) -> str:
        """The title for people."""
        return _FACTS[self][1]


# The HTTP status and the title of each type.
_FACTS: Final[dict[ProblemType, tuple[int, str]]] = {
    ProblemType.BAD_REQUEST: (400, "The request cannot be read"),
    ProblemType.UNAUTHENTICATED: (401, "A valid bearer token is needed"),
    ProblemType.FORBIDDEN: (403, "You may not do this"),
    ProblemType.NOT_FOUND: (404, "It does not exist, or you may not see it"),
    ProblemType.METHOD_NOT_ALLOWED: (405, "This path does not offer this method"),
    ProblemType.REQUEST_TIMEOUT: (408, "The request did not come in time"),
    ProblemType.CONFLICT: (409, "The current state does not allow this"),
    ProblemType.IDEMPOTENCY_CONFLICT: (
        409,
        "The idempotency key was used for another request, or for an object that is gone",
    ),
    ProblemType.ROUND_CLOSED: (409, "The round takes no more contributions"),
    ProblemType.CONTRIBUTION_CONFLICT: (409, "The device has sent another contribution to this round"),
    ProblemType.BUDGET_SPENT: (409, "The privacy budget of the device is spent"),
    ProblemType.QUOTA_SPENT: (409, "The storage quota of the device is used up"),
    ProblemType.PRECONDITION_FAILED: (412, "A precondition of the request does not hold"),
    ProblemType.TOO_LARGE: (413, "The request body is too large"),
    ProblemType.UNSUPPORTED_MEDIA_TYPE: (415, "The request body has another media type than expected"),
    ProblemType.RANGE_NOT_SATISFIABLE: (416, "The requested range lies outside of the content"),
    ProblemType.MISDIRECTED: (421, "This server does not answer to that host name"),
    ProblemType.INVALID: (422, "The request does not fit its description"),
    ProblemType.PREFLIGHT_REFUSED: (409, "The machine lacks resources for this job"),
    ProblemType.PACKAGE_REFUSED: (422, "The package or log is not what it claims to be"),
    ProblemType.TOO_MANY_REQUESTS: (429, "Too many requests"),
    ProblemType.INTERNAL: (500, "The service failed"),
    ProblemType.UNAVAILABLE: (503, "The service cannot answer now"),
}


class FieldError(Closed):
    """An invalid field: its location, and a message about the expected value."""

    location: str = Field(examples=["body.density"])
    message: str = Field(examples=["Input should be less than or equal to 0.5"])


class Figure(Closed):
    """A figure of a preflight: the needed and the available amount, in `unit`."""

    name: str = Field(examples=["memory"])
    unit: str = Field(examples=["bytes"])
    needed: Count | Finite | None = Field(description="null if unknown", examples=[5_200_000_000])
    available: Count | Finite | None = Field(examples=[4_000_000_000])
    enough: bool
    explanation: str = Field(examples=["weights in float32 and scores of the scope"])


class Problem(Closed):
    """RFC 9457 problem details."""

    type: str = Field(examples=[ProblemType.NOT_FOUND.uri])
    title: str
    # RFC 9457, section 3.1.2: the same as the status of the answer.
    status: int = Field(ge=400, le=599)
    detail: str
    instance: str = Field(examples=["/v1/masks/mask_01jd3kq8z7m4n5p6r7s8t9v0wx"])
    # RFC 9457 allows such extensions. `errors` is for `invalid`, and `figures` for `preflight-refused`.
    errors: list[FieldError] | None = None
    figures: list[Figure] | None = None

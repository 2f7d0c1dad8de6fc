"""Every error of the API: RFC 9457 problem details with a stable type URI.

A client branches on `type`, never on `title` or `detail`. The list is closed; a slug keeps its meaning.
"""

from enum import StrEnum
from typing import Final

from pydantic import Field

from permille.schemas.fields import Closed, Count, Finite

MEDIA_TYPE: Final = "application/problem+json"
TYPE_BASE: Final = "https://permille.dev/problems/"


class ProblemType(StrEnum):
    """Slugs of the type URIs `https://permille.dev/problems/<slug>`."""

    BAD_REQUEST = "bad-request"
    UNAUTHENTICATED = "unauthenticated"
    FORBIDDEN = "forbidden"
    NOT_FOUND = "not-found"
    METHOD_NOT_ALLOWED = "method-not-allowed"
    CONFLICT = "conflict"
    IDEMPOTENCY_CONFLICT = "idempotency-conflict"
    GONE = "gone"
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
    INSUFFICIENT_STORAGE = "insufficient-storage"

    @property
    def uri(self) -> str:
        """The stable type URI."""
        return TYPE_BASE + self.value


STATUS: Final[dict[ProblemType, int]] = {
    ProblemType.BAD_REQUEST: 400,
    ProblemType.UNAUTHENTICATED: 401,
    ProblemType.FORBIDDEN: 403,
    ProblemType.NOT_FOUND: 404,
    ProblemType.METHOD_NOT_ALLOWED: 405,
    ProblemType.CONFLICT: 409,
    ProblemType.IDEMPOTENCY_CONFLICT: 409,
    ProblemType.GONE: 410,
    ProblemType.PRECONDITION_FAILED: 412,
    ProblemType.TOO_LARGE: 413,
    ProblemType.UNSUPPORTED_MEDIA_TYPE: 415,
    ProblemType.RANGE_NOT_SATISFIABLE: 416,
    ProblemType.MISDIRECTED: 421,
    ProblemType.INVALID: 422,
    ProblemType.PREFLIGHT_REFUSED: 409,
    ProblemType.PACKAGE_REFUSED: 422,
    ProblemType.TOO_MANY_REQUESTS: 429,
    ProblemType.INTERNAL: 500,
    ProblemType.UNAVAILABLE: 503,
    ProblemType.INSUFFICIENT_STORAGE: 507,
}

TITLE: Final[dict[ProblemType, str]] = {
    ProblemType.BAD_REQUEST: "The request cannot be read",
    ProblemType.UNAUTHENTICATED: "A valid bearer token is needed",
    ProblemType.FORBIDDEN: "This principal may not do this",
    ProblemType.NOT_FOUND: "There is no such thing for this principal",
    ProblemType.METHOD_NOT_ALLOWED: "This path does not offer this method",
    ProblemType.CONFLICT: "The current state does not allow this",
    ProblemType.IDEMPOTENCY_CONFLICT: "The idempotency key was used with another request",
    ProblemType.GONE: "This was withdrawn",
    ProblemType.PRECONDITION_FAILED: "A precondition of the request does not hold",
    ProblemType.TOO_LARGE: "The request body is too large",
    ProblemType.UNSUPPORTED_MEDIA_TYPE: "The request body has another media type than expected",
    ProblemType.RANGE_NOT_SATISFIABLE: "The requested range lies outside of the content",
    ProblemType.MISDIRECTED: "This server does not answer to that host name",
    ProblemType.INVALID: "The request does not fit its description",
    ProblemType.PREFLIGHT_REFUSED: "The machine cannot hold this work",
    ProblemType.PACKAGE_REFUSED: "The package or log is not what it claims to be",
    ProblemType.TOO_MANY_REQUESTS: "Too many requests",
    ProblemType.INTERNAL: "The service failed",
    ProblemType.UNAVAILABLE: "The service cannot answer now",
    ProblemType.INSUFFICIENT_STORAGE: "The disk of the service is full",
}


class FieldError(Closed):
    """One field that does not fit: where it is and what was expected."""

    location: str = Field(examples=["body.density"])
    message: str = Field(examples=["Input should be less than or equal to 0.5"])


class Figure(Closed):
    """One figure of a preflight: what the work needs and what there is, in `unit`."""

    name: str = Field(examples=["memory"])
    unit: str = Field(examples=["bytes"])
    needed: Count | Finite = Field(examples=[5_200_000_000])
    available: Count | Finite | None = Field(examples=[4_000_000_000])
    enough: bool
    explanation: str = Field(examples=["weights in float32 and scores of the scope"])


class Problem(Closed):
    """RFC 9457 problem details."""

    type: str = Field(examples=[ProblemType.NOT_FOUND.uri])
    title: str
    status: int = Field(ge=400, le=599)
    detail: str
    instance: str = Field(examples=["/v1/masks/mask_01jd3kq8z7m4n5p6r7s8t9v0wx"])
    errors: list[FieldError] | None = None
    figures: list[Figure] | None = None

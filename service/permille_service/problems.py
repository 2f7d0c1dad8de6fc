"""Errors as RFC 9457 problem details.

Endpoints raise `ApiError`, for example:

    raise ApiError(ProblemType.CONFLICT, "A token cannot revoke itself. Use another one.")

`answer` turns every exception into a problem. The detail of a problem says what is wrong and what to do. The
detail never contains a secret that a client sent, or a traceback.
"""

import errno
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute, iter_route_contexts
from sqlalchemy.exc import DatabaseError, DBAPIError, OperationalError
from sqlalchemy.exc import TimeoutError as NoConnectionError
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.routing import Match

from permille.errors import InputError, OperatorError, PackageError, PermilleError, RetryableError
from permille.schemas.problems import MEDIA_TYPE, FieldError, Figure, Problem, ProblemType
from permille.store.database import name_fault
from permille.store.errors import (
    BudgetSpentError,
    ConflictError,
    ContributionConflictError,
    NotFoundError,
    QuotaError,
    QuotaSpentError,
    RoundClosedError,
)
from permille.trust.metadata import KeyElsewhereError

logger = logging.getLogger(__name__)
RETRY_AFTER_S = 5
UNANSWERED = "the database did not answer in time"
_FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})
# The disk is full, read-only or broken, a file has reached its maximum size (ulimit -f), or the folder
# belongs to another user.
_DISK_ERRNOS = _FULL_ERRNOS | {errno.EFBIG, errno.EROFS, errno.EIO, errno.EACCES}
_TYPE_OF_STATUS = {
    400: ProblemType.BAD_REQUEST,
    401: ProblemType.UNAUTHENTICATED,
    403: ProblemType.FORBIDDEN,
    404: ProblemType.NOT_FOUND,
    405: ProblemType.METHOD_NOT_ALLOWED,
    408: ProblemType.REQUEST_TIMEOUT,
    413: ProblemType.TOO_LARGE,
    415: ProblemType.UNSUPPORTED_MEDIA_TYPE,
}
_HEADERS_OF_STATUS = {
    401: {"WWW-Authenticate": ("string", "the scheme to authenticate with")},
    405: {"Allow": ("string", "the methods that this path offers")},
    416: {"Content-Range": ("string", "the size of the content")},
    429: {"Retry-After": ("integer", "seconds to wait")},
    503: {"Retry-After": ("integer", "seconds to wait")},
}

# Every operation documents the problems of OPEN. Operations that need a token document those of PRIVATE.
OPEN = (
    ProblemType.BAD_REQUEST,
    ProblemType.REQUEST_TIMEOUT,
    ProblemType.TOO_LARGE,
    ProblemType.MISDIRECTED,
    ProblemType.INVALID,
    ProblemType.TOO_MANY_REQUESTS,
    ProblemType.INTERNAL,
    ProblemType.UNAVAILABLE,
)
PRIVATE = (*OPEN, ProblemType.UNAUTHENTICATED, ProblemType.FORBIDDEN)


class ApiError(HTTPException):
    """An error that the service answers with a problem. Endpoints and functions that they call raise it."""

    def __init__(
        self,
        problem: ProblemType,
        detail: str,
        *,
        headers: Mapping[str, str] | None = None,
        figures: Sequence[Figure] | None = None,
    ) -> None:
        super().__init__(problem.status, detail, headers=dict(headers) if headers else None)
        self.problem = problem
        self.message = detail
        self.figures = figures


def problem_response(
    path: str,
    problem: ProblemType,
    detail: str,
    *,
    headers: Mapping[str, str] | None = None,
    errors: Sequence[FieldError] | None = None,
    figures: Sequence[Figure] | None = None,
) -> Response:
    """Make the HTTP response of a problem."""
    status = problem.status
    body = Problem(
        type=problem.uri,
        title=problem.summary,
        status=status,
        detail=detail,
        instance=path,
        errors=list(errors) if errors else None,
        figures=list(figures) if figures else None,
    )
    # The error may be gone at the next request, so no proxy may keep this answer.
    all_headers = {"Cache-Control": "no-store", **(headers or {})}
    if status == HTTPStatus.UNAUTHORIZED:
        # RFC 9110 requires the authentication scheme in every answer with 401.
        all_headers.setdefault("WWW-Authenticate", "Bearer")
    if status in (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.TOO_MANY_REQUESTS):
        all_headers.setdefault("Retry-After", str(RETRY_AFTER_S))
    content = body.model_dump_json(exclude_none=True).encode()
    return Response(content, status_code=status, media_type=MEDIA_TYPE, headers=all_headers)


def documented(*problems: ProblemType) -> dict[int | str, dict[str, Any]]:
    """Return the `responses` of a route that may answer with these problems."""
    by_status: dict[int, list[ProblemType]] = {}
    for problem in problems:
        by_status.setdefault(problem.status, []).append(problem)
    return {status: _documented_status(status, found) for status, found in sorted(by_status.items())}


def install(app: FastAPI) -> None:
    """Answer every error of the app with a problem. Call this before other middleware is added."""
    kinds: list[type[Exception]] = [StarletteHTTPException, RequestValidationError]
    kinds += [PermilleError, DatabaseError, NoConnectionError, OSError]
    for kind in kinds:
        app.add_exception_handler(kind, answer)
    # A handler of `Exception` would run outside of all middleware. Its answers would have no request id and
    # no security headers, and the metrics would not count them. This middleware is inside of the others,
    # because it is added first. It raises the error again.
    app.add_middleware(ServerErrorMiddleware, handler=answer)


async def answer(request: Request, exc: Exception) -> Response:
    """Return the problem of an error."""
    path = request.url.path
    match exc:
        case ApiError():
            return problem_response(path, exc.problem, exc.message, headers=exc.headers, figures=exc.figures)
        case StarletteHTTPException():
            return _answer_http(request, exc)
        case RequestValidationError():
            return _answer_invalid(path, exc)
        case PermilleError():
            # For other answers with 429 or 503, `problem_response` sets `RETRY_AFTER_S`.
            wait_s = exc.retry_after_s if isinstance(exc, RetryableError) else None
            headers = None if wait_s is None else {"Retry-After": f"{wait_s:.0f}"}
            return problem_response(path, problem_of(exc), str(exc), headers=headers)
    if (fault := fault_of(exc)) is not None:
        # The operator needs the path of the file, and the client must not see it.
        logger.error("%s: %s", "disk" if isinstance(exc, OSError) else "database", exc)
        return problem_response(path, ProblemType.UNAVAILABLE, fault)
    logger.error("unhandled error on %s %s", request.method, path, exc_info=exc)
    # The middleware raises the error again, so uvicorn closes the connection. A client must not use it again.
    closing = {"Connection": "close"}
    detail = "an unexpected error; the log has the details"
    return problem_response(path, ProblemType.INTERNAL, detail, headers=closing)


@contextmanager
def as_conflicts() -> Iterator[None]:
    """Turn an InputError of the library into a conflict (409).

    Use it where the request is well formed, but contradicts what is stored.

    Example:
        with as_conflicts():
            check_head(path)  # without `as_conflicts`, an InputError would be answered with 422
    """
    try:
        yield
    except (NotFoundError, ConflictError, KeyElsewhereError):
        raise
    except InputError as exc:
        raise ApiError(ProblemType.CONFLICT, str(exc)) from exc


def fault_of(exc: Exception) -> str | None:
    """Describe a fault of the disk or the database. Return None if the error is of another kind.

    The description contains no path. Only the log shows the path of the file.
    """
    match exc:
        case OSError() if exc.errno in _FULL_ERRNOS:
            return "the disk of the blob store is full"
        case OSError() if exc.errno in _DISK_ERRNOS:
            return f"the blob store cannot be written: {exc.strerror}"
        case NoConnectionError():
            return UNANSWERED
        case DBAPIError():
            return name_fault(exc) or (UNANSWERED if isinstance(exc, OperationalError) else None)
    return None


def _answer_http(request: Request, exc: StarletteHTTPException) -> Response:
    """Answer an error that the web framework raised, for example for a missing path."""
    path, status = request.url.path, exc.status_code
    if status == HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = ", ".join(_allowed_methods(request))
        detail = f"{request.method} is not allowed here, only {allowed}."
        return problem_response(path, ProblemType.METHOD_NOT_ALLOWED, detail, headers={"Allow": allowed})
    if status == HTTPStatus.NOT_FOUND:
        return problem_response(path, ProblemType.NOT_FOUND, "there is no such path")
    return problem_response(path, _TYPE_OF_STATUS.get(status, ProblemType.INTERNAL), str(exc.detail))


def _got(error: Mapping[str, Any]) -> str:
    """Describe a refused number. Refused texts are not repeated, because they may be secrets."""
    number = error.get("input")
    # A number of a JSON body can have thousands of digits, so cut it.
    return f", got {number}"[:80] if isinstance(number, int | float) else ""


def _answer_invalid(path: str, exc: RequestValidationError) -> Response:
    found = exc.errors()
    errors = [
        FieldError(
            # Cut the location. It contains the names of unknown fields, which clients choose.
            location=".".join(str(part) for part in error["loc"])[:200],
            message=f"{error['msg']!s:.400}{_got(error)}",
        )
        # A body of one megabyte can hold a hundred thousand errors, so report only the first ones.
        for error in found[:20]
    ]
    detail = "; ".join(f"{error.location}: {error.message}" for error in errors[:3])
    if errors and all(error.location.startswith("path.") for error in errors):
        # An id of the wrong form cannot belong to any object, so the answer is 404. Its `errors` describe the
        # right form.
        detail = "; ".join(
            f"no {str(error['loc'][-1]).removesuffix('_id')} {error['input']!r:.80}" for error in found
        )
        return problem_response(path, ProblemType.NOT_FOUND, detail, errors=errors)
    return problem_response(path, ProblemType.INVALID, detail, errors=errors)


def problem_of(exc: PermilleError) -> ProblemType:
    """Return the problem type of a library error."""
    return next((problem for kind, problem in _KINDS if isinstance(exc, kind)), ProblemType.INTERNAL)


_KINDS: tuple[tuple[type[PermilleError], ProblemType], ...] = (
    # A subclass stands before its base.
    (NotFoundError, ProblemType.NOT_FOUND),
    (RoundClosedError, ProblemType.ROUND_CLOSED),
    (ContributionConflictError, ProblemType.CONTRIBUTION_CONFLICT),
    (BudgetSpentError, ProblemType.BUDGET_SPENT),
    (QuotaSpentError, ProblemType.QUOTA_SPENT),
    (ConflictError, ProblemType.CONFLICT),
    (QuotaError, ProblemType.TOO_MANY_REQUESTS),
    (KeyElsewhereError, ProblemType.CONFLICT),
    (PackageError, ProblemType.PACKAGE_REFUSED),
    (InputError, ProblemType.INVALID),
    (RetryableError, ProblemType.UNAVAILABLE),
    (OperatorError, ProblemType.UNAVAILABLE),
)


def _allowed_methods(request: Request) -> list[str]:
    """Return all methods of all routes of this path.

    The router's own answer would name only the methods of the first route that matches.
    """
    methods: set[str] = set()
    for route in iter_route_contexts(request.app.routes):
        match, _ = route.matches(request.scope)
        if match is not Match.NONE:
            methods |= route.methods or set()
    return sorted(methods)


def _documented_status(status: int, problems: list[ProblemType]) -> dict[str, Any]:
    examples = {
        problem.value: {
            "value": {
                "type": problem.uri,
                "title": problem.summary,
                "status": status,
                "detail": problem.summary,
                "instance": "/v1/masks",
            }
        }
        for problem in problems
    }
    documented: dict[str, Any] = {
        "description": "; ".join(problem.summary for problem in problems),
        "content": {
            MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}, "examples": examples},
        },
    }
    headers = _HEADERS_OF_STATUS.get(status)
    if headers:
        documented["headers"] = {
            name: {"description": text, "schema": {"type": kind}} for name, (kind, text) in headers.items()
        }
    return documented


def operation_id(route: APIRoute) -> str:
    """Return the operation id of a route: the name of its function, which stays stable between versions."""
    return route.name

"""Errors as RFC 9457 problem details: one exception, one response, one place that maps every other
exception to it.

Details say what was expected and what came; they never hold what a client sent as a secret, nor a
traceback.
"""

import errno
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute, iter_route_contexts
from sqlalchemy.exc import DatabaseError, DBAPIError, OperationalError
from sqlalchemy.exc import TimeoutError as NoConnectionError
from starlette.exceptions import HTTPException as StarletteHTTPException
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
_Handler = Callable[[Request, Exception], Coroutine[Any, Any, Response]]

RETRY_AFTER_S = 5
UNANSWERED = "the database did not answer in time"
_FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})
_DISK_ERRNOS = _FULL_ERRNOS | {errno.EFBIG, errno.EROFS, errno.EIO, errno.EACCES}
"""Faults of a disk: full or over its quota, a limit on files, read-only, broken, not ours."""
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
    """An answer that is a problem. Raise it anywhere below an endpoint."""

    def __init__(
        self,
        problem: ProblemType,
        detail: str,
        *,
        headers: Mapping[str, str] | None = None,
        errors: Sequence[FieldError] | None = None,
        figures: Sequence[Figure] | None = None,
    ) -> None:
        super().__init__(problem.status, detail, headers=dict(headers) if headers else None)
        self.problem = problem
        self.message = detail
        self.errors = errors
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
    """The response of one problem."""
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
    all_headers = {"Cache-Control": "no-store", **(headers or {})}
    if status == HTTPStatus.UNAUTHORIZED:
        all_headers.setdefault("WWW-Authenticate", "Bearer")
    if status in (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.TOO_MANY_REQUESTS):
        all_headers.setdefault("Retry-After", str(RETRY_AFTER_S))
    content = body.model_dump_json(exclude_none=True).encode()
    return Response(content, status_code=status, media_type=MEDIA_TYPE, headers=all_headers)


def documented(*problems: ProblemType) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route that may answer with these problems."""
    by_status: dict[int, list[ProblemType]] = {}
    for problem in problems:
        by_status.setdefault(problem.status, []).append(problem)
    return {status: _documented_status(status, found) for status, found in sorted(by_status.items())}


def install(app: FastAPI) -> None:
    """Answer every error of the app with a problem."""
    for kind, handler in _handlers():
        app.add_exception_handler(kind, handler)


async def answer(request: Request, exc: Exception) -> Response:
    """The problem of an error that a route has caught itself."""
    if isinstance(exc, OSError) and exc.errno not in _DISK_ERRNOS:
        return await _on_bug(request, exc)
    handler = next(handler for kind, handler in _handlers() if isinstance(exc, kind))
    return await handler(request, exc)


def _handlers() -> tuple[tuple[type[Exception], _Handler], ...]:
    """Return the handlers of errors. The first that fits is used."""
    return (
        (StarletteHTTPException, _on_http_exception),
        (RequestValidationError, _on_validation_error),
        (PermilleError, _on_permille_error),
        (OperationalError, _on_database_error),
        (NoConnectionError, _on_database_error),
        (DatabaseError, _on_damaged_database),
        (OSError, _on_os_error),
        (Exception, _on_bug),
    )


async def _on_http_exception(request: Request, exc: Exception) -> Response:
    path = request.url.path
    if isinstance(exc, ApiError):
        return problem_response(
            path, exc.problem, exc.message, headers=exc.headers, errors=exc.errors, figures=exc.figures
        )
    status = getattr(exc, "status_code", 500)
    if status == HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = ", ".join(_allowed_methods(request))
        detail = f"{request.method} is not allowed here, only {allowed}."
        return problem_response(path, ProblemType.METHOD_NOT_ALLOWED, detail, headers={"Allow": allowed})
    if status == HTTPStatus.NOT_FOUND:
        return problem_response(path, ProblemType.NOT_FOUND, "there is no such path")
    problem = _TYPE_OF_STATUS.get(status, ProblemType.INTERNAL)
    return problem_response(path, problem, str(getattr(exc, "detail", problem.summary)))


def _got(error: Mapping[str, Any]) -> str:
    """Say a number that was refused; texts may be secrets."""
    number = error.get("input")
    return f", got {number}"[:80] if isinstance(number, int | float) else ""


async def _on_validation_error(request: Request, exc: Exception) -> Response:
    found = exc.errors() if isinstance(exc, RequestValidationError) else []
    errors = [
        FieldError(
            location=".".join(str(part) for part in error["loc"])[:200],
            message=f"{error['msg']!s:.400}{_got(error)}",
        )
        for error in found[:20]
    ]
    detail = "; ".join(f"{error.location}: {error.message}" for error in errors[:3])
    if errors and all(error.location.startswith("path.") for error in errors):
        # What cannot be the name of anything names nothing: how names look is in `errors`.
        detail = "; ".join(
            f"no {str(error['loc'][-1]).removesuffix('_id')} {error['input']!r:.80}" for error in found
        )
        return problem_response(request.url.path, ProblemType.NOT_FOUND, detail, errors=errors)
    return problem_response(request.url.path, ProblemType.INVALID, detail, errors=errors)


async def _on_permille_error(request: Request, exc: Exception) -> Response:
    headers = {"Retry-After": str(exc.retry_after_s)} if isinstance(exc, QuotaError) else None
    return problem_response(request.url.path, problem_of(exc), str(exc), headers=headers)


async def _on_database_error(request: Request, exc: Exception) -> Response:
    logger.error("database: %s", exc)
    words = words_of_database(exc) if isinstance(exc, DBAPIError) else UNANSWERED
    return problem_response(request.url.path, ProblemType.UNAVAILABLE, words)


async def _on_damaged_database(request: Request, exc: Exception) -> Response:
    if isinstance(exc, DBAPIError) and name_fault(exc):
        return await _on_database_error(request, exc)
    return await _on_bug(request, exc)


async def _on_os_error(request: Request, exc: Exception) -> Response:
    if not isinstance(exc, OSError) or exc.errno not in _DISK_ERRNOS:
        raise exc
    logger.error("blob store: %s", exc)
    return problem_response(request.url.path, ProblemType.UNAVAILABLE, words_of_disk(exc))


async def _on_bug(request: Request, exc: Exception) -> Response:
    logger.error("unhandled error on %s %s", request.method, request.url.path, exc_info=exc)
    return problem_response(
        request.url.path, ProblemType.INTERNAL, "an unexpected error; the log has the details"
    )


def problem_of(exc: Exception) -> ProblemType:
    """Return the problem type of a library error."""
    kinds: tuple[tuple[type[Exception], ProblemType], ...] = (
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
    return next((problem for kind, problem in kinds if isinstance(exc, kind)), ProblemType.INTERNAL)


def words_of_disk(exc: OSError) -> str:
    """Describe the fault of the blob store's disk. The path is only in the log."""
    if exc.errno in _FULL_ERRNOS:
        return "the disk of the blob store is full"
    return f"the blob store cannot be written: {exc.strerror or type(exc).__name__}"


def words_of_database(exc: DBAPIError) -> str:
    """Describe the fault of the database, as far as its error says."""
    return name_fault(exc) or UNANSWERED


def _allowed_methods(request: Request) -> list[str]:
    """Return all methods of all routes of this path.

    The router itself only knows the first route that matches.
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
    """The stable operation id of a route: the name of its function."""
    return route.name

"""The OpenAPI document: FastAPI's, completed by what it does not know (problems, security, tags)."""

from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from permille.schemas.kinds import WORK
from permille.schemas.problems import Problem

TITLE: Final = "permille"
DESCRIPTION: Final = """
Turn a pre-trained language model into a package of which a device trains one weight in a thousand.

* Press **Authorize** and paste an operator token (the first one is in `operator.token` of the data folder).
* Long work answers `202` with the job's `Location`; follow it under **jobs**.
* Every error is a problem (RFC 9457); branch on its `type`.
* A `POST` that makes something takes an `Idempotency-Key`: sent again, it makes nothing twice.
* Lists are pages: pass `next_cursor` as `cursor`.
"""
TAGS: Final = [
    {"name": "models", "description": "Base models: a folder, or a hub repository at a commit."},
    {"name": "corpora", "description": "Text to measure sensitivity and perplexity on."},
    *({"name": work.collection, "description": work.about} for work in WORK.values()),
    {"name": "releases", "description": "Signed versions of a name, and aliases such as `stable`."},
    {"name": "trust", "description": "Who signs what devices may install: TUF metadata and its keys."},
    {"name": "jobs", "description": "Long work: state, progress, events, cancel, retry."},
    {"name": "preflights", "description": "What work needs, and whether the machine has it."},
    {"name": "devices", "description": "Invitations, enrolment, device tokens, revocation."},
    {"name": "runs", "description": "What devices report, and the logs that they share."},
    {"name": "fleet", "description": "All devices in numbers."},
    {"name": "federations", "description": "Rounds: many devices improve one state, by integers both ways."},
    {"name": "access", "description": "Tenants, operator tokens, and what operators changed."},
    {"name": "health", "description": "Whether the service answers."},
]


def install(app: FastAPI) -> None:
    """Make `app.openapi()` return the completed document."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _complete(app)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _complete(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(
        title=TITLE, version=app.version, description=DESCRIPTION, routes=app.routes, tags=TAGS
    )
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    problem = Problem.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas.update(problem.pop("$defs", {}))
    schemas["Problem"] = problem
    for item in document["paths"].values():
        for operation in item.values():
            for parameter in operation.get("parameters", ()):
                _drop_null(parameter)
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    return document


def _drop_null(parameter: dict[str, Any]) -> None:
    """A parameter that may be left out is not one that may be the word `null`."""
    schema = parameter["schema"]
    kinds = [kind for kind in schema.pop("anyOf", ()) if kind != {"type": "null"}]
    if kinds:
        schema.update(kinds[0] if len(kinds) == 1 else {"anyOf": kinds})

"""Tests of the contract's types: closed, bounded, strict, and equal to their documents."""

import json
from typing import Any

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from permille.schemas import (
    access,
    devices,
    inputs,
    jobs,
    masks,
    packages,
    problems,
    quantizations,
    releases,
    runs,
)
from permille.schemas.fields import MAX_INTEGER, Closed, Count, Density, Seed
from tests.api_service import run_metrics

MODULES = (
    access,
    inputs,
    devices,
    jobs,
    masks,
    packages,
    problems,
    quantizations,
    releases,
    runs,
)
RECORDS = sorted(
    {
        value
        for module in MODULES
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, BaseModel)
    },
    key=lambda record: record.__name__,
)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_every_record_is_closed_and_has_a_document(record: type[BaseModel]) -> None:
    assert issubclass(record, Closed)
    assert record.model_config["extra"] == "forbid"
    assert record.model_json_schema()
    assert record.__doc__


@pytest.mark.parametrize(
    "value", ["5", True, 5.5, -1, MAX_INTEGER + 1, float("nan"), float("inf"), None, [5]]
)
def test_integer_takes_nothing_else(value: Any) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(Count).validate_python(value)


@pytest.mark.parametrize(("value", "expected"), [(0, 0), (5.0, 5), (MAX_INTEGER, MAX_INTEGER)])
def test_integer_is_any_whole_json_number(value: Any, expected: int) -> None:
    found = TypeAdapter(Seed).validate_python(value)
    assert (found, type(found)) == (expected, int)


@pytest.mark.parametrize("value", [0, 0.6, float("nan"), "0.1"])
def test_density_is_a_share(value: Any) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(Density).validate_python(value)


def test_bounds_are_in_the_document() -> None:
    schema = TypeAdapter(Count).json_schema()
    assert (schema["minimum"], schema["maximum"]) == (0, MAX_INTEGER)


def test_fisher_needs_a_corpus_and_the_others_refuse_one() -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(masks.MaskRequest)
    corpus = "corpus_01jd3kq8z7m4n5p6r7s8t9v0wx"
    assert adapter.validate_python({"method": "fisher", "corpus_id": corpus}).sequences == 100
    assert adapter.validate_python({"method": "random"}).density == 0.001
    for wrong in ({"method": "fisher"}, {"method": "random", "corpus_id": corpus}, {"method": "other"}, {}):
        with pytest.raises(ValidationError):
            adapter.validate_python(wrong)


def test_auto_round_needs_a_corpus() -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(quantizations.QuantizationOptions)
    body = {"scheme": "auto-round", "calibration_corpus_id": "corpus_01jd3kq8z7m4n5p6r7s8t9v0wx"}
    assert adapter.validate_python(body).group_size == 128
    wrong: list[dict[str, Any]] = [
        {"scheme": "auto-round"},
        body | {"group_size": 32},
        body | {"scheme": "int4"},
        body | {"calibration_length": 4},
    ]
    for one in wrong:
        with pytest.raises(ValidationError):
            adapter.validate_python(one)


def test_metrics_have_no_place_for_a_text() -> None:
    schema = json.dumps(runs.RunMetrics.model_json_schema())
    texts = [
        field
        for field, value in runs.RunMetrics.model_json_schema()["properties"].items()
        if value.get("type") == "string" and not {"pattern", "enum", "format"} & value.keys()
    ]
    assert texts == []
    assert '"additionalProperties": false' in schema
    runs.RunMetrics.model_validate(run_metrics())
    for name in run_metrics():
        with pytest.raises(ValidationError):
            runs.RunMetrics.model_validate(run_metrics(**{name: "Dear diary, today"}))


def test_problem_types_are_stable() -> None:
    assert {problem.value: problem.status for problem in problems.ProblemType} == {
        "bad-request": 400,
        "unauthenticated": 401,
        "forbidden": 403,
        "not-found": 404,
        "method-not-allowed": 405,
        "request-timeout": 408,
        "conflict": 409,
        "idempotency-conflict": 409,
        "round-closed": 409,
        "contribution-conflict": 409,
        "privacy-budget-spent": 409,
        "device-quota-spent": 409,
        "precondition-failed": 412,
        "too-large": 413,
        "unsupported-media-type": 415,
        "range-not-satisfiable": 416,
        "misdirected-request": 421,
        "invalid": 422,
        "preflight-refused": 409,
        "package-refused": 422,
        "too-many-requests": 429,
        "internal": 500,
        "unavailable": 503,
    }
    assert all(problem.summary for problem in problems.ProblemType)


def test_token_message_binds_device_and_nonce() -> None:
    assert devices.token_message("dev_1", "abc") == b"permille-device-token-1\0dev_1\0abc"

"""The REST form of a sweep and the sweep itself: the same keys, defaults and names."""

import subprocess
import sys
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from permille.errors import InputError
from permille.schemas.evaluations import EvaluationCreate, EvaluationOptions
from permille_lab.evaluate.methods import method
from permille_lab.evaluate.prompts import Task
from permille_lab.evaluate.specification import Sweep
from permille_workers.payloads import EvaluationPayload

BODY: dict[str, Any] = {
    "model_ids": ["model_01jd3kq8z7m4n5p6r7s8t9v0wx"],
    "corpus_id": "corpus_01jd3kq8z7m4n5p6r7s8t9v0wx",
    "tasks": {"sst2": {"train": "a.tsv"}},
    "methods": ["zero-shot"],
}


def test_every_key_of_a_sweep_can_be_asked_for_and_reaches_the_worker() -> None:
    keys = {field.name for field in fields(Sweep)} - {"models", "corpus"}
    assert EvaluationOptions.model_fields.keys() == keys
    assert EvaluationPayload.model_fields.keys() == keys | {"model_ids", "corpus_id"}


def test_defaults_are_those_of_a_sweep() -> None:
    body = EvaluationCreate.model_validate(BODY).model_dump(mode="json")
    for field in fields(Sweep):
        if field.default is not MISSING:
            default = list(field.default) if isinstance(field.default, tuple) else field.default
            assert body[field.name] == default, field.name


@pytest.mark.parametrize(
    "name",
    [
        *("zero-shot", "icl:1", "icl:256", "icl:0", "icl:257", "icl:", "icl:-1", "icl:1000"),
        *("zo:sensitive-c4", "fo:sensitive-task-dynamic", "zo:random", "zo:random-dynamic", "fo:full"),
        *("zo:lora-8", "fo:lora-fa-16", "zo:prefix-5", "zo:lora", "zo:lora-0", "zo:lora-257", "fo:full-3"),
        *("zo:", "so:full", "zero-shot ", "ZO:full", "zo:sensitive", "", "zo:outliers\n"),
    ],
)
def test_a_method_is_taken_where_the_sweep_takes_it(name: str) -> None:
    try:
        EvaluationCreate.model_validate({**BODY, "methods": [name]})
        taken = True
    except ValidationError:
        taken = False
    try:
        method(name)
        known = True
    except InputError:
        known = False
    assert taken == known


def test_every_task_can_be_named_and_nothing_else() -> None:
    body = {**BODY, "tasks": {task.value: {"train": "a.jsonl"} for task in Task}}
    assert list(EvaluationCreate.model_validate(body).tasks) == list(Task)
    for other in ("glue", "SST2", "sst2 ", ""):
        with pytest.raises(ValidationError):
            EvaluationCreate.model_validate({**BODY, "tasks": {other: {"train": "a.jsonl"}}})


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "../a.tsv", "a/../b.tsv", ".hidden", "a//b", "a/", "a\\b", "a\0b", "x" * 401, ""]
)
def test_paths_lead_nowhere_else(path: str) -> None:
    with pytest.raises(ValidationError):
        EvaluationCreate.model_validate({**BODY, "tasks": {"sst2": {"train": path}}})


def test_the_request_is_checked_without_torch() -> None:
    code = "import sys, permille.schemas.evaluations; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path.cwd(), check=False).returncode == 0

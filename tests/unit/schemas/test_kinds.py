"""Tests of the descriptions of job kinds: valid examples, and ids of the kind that the field's name says."""

from collections.abc import Iterator
from typing import Any

import pytest

from permille.errors import InputError
from permille.schemas.fields import examples_of
from permille.schemas.jobs import JobKind
from permille.schemas.kinds import WORK, parse_request, result_path
from permille.store.ids import Prefix

KINDS = {
    "corpus": Prefix.CORPUS,
    "mask": Prefix.MASK,
    "model": Prefix.MODEL,
    "quantization": Prefix.QUANTIZATION,
}
EXAMPLES = [(kind, name) for kind, work in WORK.items() for name in examples_of(work.request)]


def ids_of(value: Any, field: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for name, part in value.items():
            yield from ids_of(part, name)
    elif field.endswith("_id"):
        yield field.removesuffix("_id").rpartition("_")[2], value


@pytest.mark.parametrize(("kind", "name"), EXAMPLES)
def test_examples_are_requests_with_ids_of_the_kind_that_their_field_names(kind: JobKind, name: str) -> None:
    example = examples_of(WORK[kind].request)[name]
    parse_request(kind, example)
    found = list(ids_of(example))
    assert found or "package_digest" in example
    for noun, value in found:
        assert value.startswith(f"{KINDS[noun].value}_"), noun


def test_a_payload_of_another_version_is_refused_with_its_fields() -> None:
    with pytest.raises(InputError, match=r"mask\.fisher: .*surprise|surprise"):
        parse_request("mask", {"method": "random", "model_id": f"model_{'0' * 26}", "surprise": 1})
    with pytest.raises(InputError, match="only replay, shard, build, "):
        parse_request("evaluation", {})


def test_results_are_where_their_kind_is() -> None:
    assert result_path(JobKind.MASK, "mask_1") == "/v1/masks/mask_1"
    assert result_path(JobKind.BUILD, "sha256:1") == result_path(JobKind.PACKAGE, "sha256:1")
    assert result_path(JobKind.REPLAY, "run") == "/v1/runs/run"

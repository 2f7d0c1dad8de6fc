"""Examples of the OpenAPI document: each id is of the kind that its field names."""

from collections.abc import Iterator
from typing import Any

import pytest

from permille.store.ids import Prefix
from permille_service import openapi_examples

KINDS = {
    "corpus_id": Prefix.CORPUS,
    "evaluation_corpus_id": Prefix.CORPUS,
    "mask_id": Prefix.MASK,
    "model_id": Prefix.MODEL,
    "quantization_id": Prefix.QUANTIZATION,
    "calibration_corpus_id": Prefix.CORPUS,
}
EXAMPLES = [name for name in vars(openapi_examples) if name.endswith("_EXAMPLES")]


def ids_of(value: Any, field: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for name, part in value.items():
            yield from ids_of(part, name)
    elif isinstance(value, list):
        for part in value:
            yield from ids_of(part, field)
    elif field.endswith(("_id", "_ids")):
        yield field, value


@pytest.mark.parametrize("name", EXAMPLES)
def test_ids_are_of_the_kind_that_their_field_names(name: str) -> None:
    found = list(ids_of([example["value"] for example in getattr(openapi_examples, name).values()]))
    assert found
    for field, value in found:
        assert value.startswith(f"{KINDS[field].value}_"), field

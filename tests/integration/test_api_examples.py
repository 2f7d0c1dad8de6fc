"""The examples of request bodies in the OpenAPI document: each body has one, and each is valid."""

import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest
from tuf.api.metadata import Targets

from permille.schemas.runs import LOG_MEDIA_TYPE, STATE_MEDIA_TYPE, UPLOAD_EXAMPLES
from permille.schemas.trust import METADATA_EXAMPLES
from permille.trust.metadata import parse
from permille.zo.log import decode_canonical
from permille.zo.packed_state import decode_state
from tests.api_service import Api, running_api

JSON = "application/json"
SIGNED = "put_trust_metadata"
REFUSED = (401, 403, 404, 409, 429)
"""Statuses that the form of a body does not cause."""
ACCEPTED = {
    *("create_tenant", "create_token", "put_retention", "create_webhook", "create_group", "create_rollout"),
    *("create_invitation", "create_federation", "rotate_trust_keys", "renew_trust_metadata"),
    *("create_corpus", "put_device_facts", "create_run"),
}
"""Operations whose example is accepted if a device and two versions of the examples' release exist."""


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with running_api(tmp_path_factory.mktemp("api"), sign_ins_per_minute=10_000) as running:
        running.publish(running.package(), name="tiny-llama")
        newer = {"name": "tiny-llama", "package_digest": running.package(seed=1).digest}
        assert running.post("/v1/releases", newer).status_code == 201
        yield running


def bodies(api: Api) -> list[tuple[str, str, dict[str, Any]]]:
    """Return method, path and description of each operation with a body."""
    paths = api.client.get("/openapi.json").json()["paths"]
    return [
        (method, path, operation)
        for path, item in paths.items()
        for method, operation in item.items()
        if "requestBody" in operation
    ]


def test_every_body_has_a_named_example(api: Api) -> None:
    found = bodies(api)
    assert len(found) > 30
    for method, path, operation in found:
        for media_type, content in operation["requestBody"]["content"].items():
            assert content.get("examples"), (method, path, media_type)


def path_of(path: str, operation: dict[str, Any]) -> str:
    """Return a path with the examples of its parameters."""
    parameters = (one for one in operation.get("parameters", ()) if one["in"] == "path")
    return path.format_map({one["name"]: str(one["schema"]["examples"][0]) for one in parameters})


def test_no_example_is_refused_for_its_form(api: Api) -> None:
    """An example may name an object that does not exist. Operations in `ACCEPTED` need no other object."""
    device = api.device(release="tiny-llama").token()
    known, accepted = set(), set()
    for method, path, operation in bodies(api):
        known.add(operation["operationId"])
        examples = operation["requestBody"]["content"].get(JSON, {}).get("examples", {})
        for name, example in examples.items() if operation["operationId"] != SIGNED else ():
            statuses = set()
            for token in (api.token, device):
                answer = api.client.request(
                    method, path_of(path, operation), json=example["value"], headers=api.auth(token)
                )
                statuses.add(answer.status_code)
                assert answer.status_code < 300 or answer.status_code in REFUSED, (path, name, answer.text)
            if min(statuses) < 300:
                accepted.add(operation["operationId"])
    assert accepted >= ACCEPTED & known


def test_examples_of_bytes_are_what_they_say() -> None:
    log, state = (
        base64.b64decode(text, validate=True)
        for media_type in (LOG_MEDIA_TYPE, STATE_MEDIA_TYPE)
        for text in UPLOAD_EXAMPLES[media_type].values()
    )
    assert decode_canonical(log, max_bytes=1000, max_steps=10).steps == 2
    assert decode_state(state, max_bytes=1000, max_k=10).header.k == 8
    for example in METADATA_EXAMPLES.values():
        assert parse(Targets, json.dumps(example).encode()).signed.version == 2

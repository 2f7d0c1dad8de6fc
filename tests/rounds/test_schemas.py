"""Tests of the types of federations: closed, with a document, and the job that closes a round."""

import pytest
from pydantic import BaseModel

from permille.errors import InputError
from permille.schemas.fields import EXAMPLE_ULID, Closed
from permille.schemas.jobs import JobKind
from permille.schemas.kinds import WORK, parse_request, result_path
from permille_rounds import schemas
from permille_rounds.schemas import RoundRequest

RECORDS = [one for one in vars(schemas).values() if isinstance(one, type) and issubclass(one, BaseModel)]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_every_record_is_closed_and_has_a_document(record: type[BaseModel]) -> None:
    assert issubclass(record, Closed)
    assert record.model_config["extra"] == "forbid"
    assert record.model_json_schema()
    assert record.__doc__


def test_the_job_that_closes_a_round_has_a_payload_and_a_result_but_no_route() -> None:
    payload = {"federation_id": f"fed_{EXAMPLE_ULID}", "number": 3}
    assert parse_request("round", payload) == RoundRequest.model_validate(payload)
    with pytest.raises(InputError, match="number"):
        parse_request("round", {**payload, "number": -1})
    assert result_path(JobKind.ROUND, "fed_1") == "/v1/federations/fed_1"
    assert JobKind.ROUND not in WORK

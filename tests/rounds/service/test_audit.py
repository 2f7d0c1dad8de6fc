"""Changes of rounds by operators are noted in the audit log."""

from pathlib import Path

import permille_rounds.service
from tests.integration.test_api_audit import writers_in

OF_DEVICES = {
    "_note_refusal",
    "create_round_invitation",
    "delete_contribution",
    "delete_membership",
    "put_contribution",
    "put_membership",
}


def test_no_route_of_operators_writes_without_a_note() -> None:
    assert writers_in(Path(str(permille_rounds.service.__file__)).parent) == OF_DEVICES

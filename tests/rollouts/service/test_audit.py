"""Changes by operators are noted in the audit log."""

from pathlib import Path

import permille_rollouts.service
from tests.integration.test_api_audit import writers_in

OF_DEVICES = {"put_device_facts", "put_rollout_report"}


def test_no_route_of_operators_writes_without_a_note() -> None:
    assert writers_in(Path(str(permille_rollouts.service.__file__)).parent) == OF_DEVICES

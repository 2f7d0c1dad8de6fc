"""Numbers out of range from a service, and damaged records: none ends a member's daemon."""

import json
import threading
from pathlib import Path

import pytest

from permille.schemas.fields import EXAMPLE_ULID
from permille_agent.daemon.loop import Daemon, World
from permille_agent.link.api import DeviceApi
from permille_agent.link.client import ServiceUnavailableError
from permille_agent.link.enrolment import Enrolment
from permille_agent.link.report import enqueue
from permille_agent.state.choices import add_references
from permille_agent.state.home import Home
from permille_agent.state.models import installed_release
from permille_agent.state.policy import PowerAndLoad
from permille_rounds.agent.calls import FederationsApi
from permille_rounds.agent.membership import Membership, join
from permille_rounds.schemas import MAX_DEADLINE_S, FederationOffer, RoundInvitation
from tests.device_service import DeviceService, Fault
from tests.rounds.federations import make_definition
from tests.unit.edge_agent.conftest import fast_connection
from tests.unit.edge_agent.daemon.test_server_numbers import DIGEST, FAR, answer, check_bounds
from tests.unit.edge_agent.samples import RUN_ID, metrics

pytestmark = pytest.mark.attack(21, "numbers that end a member's daemon")

INVITED = {"round": 0, "seconds_left": 60.0, "start_digest": DIGEST}
FEDERATION = f"fed_{EXAMPLE_ULID}"
OFFER = {
    "id": FEDERATION,
    "name": "readers",
    "state": "running",
    "release": "tiny",
    "version": 1,
    "package_digest": DIGEST,
    "definition_digest": DIGEST,
    "number": 0,
    "rounds": 10,
    "adopted_round": None,
    "member": True,
    "target": 3,
}


@pytest.mark.parametrize("record", [FederationOffer, RoundInvitation])
def test_every_number_that_a_device_reads_has_both_bounds(
    record: type[FederationOffer] | type[RoundInvitation],
) -> None:
    check_bounds(record)


@pytest.mark.parametrize("number", FAR)
@pytest.mark.parametrize("name", ["seconds_left", "round"])
def test_an_invitation_with_a_number_out_of_range_is_no_answer(
    api: DeviceApi, service: DeviceService, name: str, number: str
) -> None:
    service.faults = [Fault(path="/invitations", status=201, body=answer(INVITED, name, number))]
    with pytest.raises(ServiceUnavailableError, match="malformed"):
        FederationsApi(api).invitation(FEDERATION)


@pytest.mark.parametrize("number", FAR)
@pytest.mark.parametrize("name", ["number", "rounds", "target"])
def test_an_offer_with_a_number_out_of_range_is_no_answer(
    api: DeviceApi, service: DeviceService, name: str, number: str
) -> None:
    body = b"[" + answer(OFFER, name, number) + b"]"
    service.faults = [Fault(path="/device/federations", status=200, body=body)]
    with pytest.raises(ServiceUnavailableError, match="malformed"):
        FederationsApi(api).offers()


def test_the_longest_deadline_is_read(api: DeviceApi, service: DeviceService) -> None:
    body = answer(INVITED, "seconds_left", str(MAX_DEADLINE_S))
    service.faults = [Fault(path="/invitations", status=201, body=body)]
    assert FederationsApi(api).invitation(FEDERATION) is not None


@pytest.mark.parametrize("data", [b"", b"{", b"\xff\xff", b'{"number": 1e99}', b'{"sha256": "0"}'])
def test_a_damaged_standing_of_one_federation_stops_neither_reports_nor_pulls(
    home: Home, enrolment: Enrolment, service: DeviceService, tmp_path: Path, data: bytes
) -> None:
    (tmp_path / "notes.txt").write_text("text of the user")
    add_references(home, [tmp_path / "notes.txt"])
    membership: Membership = join(home, make_definition(), federation_id=FEDERATION, name="readers")
    (membership.path / "standing.json").write_bytes(data)
    enqueue(home, RUN_ID, metrics(), shared_log=None)
    offer = {**OFFER, "definition_digest": membership.digest}
    service.faults = [
        Fault(path="/device/federations", status=200, body=json.dumps([offer]).encode(), times=9)
    ]
    trained: list[object] = []

    def train(*asked: object) -> str:
        trained.append(asked)
        return "adopted"

    idle = PowerAndLoad(on_ac=True, battery=None, load=0.0)
    world = World(connection=fast_connection, train=train, machine=lambda: idle)
    Daemon(home, threading.Event(), world).run_once()
    assert set(service.runs) == {RUN_ID}
    assert installed_release(home) is not None
    assert len(trained) == 1

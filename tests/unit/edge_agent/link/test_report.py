"""Reports: on disk until delivered, each once, metrics by default, logs by consent only."""

import json
import os
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from permille.errors import InputError, OperatorError
from permille.schemas.runs import MAX_LOG_BYTES
from permille_agent.link.api import DeviceApi
from permille_agent.link.client import AccessRefusedError, ServiceUnavailableError
from permille_agent.link.enrolment import Enrolment, open_api
from permille_agent.link.report import (
    Delivery,
    collect_reports,
    deliver,
    enqueue,
    queue_log,
    read_report,
    read_reports,
    want_deletion,
    withdraw_logs,
)
from permille_agent.state.choices import set_share_log, shares_log
from permille_agent.state.home import Home
from permille_agent.text.reading import DataReport
from permille_agent.training.options import TrainOptions
from permille_agent.training.outcome import RunOutcome
from permille_agent.training.run import BegunRun, RunDefinition, RunFolder
from tests.device_service import DeviceService, Fault
from tests.unit.edge_agent.conftest import fast_connection
from tests.unit.edge_agent.samples import OTHER_RUN_ID, RUN_ID, metrics

LOG = b"canonical log"


@pytest.fixture
def api(home: Home, enrolment: Enrolment) -> Iterator[DeviceApi]:
    """The service, as the enrolled device."""
    opened = open_api(home, connection=fast_connection)
    with opened.connection:
        yield opened


def test_metrics_arrive_without_the_state_digest_and_without_a_log(
    home: Home, api: DeviceApi, service: DeviceService
) -> None:
    enqueue(home, RUN_ID, metrics(), shared_log=None)
    assert deliver(home, api).sent == 1
    expected = metrics(state_digest=None).model_dump(mode="json")
    assert service.runs == {RUN_ID: expected}
    assert service.logs == {}


def test_a_shared_log_follows_its_metrics(home: Home, api: DeviceApi, service: DeviceService) -> None:
    enqueue(home, RUN_ID, metrics(), shared_log=LOG)
    deliver(home, api)
    assert service.runs[RUN_ID]["state_digest"] == "sha256:" + "b" * 64
    assert service.logs == {RUN_ID: LOG}
    assert not (home.reports / f"{RUN_ID}.log").exists()


@pytest.mark.parametrize("reported", [False, True])
def test_a_log_can_follow_a_report_that_went_without_it(
    home: Home, api: DeviceApi, service: DeviceService, *, reported: bool
) -> None:
    report = enqueue(home, RUN_ID, metrics(), shared_log=None)
    if reported:
        deliver(home, api)
        report = next(read_reports(home))
    queue_log(home, report, LOG)
    deliver(home, api)
    assert service.runs[RUN_ID]["state_digest"] is None
    assert service.logs == {RUN_ID: LOG}
    assert want_deletion(home, RUN_ID) == 1
    deliver(home, api)
    queue_log(home, next(read_reports(home)), LOG)
    assert deliver(home, api).sent == 1


def test_a_report_is_delivered_once(home: Home, api: DeviceApi, service: DeviceService) -> None:
    enqueue(home, RUN_ID, metrics(), shared_log=LOG)
    deliver(home, api)
    asked = len(service.requests)
    enqueue(home, RUN_ID, metrics(steps=7), shared_log=LOG)
    assert deliver(home, api).sent == 0
    assert len(service.requests) == asked


def test_reports_wait_for_the_network(home: Home, api: DeviceApi, service: DeviceService) -> None:
    enqueue(home, RUN_ID, metrics(), shared_log=None)
    enqueue(home, OTHER_RUN_ID, metrics(outcome="kept_base"), shared_log=None)
    service.faults = [Fault(path="/v1/runs", status=503, times=99)]
    with pytest.raises(ServiceUnavailableError):
        deliver(home, api)
    assert [report.waits for report in read_reports(home)] == [True, True]
    service.faults = []
    assert deliver(home, api).sent == 2
    assert set(service.runs) == {RUN_ID, OTHER_RUN_ID}


def test_an_answer_that_got_lost_is_asked_for_again(
    home: Home, api: DeviceApi, service: DeviceService
) -> None:
    enqueue(home, RUN_ID, metrics(), shared_log=LOG)
    service.faults = [Fault(path="log", status=502, times=99)]
    with pytest.raises(ServiceUnavailableError):
        deliver(home, api)
    report = read_report(home, RUN_ID)
    assert report is not None
    assert (report.metrics_delivery, report.log_delivery) == (Delivery.SENT, Delivery.QUEUED)
    service.faults = []
    deliver(home, api)
    assert service.logs == {RUN_ID: LOG}


def test_a_refused_report_does_not_block_the_next(home: Home, api: DeviceApi, service: DeviceService) -> None:
    enqueue(home, RUN_ID, metrics(), shared_log=LOG)
    enqueue(home, OTHER_RUN_ID, metrics(), shared_log=None)
    service.faults = [Fault(path="/v1/runs", status=422)]
    delivered = deliver(home, api)
    assert (delivered.sent, delivered.refused) == (1, 1)
    refused = read_report(home, RUN_ID)
    assert refused is not None
    assert (refused.metrics_delivery, refused.log_delivery) == (Delivery.REFUSED, Delivery.NONE)
    assert "422" in refused.reason
    assert not refused.waits
    assert service.logs == {}


def test_a_revoked_device_keeps_its_reports(
    home: Home, api: DeviceApi, service: DeviceService, enrolment: Enrolment
) -> None:
    enqueue(home, RUN_ID, metrics(), shared_log=None)
    service.revoked.add(enrolment.device_id)
    with pytest.raises(AccessRefusedError):
        deliver(home, api)
    assert next(iter(read_reports(home))).waits


def test_withdrawn_consent_removes_the_log_that_waits(
    home: Home, api: DeviceApi, service: DeviceService
) -> None:
    enqueue(home, RUN_ID, metrics(), shared_log=LOG)
    assert withdraw_logs(home) == 1
    deliver(home, api)
    assert service.logs == {}
    assert service.runs[RUN_ID]["state_digest"] is None
    assert not list(home.reports.glob("*.log"))


def test_withdrawn_consent_reaches_an_upload_whose_answer_was_lost(
    home: Home, api: DeviceApi, service: DeviceService
) -> None:
    enqueue(home, RUN_ID, metrics(), shared_log=LOG)
    service.faults = [Fault(path="log", status=503, times=99)]
    with pytest.raises(ServiceUnavailableError):
        deliver(home, api)
    service.faults = []
    service.logs[RUN_ID] = LOG  # it had arrived
    assert withdraw_logs(home) == 1
    deliver(home, api)
    assert service.logs == {}
    assert not any(report.waits for report in read_reports(home))


def test_an_uploaded_log_is_deleted_on_request(home: Home, api: DeviceApi, service: DeviceService) -> None:
    enqueue(home, RUN_ID, metrics(), shared_log=LOG)
    deliver(home, api)
    assert want_deletion(home, RUN_ID) == 1
    deliver(home, api)
    assert service.deleted_logs == [RUN_ID]
    report = read_report(home, RUN_ID)
    assert report is not None
    assert report.log_delivery is Delivery.DELETED
    with pytest.raises(InputError, match="was uploaded"):
        want_deletion(home, RUN_ID)


def test_a_log_that_the_service_no_longer_has_counts_as_deleted(
    home: Home, api: DeviceApi, service: DeviceService
) -> None:
    enqueue(home, RUN_ID, metrics(), shared_log=LOG)
    deliver(home, api)
    service.logs.clear()
    want_deletion(home, None)
    deliver(home, api)
    assert not next(iter(read_reports(home))).waits


@pytest.mark.parametrize("run_id", ["", "../../evil", RUN_ID.upper(), RUN_ID + "\n"])
def test_what_is_no_uuid_is_no_run(home: Home, run_id: str) -> None:
    with pytest.raises(InputError, match="uuid"):
        enqueue(home, run_id, metrics(), shared_log=None)
    assert not list(home.reports.iterdir())


def test_a_log_beyond_the_limit_is_refused_here(home: Home) -> None:
    with pytest.raises(InputError, match="at most"):
        enqueue(home, RUN_ID, metrics(), shared_log=bytes(MAX_LOG_BYTES + 1))


def test_consent_is_off_until_the_user_says_so(home: Home) -> None:
    assert not shares_log(home)
    set_share_log(home, True, now=datetime.now(UTC))
    assert shares_log(home)
    set_share_log(home, False, now=datetime.now(UTC))
    assert not shares_log(home)


@pytest.mark.parametrize("text", ['{"share_log": "true"}', '{"share_log": 1}'])
def test_only_a_plain_yes_is_consent(home: Home, text: str) -> None:
    home.consent.write_text("{}")
    assert not shares_log(home)
    home.consent.write_text(text)
    with pytest.raises(OperatorError, match=r"consent\.json: share_log"):
        shares_log(home)


def finished_run(home: Home, name: str, run_id: str, **changes: object) -> RunFolder:
    """A run folder as training leaves it."""
    run = RunFolder(home.runs / name)
    run.path.mkdir()
    definition = RunDefinition(package="a", data="b", options=TrainOptions(steps=1))
    run.store("run", BegunRun(run_id=run_id, definition=definition))
    run.store("outcome", RunOutcome(message="", metrics=metrics(), data=DataReport()))
    if changes:
        path = run.path / "outcome.json"
        outcome = json.loads(path.read_text())
        outcome["metrics"] |= changes
        path.write_text(json.dumps(outcome))
    return run


def test_a_run_that_ended_before_it_was_reported_is_found(
    home: Home, api: DeviceApi, service: DeviceService
) -> None:
    finished_run(home, "a", RUN_ID)
    shared = finished_run(home, "b", OTHER_RUN_ID)
    (shared.path / "shared.log").write_bytes(LOG)
    assert [collect_reports(home), collect_reports(home)] == [2, 0]
    deliver(home, api)
    assert set(service.runs) == {RUN_ID, OTHER_RUN_ID}
    assert service.logs == {OTHER_RUN_ID: LOG}


def test_consent_withdrawn_during_a_run_holds_for_its_log(
    home: Home, api: DeviceApi, service: DeviceService
) -> None:
    before, after = finished_run(home, "a", RUN_ID), finished_run(home, "b", OTHER_RUN_ID)
    for run, begun_s in ((before, 1000.0), (after, 3000.0)):
        (run.path / "shared.log").write_bytes(LOG)
        os.utime(run.path / "run.json", (begun_s, begun_s))
    set_share_log(home, False, now=datetime.fromtimestamp(2000.0, UTC))
    collect_reports(home)
    deliver(home, api)
    assert service.logs == {OTHER_RUN_ID: LOG}
    assert service.runs[RUN_ID]["state_digest"] is None


def test_a_run_that_goes_on_is_not_reported(home: Home) -> None:
    run = finished_run(home, "c", RUN_ID)
    (run.path / "outcome.json").unlink()
    assert collect_reports(home) == 0


@pytest.mark.parametrize(
    "change", [{"note": "text of the user"}, {"outcome": "text of the user"}, {"steps": "x"}]
)
def test_metrics_beyond_the_closed_schema_never_enter_the_queue(
    home: Home, change: dict[str, object]
) -> None:
    finished_run(home, "a", RUN_ID, **change)
    with pytest.raises(OperatorError, match=r"RunOutcome in .*: metrics\.") as refused:
        collect_reports(home)
    assert "text of the user" not in str(refused.value)
    assert not list(home.reports.iterdir())

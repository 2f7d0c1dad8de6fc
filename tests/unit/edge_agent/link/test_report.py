"""Tests of reports: stored until delivered, delivered once, metrics by default, logs only with consent."""

import json
from dataclasses import dataclass

import pytest

from permille.errors import InputError, OperatorError
from permille.schemas.problems import ProblemType
from permille.schemas.runs import MAX_LOG_BYTES
from permille_agent.link import report as module
from permille_agent.link.api import DeviceApi
from permille_agent.link.client import AccessRefusedError, ServiceUnavailableError
from permille_agent.link.enrolment import Enrolment
from permille_agent.link.report import (
    Delivered,
    Delivery,
    RunReport,
    collect_reports,
    deliver,
    enqueue,
    queue_again,
    queue_log,
    read_report,
    read_reports,
    want_deletion,
    withdraw_logs,
)
from permille_agent.link.rounding import rounded
from permille_agent.state.choices import read_consent, set_sharing
from permille_agent.state.home import CHECKSUM, Home
from permille_agent.text.report import DataReport
from permille_agent.training.options import TrainOptions
from permille_agent.training.outcome import RunOutcome
from permille_agent.training.run import AgreedTo, BegunRun, RunDefinition, RunFolder
from tests.device_service import DeviceService, Fault
from tests.unit.edge_agent.samples import OTHER_RUN_ID, RUN_ID, metrics

LOG = b"canonical log"
NO_ROOM = json.dumps({"type": ProblemType.QUOTA_SPENT.uri, "detail": "as much is kept as may be"}).encode()


@dataclass(frozen=True)
class Device:
    home: Home
    api: DeviceApi
    service: DeviceService

    def queue(self, run_id: str = RUN_ID, *, log: bytes | None = LOG, **changes: object) -> RunReport:
        return enqueue(self.home, run_id, metrics(**changes), shared_log=log)

    def deliver(self) -> Delivered:
        return deliver(self.home, self.api)

    def deliver_in_vain(self, path: str) -> None:
        """Deliver while requests to `path` fail."""
        self.service.faults = [Fault(path=path, status=503, times=99)]
        with pytest.raises(ServiceUnavailableError):
            self.deliver()
        self.service.faults = []

    def report(self) -> RunReport:
        found = read_report(self.home, RUN_ID)
        assert found is not None
        return found


@pytest.fixture
def device(home: Home, api: DeviceApi, service: DeviceService) -> Device:
    return Device(home, api, service)


def test_metrics_arrive_without_the_state_digest_and_without_a_log(device: Device) -> None:
    device.queue(log=None)
    assert device.deliver().sent == 1
    assert device.service.runs == {RUN_ID: rounded(metrics(state_digest=None)).model_dump(mode="json")}
    assert device.service.logs == {}


def test_a_shared_log_follows_its_metrics_once(device: Device) -> None:
    device.queue()
    device.deliver()
    assert device.service.runs[RUN_ID]["state_digest"] == "sha256:" + "b" * 64
    assert device.service.logs == {RUN_ID: LOG}
    assert not (device.home.reports / f"{RUN_ID}.log").exists()
    asked = len(device.service.requests)
    device.queue(steps=7)
    assert device.deliver().sent == 0
    assert len(device.service.requests) == asked


@pytest.mark.parametrize("reported", [False, True])
def test_a_log_can_follow_a_report_that_went_without_it(device: Device, *, reported: bool) -> None:
    device.queue(log=None)
    if reported:
        device.deliver()
    queue_log(device.home, device.report(), LOG, withdrawals=0)
    device.deliver()
    assert device.service.runs[RUN_ID]["state_digest"] is None
    assert device.service.logs == {RUN_ID: LOG}
    assert want_deletion(device.home, RUN_ID) == 1
    device.deliver()
    queue_log(device.home, device.report(), LOG, withdrawals=0)
    assert device.deliver().sent == 1


def test_reports_wait_for_the_network(device: Device) -> None:
    device.queue(log=None)
    device.queue(OTHER_RUN_ID, log=None, outcome="kept_base")
    device.deliver_in_vain("/v1/runs")
    assert [report.waits for report in read_reports(device.home)] == [True, True]
    assert device.deliver().sent == 2
    assert set(device.service.runs) == {RUN_ID, OTHER_RUN_ID}


def test_reports_are_sent_in_the_order_in_which_their_runs_ended(device: Device) -> None:
    last, first = sorted((RUN_ID, OTHER_RUN_ID))
    device.queue(last, log=None, ended_at="2026-11-20T12:00:00Z")
    device.queue(first, log=None, ended_at="2026-11-20T11:00:00Z")
    device.deliver()
    assert list(device.service.runs) == [first, last]


def test_an_answer_that_got_lost_is_asked_for_again(device: Device) -> None:
    device.queue()
    device.deliver_in_vain("log")
    report = device.report()
    assert (report.metrics_delivery, report.log_delivery) == (Delivery.SENT, Delivery.QUEUED)
    device.deliver()
    assert device.service.logs == {RUN_ID: LOG}


def test_a_refused_report_does_not_block_the_next(device: Device) -> None:
    device.queue()
    device.queue(OTHER_RUN_ID, log=None)
    device.service.faults = [Fault(path="/v1/runs", status=422)]
    delivered, refused = device.deliver(), device.report()
    assert (delivered.sent, delivered.refused) == (1, 1)
    assert (refused.metrics_delivery, refused.log_delivery) == (Delivery.REFUSED, Delivery.NONE)
    assert "422" in refused.reason
    assert not refused.waits
    assert device.service.logs == {}


@pytest.mark.parametrize("path", ["/v1/runs", "log"])
def test_what_the_service_has_no_room_for_is_kept_and_goes_when_the_user_asks(
    device: Device, path: str
) -> None:
    device.queue()
    device.service.faults = [Fault(path=path, status=409, body=NO_ROOM)]
    assert device.deliver().refused == 1
    asked, report = len(device.service.requests), device.report()
    assert report.metrics_delivery is (Delivery.SENT if path == "log" else Delivery.FULL)
    assert report.log_delivery is Delivery.FULL
    assert "409" in report.reason and (device.home.reports / f"{RUN_ID}.log").read_bytes() == LOG
    assert device.deliver() == Delivered(sent=0, refused=0)
    assert len(device.service.requests) == asked, "it was not asked to try again"
    queue_again(device.home)
    assert device.deliver() == Delivered(sent=1, refused=0)
    assert (set(device.service.runs), device.service.logs) == ({RUN_ID}, {RUN_ID: LOG})
    queue_again(device.home)
    assert not device.report().waits


def test_a_log_that_found_no_room_goes_with_the_consent(device: Device) -> None:
    device.queue()
    device.service.faults = [Fault(path="/v1/runs", status=409, body=NO_ROOM)]
    device.deliver()
    assert withdraw_logs(device.home) == 1
    assert device.report().log_delivery is Delivery.NONE
    assert not (device.home.reports / f"{RUN_ID}.log").exists()


def test_the_reason_of_a_refused_log_goes_with_the_log(device: Device) -> None:
    device.queue()
    device.service.faults = [Fault(path="log", status=409, body=NO_ROOM)]
    device.deliver()
    assert "409" in device.report().reason
    assert withdraw_logs(device.home) == 1
    assert device.report().reason == ""
    device.service.faults = [Fault(path="log", status=400)]
    assert device.deliver() == Delivered(sent=0, refused=1)
    assert "400" in device.report().reason
    assert device.deliver() == Delivered(sent=1, refused=0)
    assert device.report().reason == ""


def test_a_revoked_device_keeps_its_reports(device: Device, enrolment: Enrolment) -> None:
    device.queue(log=None)
    device.service.revoked.add(enrolment.device_id)
    with pytest.raises(AccessRefusedError):
        device.deliver()
    assert device.report().waits


def test_withdrawn_consent_removes_the_log_that_waits(device: Device) -> None:
    device.queue()
    assert withdraw_logs(device.home) == 1
    device.deliver()
    assert device.service.logs == {}
    assert device.service.runs[RUN_ID]["state_digest"] is None
    assert not list(device.home.reports.glob("*.log"))


def test_withdrawn_consent_reaches_an_upload_whose_answer_was_lost(device: Device) -> None:
    device.queue()
    device.deliver_in_vain("log")
    device.service.logs[RUN_ID] = LOG  # the log arrived, and only the answer was lost
    assert withdraw_logs(device.home) == 1
    device.deliver()
    assert device.service.logs == {}
    assert not device.report().waits


def test_an_uploaded_log_is_deleted_on_request(device: Device) -> None:
    device.queue()
    device.deliver()
    assert want_deletion(device.home, RUN_ID) == 1
    device.deliver()
    assert device.service.deleted_logs == [RUN_ID]
    assert device.report().log_delivery is Delivery.DELETED
    with pytest.raises(InputError, match="was uploaded"):
        want_deletion(device.home, RUN_ID)


def test_a_log_that_the_service_no_longer_has_counts_as_deleted(device: Device) -> None:
    device.queue()
    device.deliver()
    device.service.logs.clear()
    want_deletion(device.home, None)
    device.deliver()
    assert not device.report().waits


@pytest.mark.parametrize("run_id", ["", "../../evil", RUN_ID.upper(), RUN_ID + "\n"])
def test_what_is_no_uuid_is_no_run(home: Home, run_id: str) -> None:
    with pytest.raises(InputError, match="must be a UUID"):
        enqueue(home, run_id, metrics(), shared_log=None)
    assert not list(home.reports.iterdir())


def test_a_log_beyond_the_limit_is_refused_here(home: Home) -> None:
    with pytest.raises(InputError, match="can be sent"):
        enqueue(home, RUN_ID, metrics(), shared_log=bytes(MAX_LOG_BYTES + 1))


def test_only_a_plain_yes_is_consent(home: Home) -> None:
    assert not read_consent(home).share_log
    for chosen in (True, False):
        set_sharing(home, log=chosen)
        assert read_consent(home).share_log is chosen
    home.consent.write_text("{}")
    assert not read_consent(home).share_log
    for text in ('{"share_log": "true"}', '{"share_log": 1}'):
        home.consent.write_text(text)
        with pytest.raises(OperatorError, match=r"consent\.json is damaged.*: share_log"):
            read_consent(home)


def finished_run(
    home: Home, name: str, run_id: str, *, log: bytes = b"", withdrawals: int = 0, **changes: object
) -> RunFolder:
    """Write a run folder as training leaves it."""
    run = RunFolder(home.runs / name)
    run.path.mkdir()
    definition = RunDefinition(package="a", data="b", options=TrainOptions(steps=1))
    run.store("run", BegunRun(run_id=run_id, began_at=metrics().began_at, definition=definition))
    run.store("outcome", RunOutcome(message="", metrics=metrics(), data=DataReport()))
    if changes:
        path = run.path / "outcome.json"
        outcome = json.loads(path.read_text())
        outcome["metrics"] |= changes
        del outcome[CHECKSUM]
        path.write_text(json.dumps(outcome))
    if log:
        run.store("consent", AgreedTo(withdrawals=withdrawals))
        (run.path / "shared.log").write_bytes(log)
    return run


def test_a_run_that_ended_before_it_was_reported_is_found(device: Device) -> None:
    finished_run(device.home, "a", RUN_ID)
    finished_run(device.home, "b", OTHER_RUN_ID, log=LOG)
    (finished_run(device.home, "c", "going-on").path / "outcome.json").unlink()
    assert [collect_reports(device.home), collect_reports(device.home)] == [2, 0]
    device.deliver()
    assert set(device.service.runs) == {RUN_ID, OTHER_RUN_ID}
    assert device.service.logs == {OTHER_RUN_ID: LOG}


def test_a_log_that_is_too_large_does_not_hold_back_the_reports(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished_run(device.home, "a", RUN_ID, log=LOG)
    finished_run(device.home, "b", OTHER_RUN_ID)
    monkeypatch.setattr(module, "MAX_LOG_BYTES", len(LOG) - 1)
    assert [collect_reports(device.home), collect_reports(device.home)] == [2, 0]
    device.deliver()
    assert (set(device.service.runs), device.service.logs) == ({RUN_ID, OTHER_RUN_ID}, {})
    assert device.service.runs[RUN_ID]["state_digest"] is None
    assert device.report().log_delivery is Delivery.REFUSED
    assert "can be sent" in device.report().reason


def test_consent_withdrawn_during_a_run_holds_for_its_log(device: Device) -> None:
    finished_run(device.home, "a", RUN_ID, log=LOG)
    set_sharing(device.home, log=False)
    # This run began after the withdrawal, with its own consent (`--share-log`), which is still valid.
    finished_run(device.home, "b", OTHER_RUN_ID, log=LOG, withdrawals=1)
    set_sharing(device.home, log=True)
    collect_reports(device.home)
    device.deliver()
    assert device.service.logs == {OTHER_RUN_ID: LOG}
    assert device.service.runs[RUN_ID]["state_digest"] is None


@pytest.mark.parametrize(
    "change", [{"note": "text of the user"}, {"outcome": "text of the user"}, {"steps": "x"}]
)
def test_metrics_beyond_the_closed_schema_never_enter_the_queue(
    home: Home, change: dict[str, object]
) -> None:
    finished_run(home, "a", RUN_ID, **change)  # type: ignore[arg-type]
    with pytest.raises(OperatorError, match=r"and holds no RunOutcome: metrics\.") as refused:
        collect_reports(home)
    assert "text of the user" not in str(refused.value)
    assert not list(home.reports.iterdir())

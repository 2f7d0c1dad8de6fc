"""Tests of erasing: overwriting, the files that stay, and the deletion requests to the service."""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from filelock import FileLock, Timeout

from permille.errors import OperatorError
from permille.package.blobs import BlobFolder
from permille.package.reader import Package
from permille_agent.link import extension
from permille_agent.link import forget as forget_module
from permille_agent.link.api import DeviceApi, load_identity
from permille_agent.link.client import ServiceUnavailableError
from permille_agent.link.enrolment import Enrolment, load_enrolment
from permille_agent.link.forget import PROMISE, forget, unenroll
from permille_agent.link.pull import pull
from permille_agent.link.report import deliver, enqueue, read_reports
from permille_agent.state.choices import add_references, read_consent, read_references, set_sharing
from permille_agent.state.home import Home
from permille_agent.state.lock import hold_lock
from permille_agent.state.models import active_model, installed_release
from tests.device_service import DeviceService, Fault
from tests.unit.edge_agent.samples import OTHER_RUN_ID, RUN_ID, metrics

SECRET = b"a secret of the user"
NOW_S = 1_800_000_000


def use(home: Home, user_file: Path) -> list[Path]:
    """Create the files that normal use leaves. Return those that contain the secret."""
    user_file.write_bytes(SECRET)
    add_references(home, [user_file])
    set_sharing(home, log=True)
    run = home.runs / "r" / "deep"
    run.mkdir(parents=True)
    traces = [run / "journal", home.current, home.daemon]
    traces += [home.root / name for name in ("daemon.log", "of-a-later-version")]
    for path in traces:
        path.write_bytes(SECRET)
    return traces


def upload_log(home: Home, api: DeviceApi) -> None:
    """Deliver a report and its log to the service."""
    enqueue(home, RUN_ID, metrics(), shared_log=b"log")
    deliver(home, api)


def deliver_in_vain(home: Home, api: DeviceApi, service: DeviceService) -> None:
    """Deliver while the service accepts no logs."""
    service.faults = [Fault(path="log", status=503, times=99)]
    with pytest.raises(ServiceUnavailableError):
        deliver(home, api)
    service.faults = []


def test_everything_of_the_user_is_gone_and_the_rest_stays(
    home: Home, api: DeviceApi, enrolment: Enrolment, package: Package, tmp_path: Path
) -> None:
    pull(home, api, enrolment, now_s=NOW_S)
    home.policy.write_text("minutes_per_day = 5\n")
    traces = use(home, tmp_path / "notes.txt")
    with traces[0].open("rb") as still_open:
        assert forget(home).files >= len(traces) + 1
        assert still_open.read() == bytes(len(SECRET))  # overwritten before the removal
    assert (tmp_path / "notes.txt").read_bytes() == SECRET
    assert not any(path.exists() for path in traces)
    assert not any(SECRET in path.read_bytes() for path in home.root.rglob("*") if path.is_file())
    assert not read_consent(home).share_log
    assert read_references(home) == ()
    assert home.policy.exists()
    assert load_enrolment(home) == enrolment
    assert Package.open(BlobFolder(home.blobs), package.digest).digest == package.digest
    active = active_model(home)
    assert active is not None and active.run is None
    assert forget(home).files == 0
    assert all(word in PROMISE for word in ("snapshots", "backups", "swap", "not touched"))


def test_a_choice_that_no_installed_part_can_withdraw_stops_the_erasing(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traces = use(home, tmp_path / "notes.txt")
    choice = home.federations / "0" / "joined.json"
    choice.parent.mkdir(parents=True)
    choice.write_bytes(b"{}")
    with monkeypatch.context() as damaged:
        damaged.setattr(extension, "agent_extensions", lambda: ())
        with pytest.raises(OperatorError, match=r"Nothing was erased.*joined\.json.*Install all of permille"):
            forget(home)
    assert choice.read_bytes() == b"{}"
    assert all(path.exists() for path in traces)
    assert not read_consent(home).share_log


@pytest.mark.parametrize("stays", [True, False])
def test_the_file_of_a_withdrawn_choice_stays_until_the_service_knows(
    home: Home, monkeypatch: pytest.MonkeyPatch, stays: bool
) -> None:
    choice = home.federations / "0" / "joined.json"
    choice.parent.mkdir(parents=True)
    choice.write_bytes(b"{}")
    (choice.parent / "history.bin").write_bytes(SECRET)

    class Withdrawing:
        def withdraw(self, _home: Home) -> Mapping[Path, bool]:
            return {choice: stays}

        def tell_service(self, _home: Home) -> bool:
            return False

    monkeypatch.setattr(forget_module, "choices", lambda: [Withdrawing()])
    assert forget(home).federations_left == stays
    assert [path for path in home.federations.rglob("*") if path.is_file()] == [choice] * stays


@pytest.mark.parametrize("name", ["lock", "daemon_lock", "rounds_lock"])
def test_a_lock_that_is_held_stays_held(home: Home, name: str) -> None:
    path: Path = getattr(home, name)
    with hold_lock(home, "another command", of=path):
        forget(home)
        with pytest.raises(Timeout):
            FileLock(path).acquire(timeout=0)


def test_a_link_is_removed_and_its_target_is_not(home: Home, tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside.txt", tmp_path / "folder"
    outside.write_bytes(SECRET)
    folder.mkdir()
    (folder / "file").write_bytes(SECRET)
    (home.runs / "link").symlink_to(outside)
    (home.runs / "folder").symlink_to(folder)
    # Overwriting the content of a hard link would destroy the file outside.
    os.link(outside, home.runs / "hard")
    forget(home)
    assert outside.read_bytes() == (folder / "file").read_bytes() == SECRET
    assert list(home.runs.iterdir()) == []


def test_uploaded_logs_are_deleted_at_the_service_even_later(
    home: Home, api: DeviceApi, service: DeviceService
) -> None:
    upload_log(home, api)
    enqueue(home, OTHER_RUN_ID, metrics(), shared_log=b"not sent yet")
    assert forget(home).deletions_waiting == 1
    deliver_in_vain(home, api, service)
    assert forget(home).deletions_waiting == 1
    deliver(home, api)
    assert service.deleted_logs == [RUN_ID]
    assert set(service.runs) == {RUN_ID}
    assert not any(report.waits for report in read_reports(home))


def test_the_wish_to_delete_survives_what_cannot_be_erased(
    home: Home, api: DeviceApi, service: DeviceService, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload_log(home, api)
    (home.root / "stuck").write_bytes(SECRET)
    unlink = Path.unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path.name == "stuck":
            raise PermissionError("read-only file system")
        unlink(path, missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        # The report is erased before the file that cannot be erased.
        report: tuple[str, list[str], list[str]] = (str(home.reports), [], [f"{RUN_ID}.json"])
        patch.setattr("os.walk", lambda *_, **__: iter([report, (str(home.root), [], ["stuck"])]))
        with pytest.raises(OperatorError, match="Cannot erase"):
            forget(home)
    deliver(home, api)
    assert service.logs == {}


def test_a_log_whose_upload_was_cut_off_is_deleted_too(
    home: Home, api: DeviceApi, service: DeviceService
) -> None:
    enqueue(home, RUN_ID, metrics(), shared_log=b"log")
    deliver_in_vain(home, api, service)
    service.logs[RUN_ID] = b"log"  # the log arrived, and only the answer was lost
    assert forget(home).deletions_waiting == 1
    deliver(home, api)
    assert service.logs == {}


def test_who_leaves_uploads_nothing_more(home: Home, api: DeviceApi, service: DeviceService) -> None:
    enqueue(home, RUN_ID, metrics(), shared_log=b"log")
    unenroll(home, api)
    assert service.logs == {}
    assert service.runs[RUN_ID]["state_digest"] is None


def test_unenroll_leaves_at_the_service_and_here(
    home: Home, api: DeviceApi, enrolment: Enrolment, service: DeviceService
) -> None:
    pull(home, api, enrolment, now_s=NOW_S)
    upload_log(home, api)
    unenroll(home, api)
    assert service.devices == {}
    assert service.logs == {}
    assert (load_enrolment(home), load_identity(home)) == (None, None)
    assert list(read_reports(home)) == []
    assert installed_release(home) is not None
    assert not home.trust.exists()


def test_unenroll_keeps_the_key_while_the_service_is_away(
    home: Home, api: DeviceApi, enrolment: Enrolment, service: DeviceService
) -> None:
    service.faults = [Fault(path="/v1/", status=503, times=99)]
    with pytest.raises(ServiceUnavailableError):
        unenroll(home, api)
    assert load_enrolment(home) == enrolment
    assert load_identity(home) is not None
    unenroll(home, None)
    assert (load_enrolment(home), load_identity(home)) == (None, None)


def test_a_revoked_device_can_unenroll(
    home: Home, api: DeviceApi, enrolment: Enrolment, service: DeviceService
) -> None:
    service.revoked.add(enrolment.device_id)
    unenroll(home, api)
    assert load_enrolment(home) is None

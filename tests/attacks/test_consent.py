"""If consent is withdrawn during a run, neither log nor state leaves the device, whatever its clock says."""

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from permille.package.reader import Package
from permille.schemas.runs import Outcome
from permille.zo.estimators import Batch
from permille_agent.link.client import Connection
from permille_agent.link.enrolment import enroll, open_api
from permille_agent.link.report import Delivery, collect_reports, deliver, log_delivery
from permille_agent.state.choices import read_consent, set_sharing
from permille_agent.state.home import Home
from tests.bigram_engine import BigramEngine
from tests.device_service import DeviceService, Fault, serving
from tests.unit.edge_agent.runs import home_with_package, train_quickly, user_text

FAR_AHEAD_S = 4_000_000_000.0


def _connect(server: str, ca_file: Path | None) -> Connection:
    return Connection(server, ca_file=ca_file, sleep=lambda _seconds: None, rng=random.Random(0))


@contextmanager
def _device(folder: Path) -> Iterator[tuple[Home, DeviceService]]:
    home, package = home_with_package(folder / "home")
    with serving(package.blobs.root) as service:
        service.publish(package.digest, 1)
        enroll(home, service.url, service.invitation, connection=_connect)
        yield home, service


def _share_log(home: Home, choice: str) -> None:
    command = [sys.executable, "-m", "permille_agent", "--home", str(home.root), "share-log", choice]
    subprocess.run(command, check=True, capture_output=True)


def _as_if_the_clock_went_back(folder: Path) -> None:
    """Set the times of all files to one in the future."""
    for path in folder.rglob("*"):
        os.utime(path, (FAR_AHEAD_S, FAR_AHEAD_S))


def _send_all(home: Home) -> None:
    collect_reports(home)
    _as_if_the_clock_went_back(home.reports)
    with open_api(home, connection=_connect) as api:
        deliver(home, api)


@pytest.mark.attack(3, "`share-log off` during a run, under a clock that went back")
@pytest.mark.parametrize("again", [False, True])
def test_a_log_is_not_sent_once_consent_was_withdrawn_whatever_the_clock(tmp_path: Path, again: bool) -> None:
    with _device(tmp_path) as (home, service):
        _share_log(home, "on")

        class Withdrawing(BigramEngine):
            """An engine during whose work the user withdraws consent."""

            def __init__(self, package: Package) -> None:
                super().__init__(package)
                self.left = 8

            def losses(self, values_VK: NDArray[np.float32], batch: Batch) -> NDArray[np.float32]:
                self.left -= 1
                if not self.left:
                    _as_if_the_clock_went_back(home.runs)
                    _share_log(home, "off")
                    if again:
                        _share_log(home, "on")
                return super().losses(values_VK, batch)

        result = train_quickly(home, [user_text(tmp_path)], share_log=True, engine_of=Withdrawing)
        assert result.outcome is Outcome.ADOPTED
        assert read_consent(home).withdrawals == 1
        assert (home.runs / result.run / "shared.log").exists()
        _as_if_the_clock_went_back(home.runs)
        _send_all(home)
        assert service.logs == {}
        assert [run["state_digest"] for run in service.runs.values()] == [None]


@pytest.mark.attack(3, "`share-log off` after the report was queued, under a clock that went back")
def test_a_log_that_waits_is_not_sent_once_consent_was_withdrawn(tmp_path: Path) -> None:
    with _device(tmp_path) as (home, service):
        changes: dict[str, Any] = {"share_log": True, "engine_of": BigramEngine}
        _share_log(home, "on")
        train_quickly(home, [user_text(tmp_path)], **changes)
        collect_reports(home)
        assert list(home.reports.glob("*.log"))
        consent = home.consent.read_bytes()
        _share_log(home, "off")
        assert home.consent.read_bytes() != consent
        _send_all(home)
        assert service.logs == {}


@pytest.mark.attack(3, "`share-log off` while the log is sent: between two tries, and as its bytes arrive")
@pytest.mark.parametrize("moment", ["between", "arriving"])
def test_consent_that_is_withdrawn_during_the_upload_counts(tmp_path: Path, moment: str) -> None:
    with _device(tmp_path) as (home, service):
        _share_log(home, "on")
        result = train_quickly(home, [user_text(tmp_path)], share_log=True, engine_of=BigramEngine)
        collect_reports(home)
        log = next(home.reports.glob("*.log")).read_bytes()
        if moment == "between":
            service.faults = [Fault(path="log", status=503)]

        def withdraw(_wait_s: float) -> None:
            set_sharing(home, log=False)

        if moment == "arriving":
            real = service.take_fault

            def arriving(path: str) -> Fault | None:
                if path.endswith("/log"):
                    withdraw(0.0)
                return real(path)

            service.take_fault = arriving  # type: ignore[method-assign]
        with open_api(home, connection=lambda server, ca_file: Connection(server, sleep=withdraw)) as api:
            deliver(home, api)
        assert not service.logs
        assert not list(home.reports.glob("*.log"))
        # The upload that was under way has sent the log once.
        assert sum(log in sent for sent in service.traffic) == 1
        assert log_delivery(home, result.run_id) is Delivery.DELETED


@pytest.mark.attack(3, "a log agreed to, with a clock that never stands still")
def test_a_log_that_is_agreed_to_is_sent_whatever_the_clock(tmp_path: Path) -> None:
    with _device(tmp_path) as (home, service):
        _share_log(home, "on")
        result = train_quickly(home, [user_text(tmp_path)], share_log=True, engine_of=BigramEngine)
        _as_if_the_clock_went_back(home.runs)
        _send_all(home)
        assert list(service.logs) == [result.run_id]

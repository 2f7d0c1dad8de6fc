"""Worker, API and database killed at each step of a round: nothing is lost, nothing is counted twice."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from permille.store.tables import Participation
from permille_rounds.contribution import decode_contribution
from permille_rounds.rounds import History, combine
from permille_rounds.schemas import CONTRIBUTION_MEDIA_TYPE
from permille_rounds.store import contributions, rounds
from tests.api_service import Api, running_api
from tests.preloaded import Process
from tests.rounds.service.processes import API_STEPS, WORKER_STEPS
from tests.rounds.site import Site, make_site
from tests.running_service import environment
from tests.unit.store import postgres

WAIT_S = 800.0


def _short(steps: Iterable[str]) -> list[Any]:
    """Return the steps as parameters. All but one are slow."""
    return [
        step if step == "in-the-transaction" else pytest.param(step, marks=pytest.mark.slow) for step in steps
    ]


@contextmanager
def process(name: str, api: Api, step: str, mark: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Run an API or a worker on the data of a service under test. It kills itself at a step."""
    settings = {
        "PERMILLE_DATA_DIR": str(api.service.settings.data_dir),
        "PERMILLE_PORT": "0",
        "PERMILLE_POLL_S": "0.05",
        "PERMILLE_SWEEP_S": "0.2",
        # A worker on a busy machine may pause for longer than the usual lease. Its own sweeper would then
        # start another attempt, and these tests count attempts. A killed child is detected without a lease.
        "PERMILLE_LEASE_S": "900",
        "KILL_AT": step,
        "KILL_MARK": str(mark),
    }
    command = [sys.executable, "-m", "tests.rounds.service.processes", name]
    with (mark.parent / f"{name}.log").open("ab") as log:
        made = Process(command, env=environment(**settings), stdout=log, stderr=log)
    try:
        yield made
    finally:
        made.kill()
        made.wait()


def wait_until(is_so: Callable[[], bool], log: Path) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline, log.read_text()[-4000:] if log.exists() else "too late"
        time.sleep(0.1)


def sent_by_all(site: Site, number: int = 0) -> list[bytes]:
    """Let all members send. Return their contributions."""
    sent = []
    for member in site.members:
        site.catch_up(member)
        invitation = site.invite(member).json()
        sent.append(site.contribution(member, invitation, seed=number))
        assert site.send(member, invitation["round"], sent[-1]).status_code in (200, 202)
    return sent


def expected_record(site: Site, history: History, sent: list[bytes]) -> bytes:
    """Return the record of the round, computed here from these contributions."""
    keys = [member.device.key.public_key() for member in site.members]
    read = [decode_contribution(data, site.definition, key) for data, key in zip(sent, keys, strict=True)]
    return combine(site.definition, history.number, read).to_bytes()


def check_counted_once(site: Site, sent: list[bytes], number: int = 0) -> None:
    """Check that the round has each contribution once, the chain is right, and no bytes are left."""
    history = History.begin(site.definition)
    record = site.api.get(f"{site.path}/rounds/{number}/record").content
    assert record == expected_record(site, history, sent)
    site.catch_up(site.members[0])
    assert site.members[0].history.chain == site.read()["chain"]
    found = site.round(number)
    assert (found["state"], found["counted"], found["received"]) == ("published", len(sent), len(sent))
    assert site.read()["number"] == number + 1
    with site.api.service.database.read() as session:
        assert not [row for row in session.query(Participation) if row.data is not None]


@pytest.mark.slow
@pytest.mark.parametrize("step", _short(WORKER_STEPS))
def test_a_worker_killed_while_it_closes_a_round(tmp_path: Path, step: str) -> None:
    mark = tmp_path / "mark"
    with running_api(tmp_path) as api:
        site = make_site(api, members=3)
        sent = sent_by_all(site)
        with process("worker", api, step, mark):
            wait_until(lambda: bool(site.read()["number"]), tmp_path / "worker.log")
        assert mark.exists()
        job = api.get(f"/v1/jobs/{site.round(0)['job_id']}").json()
        assert (job["state"], job["attempt"]) == ("succeeded", 1 if step == "after-the-transaction" else 2)
        assert job["result"] == f"{site.path}/rounds/0"
        check_counted_once(site, sent)


@pytest.mark.slow
@pytest.mark.parametrize("step", _short(API_STEPS))
def test_an_api_killed_while_it_takes_a_contribution(tmp_path: Path, step: str) -> None:
    mark = tmp_path / "mark"
    with running_api(tmp_path) as api:
        site = make_site(api, members=3)
        first, *others = site.members
        invitation = site.invite(first).json()
        data = site.contribution(first, invitation)
        with process("api", api, step, mark) as killed:
            answer = put_there(api, site, first.secret, data, tmp_path)
            assert answer is None
            assert killed.wait(WAIT_S) == -9
        with process("api", api, step, mark):
            again = put_there(api, site, first.secret, data, tmp_path)
        assert again is not None
        assert again.status_code == (200 if step == "after-the-transaction" else 202)
        assert site.round(0)["received"] == 1
        sent = [data]
        for member in others:
            sent.append(site.contribution(member, site.invite(member).json()))
            site.send(member, 0, sent[-1])
        assert site.work() == 1
        check_counted_once(site, sent)


def put_there(api: Api, site: Site, secret: str, data: bytes, folder: Path) -> httpx.Response | None:
    """Send a contribution to the API process. Return None if it died before it answered."""
    url_path = api.service.settings.data_dir / "service.url"
    wait_until(url_path.exists, folder / "api.log")
    headers = api.auth(secret) | {"Content-Type": CONTRIBUTION_MEDIA_TYPE}
    try:
        path = f"{url_path.read_text().strip()}{site.path}/rounds/0/contribution"
        return httpx.put(path, content=data, headers=headers, timeout=60.0, trust_env=False)
    except httpx.TransportError:
        url_path.unlink()  # the killed process has left the file
        return None


def test_a_database_that_crashes_in_each_transaction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with postgres.postgres_server() as server, running_api(tmp_path, database_url=server.url) as api:
        monkeypatch.setenv("PERMILLE_DATABASE_URL", server.url)
        site = make_site(api, members=3)
        first, *others = site.members
        data = site.contribution(first, site.invite(first).json())
        crash_once(monkeypatch, contributions, "accept", server)
        assert site.send(first, 0, data).status_code == 503
        assert site.round(0)["received"] == 0
        assert site.send(first, 0, data).status_code == 202
        sent = [data, *(site.contribution(member, site.invite(member).json()) for member in others)]
        for member, one in zip(others, sent[1:], strict=True):
            assert site.send(member, 0, one).status_code == 202
        crash_once(monkeypatch, rounds, "publish", server)
        assert site.work() == 1  # the attempt waits for the database and publishes then
        check_counted_once(site, sent)
        job = api.get(f"/v1/jobs/{site.round(0)['job_id']}").json()
        assert (job["state"], job["attempt"]) == ("succeeded", 1)


def crash_once(monkeypatch: pytest.MonkeyPatch, place: Any, name: str, server: postgres.Server) -> None:
    """Let the database crash once, after a call and before its transaction is committed."""
    real, crashed = getattr(place, name), list[str]()

    def called(session: Any, **options: Any) -> Any:
        answer = real(session, **options)
        session.flush()
        if not crashed:
            crashed.append(name)
            server.crash()
        return answer

    monkeypatch.setattr(place, name, called)

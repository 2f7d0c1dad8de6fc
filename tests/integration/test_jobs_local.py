"""Local workers over SQLite, the default, as processes that are killed. Some tests also use Celery."""

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from permille.store import rows
from permille.store.tables import Job
from tests.integration.job_site import TIMEOUT_S, Site, is_alive, job_site, redis_server, wait_until
from tests.integration.test_slow_requests import stopped
from tests.unit.store.postgres import postgres_server


@pytest.fixture
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    if getattr(request, "param", "local") == "local":
        with job_site(tmp_path) as place:
            yield place
    else:
        with redis_server(tmp_path) as redis, job_site(tmp_path, broker_url=redis.url) as place:
            yield place


CELERY = pytest.param("celery", marks=pytest.mark.slow)
anywhere = pytest.mark.parametrize("site", ["local", CELERY], indirect=True)


def test_jobs_finish_and_leave_no_work_folder(site: Site) -> None:
    made = [site.submit() for _ in range(3)]
    site.start_worker()
    for job in made:
        assert site.wait_for_state(job, "succeeded").attempt == 1
    assert len(site.results()) == 3
    wait_until(lambda: not list((site.root / "work" / "jobs").iterdir()), site.explain)


@pytest.mark.slow
@pytest.mark.parametrize("site", ["local", "celery"], indirect=True)
def test_a_killed_worker_takes_its_child_along_and_another_attempt_resumes(site: Site) -> None:
    site.settings["LEASE_S"] = "2"
    job = site.submit(steps=40, step_s=0.05, max_attempts=20)
    worker = site.start_worker()
    [[_, _, _, child]] = site.wait_for_attempts(1)
    wait_until(lambda: (site.root / "work" / "jobs" / job.id / "done").exists(), site.explain)
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    wait_until(lambda: not is_alive(int(child)), site.explain)
    site.start_worker()
    after = site.wait_for_state(job, "succeeded")
    assert after.fence >= 2
    [result] = site.results()
    assert result.k == after.fence
    resumed_from = int(site.root.joinpath("blobs").rglob("sha256/*/*").__next__().read_text().split()[1])
    assert resumed_from > 0


@pytest.mark.slow
@anywhere
def test_a_stalled_worker_that_wakes_up_cannot_publish(site: Site) -> None:
    site.settings["LEASE_S"] = "2"
    job = site.submit(steps=20, step_s=0.2, deaf=True, max_attempts=20)
    stalled = site.start_worker()
    [[_, _, _, child]] = site.wait_for_attempts(1)
    site.stall(stalled, int(child))
    wait_until(lambda: site.read(job).state == "running" and _lease_is_over(site, job.id), site.explain)
    second = site.start_worker()
    wait_until(lambda: site.read(job).fence >= 2, site.explain)
    site.wake(stalled, int(child))
    after = site.wait_for_state(job, "succeeded")
    wait_until(lambda: not is_alive(int(child)), site.explain)
    assert after.fence >= 2
    assert [row.k for row in site.results()] == [after.fence]
    assert second.poll() is None


def _lease_is_over(site: Site, job_id: str) -> bool:
    with site.db.read() as session:
        job = rows.get(session, Job, tenant_id=site.tenant_id, row_id=job_id)
        lease = job.lease_expires_at
        return lease is not None and lease.timestamp() < time.time()


def test_a_child_that_crashes_is_retried_and_at_last_dead_with_its_signal(site: Site) -> None:
    job = site.submit(ends="killed", max_attempts=1)
    site.start_worker()
    after = site.wait_for_state(job, "dead")
    assert after.error is not None
    assert "signal 9" in str(after.error["message"])


@pytest.mark.slow
def test_input_errors_fail_and_retryable_ones_are_tried_again(site: Site) -> None:
    bad, flaky = site.submit(ends="badly"), site.submit(ends="flakily")
    site.start_worker()
    failed = site.wait_for_state(bad, "failed")
    assert failed.error == {
        "type": "InputError",
        "message": "expected good input, got bad",
        "retryable": False,
    }
    assert site.wait_for_state(flaky, "succeeded").attempt == 2


def test_cancel_stops_a_job_that_listens(site: Site) -> None:
    job = site.submit(steps=10_000, step_s=0.02)
    site.start_worker()
    site.wait_for_attempts(1)
    site.cancel(job)
    site.wait_for_state(job, "cancelled")
    assert site.results() == []


@anywhere
def test_cancel_kills_a_job_that_does_not_listen(site: Site) -> None:
    job = site.submit(steps=1, step_s=600, deaf=True)
    site.start_worker()
    [[_, _, _, child]] = site.wait_for_attempts(1)
    site.cancel(job)
    site.wait_for_state(job, "cancelled")
    wait_until(lambda: not is_alive(int(child)), site.explain)
    assert site.results() == []


def test_sigterm_lets_a_short_job_finish(site: Site) -> None:
    site.settings["DRAIN_S"] = "60"
    job = site.submit(steps=10, step_s=0.05)
    worker = site.start_worker()
    site.wait_for_attempts(1)
    worker.terminate()
    assert worker.wait(60) == 0
    assert site.read(job).state == "succeeded"


@pytest.mark.slow
@anywhere
def test_sigterm_gives_a_long_job_back_unharmed(site: Site) -> None:
    site.settings["DRAIN_S"] = "0.2"
    job = site.submit(steps=1, step_s=600)
    worker = site.start_worker()
    [[_, _, _, child]] = site.wait_for_attempts(1)
    worker.terminate()
    assert worker.wait(60) == 0
    after = site.read(job)
    assert (after.state, after.attempt) == ("queued", 0)
    assert not is_alive(int(child))


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_workers_killed_at_random_moments_lose_nothing_and_publish_once(site: Site, kills: int) -> None:
    """Kills occur at any point: start, claim, work, publication. The seed differs between runs."""
    rng = random.Random(os.getpid())
    site.settings["LEASE_S"] = "2"
    made = [site.submit(steps=4, step_s=0.05, max_attempts=50) for _ in range(4)]
    for _ in range(kills):
        worker = site.start_worker()
        time.sleep(rng.uniform(0.2, 2.5))
        worker.send_signal(signal.SIGKILL)
        worker.wait()
    site.start_worker()
    for job in made:
        site.wait_for_state(job, "succeeded")
    published = {row.job_id: row.k for row in site.results()}
    assert published == {job.id: site.read(job).fence for job in made}
    fences = [(job_id, fence) for job_id, _, fence, _ in site.attempts()]
    assert len(fences) == len(set(fences))


@pytest.mark.slow
def test_a_worker_ends_although_its_database_hangs(tmp_path: Path) -> None:
    with postgres_server() as server, job_site(tmp_path, database_url=server.url) as site:
        site.settings["DRAIN_S"] = "0"
        first = site.submit()
        worker = site.start_worker()
        site.wait_for_state(first, "succeeded")
        with stopped(server):
            time.sleep(1)  # now its threads wait for the database
            worker.send_signal(signal.SIGTERM)
            assert worker.wait(TIMEOUT_S) == 0


@pytest.mark.slow
def test_a_slot_that_gets_no_thread_takes_the_next_job(site: Site, tmp_path: Path) -> None:
    """`can't start new thread` is what a limit of processes (a pod's, or of systemd) gives."""
    (tmp_path / "sitecustomize.py").write_text(NO_THREAD)
    site.settings.update(LEASE_S="5")
    job = site.submit(max_attempts=20)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", path)
        worker = site.start_worker()
        after = site.wait_for_state(job, "succeeded")
    assert after.attempt >= 2
    assert "can't start new thread" in site.explain()
    assert worker.poll() is None


def test_a_worker_without_its_sweeper_ends_so_that_it_is_started_again(site: Site, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(NO_THREAD.replace("_copy_lines", "collector"))
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", path)
        assert site.start_worker().wait(TIMEOUT_S) == 75
    assert "the thread sweeper failed, so this worker ends" in site.explain()


NO_THREAD = """
import threading
start, failed = threading.Thread.start, []
def limited(self):
    if "_copy_lines" in self.name and not failed:
        failed.append(self)
        raise RuntimeError("can't start new thread")
    start(self)
threading.Thread.start = limited
"""
"""Code that lets the start of one thread fail once, in each process."""

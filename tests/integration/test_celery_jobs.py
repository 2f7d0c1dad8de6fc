"""The same jobs on Celery over a real Redis, with real workers, killed in earnest."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from permille.store.jobs.dispatch import CeleryDispatcher
from tests.integration.job_site import Redis, Site, is_alive, job_site, redis_server, wait_until


def dispatcher_of(site: Site) -> CeleryDispatcher:
    assert site.broker_url is not None
    return CeleryDispatcher(site.broker_url)


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Redis]:
    with redis_server(tmp_path) as server:
        yield server


@pytest.fixture
def site(tmp_path: Path, redis: Redis) -> Iterator[Site]:
    with job_site(tmp_path, broker_url=redis.url) as place:
        yield place


def test_dispatched_jobs_finish(site: Site) -> None:
    site.settings.update(CONCURRENCY="2", SWEEP_S="600")  # nothing but the message starts them
    site.start_worker()
    made = [site.submit() for _ in range(3)]
    dispatcher = dispatcher_of(site)
    assert [dispatcher.send(job.id) for job in made] == [True] * 3
    for job in made:
        assert site.wait_for_state(job, "succeeded").attempt == 1
    assert len(site.results()) == 3


def test_a_message_that_comes_twice_runs_the_job_once(site: Site) -> None:
    job = site.submit()
    dispatcher = dispatcher_of(site)
    for _ in range(3):
        dispatcher.send(job.id)
    last = site.submit()
    dispatcher.send(last.id)
    site.start_worker()
    site.wait_for_state(last, "succeeded")
    assert site.wait_for_state(job, "succeeded").fence == 1
    assert len(site.results()) == 2


def test_a_killed_worker_takes_its_child_along_and_another_attempt_finishes(site: Site) -> None:
    site.settings["LEASE_S"] = "2"
    job = site.submit(steps=40, step_s=0.05, max_attempts=20)
    worker = site.start_worker()
    [[_, _, _, child]] = site.wait_for_attempts(1)
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    wait_until(lambda: not is_alive(int(child)), site.explain)
    site.start_worker()
    after = site.wait_for_state(job, "succeeded")
    assert after.fence >= 2
    assert [row.k for row in site.results()] == [after.fence]


def test_a_stalled_worker_that_wakes_up_cannot_publish(site: Site) -> None:
    site.settings["LEASE_S"] = "2"
    job = site.submit(steps=20, step_s=0.2, deaf=True, max_attempts=20)
    stalled = site.start_worker()
    [[_, _, _, child]] = site.wait_for_attempts(1)
    site.stall(stalled, int(child))
    site.start_worker()
    wait_until(lambda: site.read(job).fence >= 2, site.explain)
    site.wake(stalled, int(child))
    after = site.wait_for_state(job, "succeeded")
    wait_until(lambda: not is_alive(int(child)), site.explain)
    assert after.fence >= 2
    assert [row.k for row in site.results()] == [after.fence]


def test_a_broker_that_dies_and_forgets_loses_no_job(site: Site, redis: Redis) -> None:
    made = [site.submit(steps=10, step_s=0.1) for _ in range(3)]
    site.start_worker()
    site.wait_for_attempts(1)
    redis.kill()
    late = site.submit()
    assert dispatcher_of(site).send(late.id) is False
    redis.start()
    for job in [*made, late]:
        assert site.wait_for_state(job, "succeeded").state == "succeeded"
    assert len(site.results()) == 4


def test_a_worker_that_is_told_nothing_looks_for_jobs_itself(site: Site, redis: Redis) -> None:
    site.settings["RESEND_AFTER_S"] = "0.5"
    first = site.submit()
    site.start_worker()
    site.wait_for_state(first, "succeeded")
    redis.kill()
    for job in [site.submit() for _ in range(3)]:
        assert site.wait_for_state(job, "succeeded").attempt == 1


def test_cancel_stops_a_running_job(site: Site) -> None:
    job = site.submit(steps=1, step_s=600, deaf=True)
    site.start_worker()
    [[_, _, _, child]] = site.wait_for_attempts(1)
    site.cancel(job)
    site.wait_for_state(job, "cancelled")
    wait_until(lambda: not is_alive(int(child)), site.explain)
    assert site.results() == []


def test_sigterm_gives_a_long_job_back_unharmed(site: Site) -> None:
    site.settings["DRAIN_S"] = "0.2"
    job = site.submit(steps=1, step_s=600)
    worker = site.start_worker()
    [[_, _, _, child]] = site.wait_for_attempts(1)
    worker.terminate()
    worker.wait(60)
    after = site.read(job)
    assert (after.state, after.attempt) == ("queued", 0)
    assert not is_alive(int(child))

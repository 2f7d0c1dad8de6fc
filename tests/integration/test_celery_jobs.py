"""Jobs on Celery over a real Redis, with real workers. `test_jobs_local` also kills these."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from permille.store.jobs.dispatch import CeleryDispatcher
from tests.integration.job_site import TIMEOUT_S, Redis, Site, job_site, redis_server, wait_until


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
    site.settings.update(CONCURRENCY="2", SWEEP_S="600")  # only the messages start the jobs
    site.start_worker()
    made = [site.submit() for _ in range(3)]
    dispatcher = dispatcher_of(site)
    assert [dispatcher.send(job.id) for job in made] == [True] * 3
    for job in made:
        assert site.wait_for_state(job, "succeeded").attempt == 1
    assert len(site.results()) == 3


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_broker_that_dies_and_forgets_loses_no_job(
    site: Site, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JOB_TASKS_SILENCE_S", "2")
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


@pytest.mark.slow
def test_a_worker_that_is_told_nothing_looks_for_jobs_itself(
    site: Site, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JOB_TASKS_SILENCE_S", "0.5")
    first = site.submit()
    site.start_worker()
    site.wait_for_state(first, "succeeded")
    redis.kill()
    for job in [site.submit() for _ in range(3)]:
        assert site.wait_for_state(job, "succeeded").attempt == 1


@pytest.mark.slow
def test_an_idle_worker_ends_although_its_broker_hangs(site: Site, redis: Redis) -> None:
    first = site.submit()
    worker = site.start_worker()
    site.wait_for_state(first, "succeeded")
    redis.hang()
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(TIMEOUT_S) == 0


@pytest.mark.slow
def test_a_second_signal_gives_the_job_back_although_the_broker_hangs(site: Site, redis: Redis) -> None:
    site.settings["DRAIN_S"] = "86400"
    job = site.submit(steps=10_000, step_s=0.1)
    worker = site.start_worker()
    site.wait_for_attempts(1)
    redis.hang()
    worker.send_signal(signal.SIGTERM)
    # The system merges a second signal into the first one until the worker has noticed it.
    wait_until(lambda: "Warm shutdown" in site.explain(), site.explain)
    assert site.read(job).state == "running"
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(TIMEOUT_S) == 0
    after = site.read(job)
    assert (after.state, after.attempt) == ("queued", 0)


@pytest.mark.slow
def test_a_broker_that_hangs_keeps_no_job(site: Site, redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOB_TASKS_SILENCE_S", "0.5")
    first = site.submit()
    site.start_worker()
    site.wait_for_state(first, "succeeded")
    redis.hang()
    for job in [site.submit() for _ in range(2)]:
        assert site.wait_for_state(job, "succeeded").attempt == 1

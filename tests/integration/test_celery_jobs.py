"""Jobs on Celery over a real Redis, with real workers. `test_jobs_local` also kills these."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from permille.store.jobs.dispatch import CeleryDispatcher
from tests.integration.job_site import Redis, Site, job_site, redis_server


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

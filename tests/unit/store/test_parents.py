"""Tests of jobs with parts: a parent advances, fails and is cancelled with its parts. It needs no worker."""

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Engine, event, text, update
from sqlalchemy.orm import Session

from permille.errors import InputError
from permille.schemas.fields import EXAMPLE_ULID
from permille.schemas.jobs import JobKind
from permille.schemas.kinds import parse_request
from permille.schemas.masks import ShardRequest
from permille.schemas.packages import BuildCreate
from permille.store.database import Database
from permille.store.errors import ConflictError, StaleClaimError
from permille.store.jobs import claims, queue
from permille.store.jobs.claims import Claim
from permille.store.jobs.parents import parts_due
from permille.store.jobs.transitions import NewJob
from permille.store.tables import Job
from tests.unit.store.conftest import Clock
from tests.unit.store.test_jobs import read

MODEL, CORPUS, TEXTS = f"model_{EXAMPLE_ULID}", f"corpus_{EXAMPLE_ULID}", f"corpus_{EXAMPLE_ULID[::-1]}"
PAYLOAD: dict[str, Any] = {
    "model_id": MODEL,
    "mask": {"method": "fisher", "corpus_id": CORPUS, "density": 0.01, "seed": 3},
    "quantization": {"scheme": "int4", "group_size": 128},
    "evaluation_corpus_id": TEXTS,
}
IDS = {
    "mask": f"mask_{EXAMPLE_ULID}",
    "quantization": f"quant_{EXAMPLE_ULID}",
    "package": "sha256:" + "a" * 64,
    "shard": "sha256:" + "b" * 64,
}
SHARD = {"model_id": MODEL, "scope": "all", "plan": IDS["shard"], "dtype": "float32"}


def submit_build(db: Database, tenant_id: str, *, attempts: int = 1, **changes: object) -> Job:
    with db.write() as session:
        payload = {**PAYLOAD, **changes}
        return queue.submit(
            session, NewJob(tenant_id=tenant_id, kind="build", payload=payload, max_attempts=attempts)
        )


def take(db: Database, job_id: str | None = None) -> Claim | None:
    with db.write() as session:
        return claims.claim(session, worker="w", lease_s=30, job_id=job_id)


def finish(db: Database, claim: Claim) -> None:
    with db.write() as session:
        claims.complete(session, claim, result_id=IDS[claim.kind])


def run(db: Database, build: Job, kind: str) -> None:
    claim = take(db, parts(db, build)[kind].id)
    assert claim is not None
    finish(db, claim)


def parts(db: Database, build: Job) -> dict[str, Job]:
    with db.read() as session:
        return {job.kind: job for job in queue.parts_of(session, build)}


def test_parts_get_the_payloads_of_jobs_of_their_own(db: Database, tenant_id: str) -> None:
    build = submit_build(db, tenant_id)
    for kind in ("mask", "quantization"):
        run(db, build, kind)
    payloads = {kind: job.payload for kind, job in parts(db, build).items()}
    assert payloads["mask"] == {
        "model_id": MODEL,
        **PAYLOAD["mask"],
        "length": 512,
        "scope": "all",
        "sequences": 100,
    }
    assert payloads["quantization"] == {
        "model_id": MODEL,
        "evaluation_corpus_id": TEXTS,
        "options": {
            "scheme": "int4",
            "group_size": 128,
            "embeddings": "q8_0",
            "evaluation_tokens": 8192,
        },
    }
    assert payloads["package"] == {
        "mask_id": IDS["mask"],
        "adapter": None,
        "quantization_id": IDS["quantization"],
        "basis": False,
    }


def test_builds_run_mask_and_quantization_side_by_side(db: Database, tenant_id: str) -> None:
    build = submit_build(db, tenant_id)
    assert read(db, build).state == "running"
    first, second = take(db), take(db)
    assert first is not None
    assert second is not None
    assert {first.kind, second.kind} == {"mask", "quantization"}
    assert take(db) is None
    finish(db, first)
    assert take(db) is None
    finish(db, second)
    run(db, build, "package")
    assert take(db) is None
    after = read(db, build)
    assert (after.state, after.result_id, after.progress) == ("succeeded", IDS["package"], 1.0)


def test_parts_that_were_made_before_are_not_made_again(db: Database, tenant_id: str) -> None:
    earlier = submit_build(db, tenant_id)
    for kind in ("mask", "quantization"):
        run(db, earlier, kind)

    def find(session: Session, part: Job) -> Job | None:
        return queue.find_equal(session, tenant_id=tenant_id, request_digest=part.request_digest)

    new = NewJob(tenant_id=tenant_id, kind="build", payload=PAYLOAD)
    with db.write() as session:
        build = queue.submit(session, new, find)
    made = parts(db, build)
    assert {kind: job.state for kind, job in made.items()} == {
        "mask": "succeeded",
        "quantization": "succeeded",
        "package": "queued",
    }
    assert made["package"].payload["mask_id"] == IDS["mask"]
    run(db, build, "package")
    assert read(db, build).state == "succeeded"


def test_a_build_of_an_adapter_has_no_mask(db: Database, tenant_id: str) -> None:
    adapter = {"kind": "lora-fa", "rank": 4}
    build = submit_build(db, tenant_id, mask=None, adapter=adapter)
    run(db, build, "quantization")
    assert read(db, build).progress == pytest.approx(0.2)
    after = parts(db, build)
    assert after.keys() == {"quantization", "package"}
    assert after["package"].payload == {
        "mask_id": None,
        "adapter": {**adapter, "alpha": 16, "scope": "all", "seed": 0},
        "quantization_id": IDS["quantization"],
        "basis": False,
    }
    run(db, build, "package")
    assert (read(db, build).state, read(db, build).progress) == ("succeeded", 1.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask": None}, "either a mask or an adapter"),
        ({"adapter": {"kind": "lora"}}, "either a mask or an adapter"),
        ({"mask": None, "adapter": {"kind": "dora"}}, "adapter.kind"),
    ],
)
def test_a_build_trains_a_mask_or_an_adapter(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_request("build", {**PAYLOAD, **changes})


def test_no_part_is_added_twice() -> None:
    request = BuildCreate.model_validate(PAYLOAD)
    assert parts_due(request, {"mask": None, "quantization": None}) == []
    assert parts_due(request, {"mask": "m", "quantization": "q", "package": None}) == []


def test_a_build_that_another_version_wrote_fails_and_says_why(db: Database, tenant_id: str) -> None:
    after = read(db, submit_build(db, tenant_id, mask_aware=True))
    assert (after.state, claims.sweep(db).requeued) == ("failed", 0)
    assert "mask_aware" in str(after.error)


def test_progress_of_the_parts_is_the_builds(db: Database, tenant_id: str) -> None:
    build = submit_build(db, tenant_id)
    claim = take(db, parts(db, build)["mask"].id)
    assert claim is not None
    with db.write() as session:
        claims.report_progress(session, claim, fraction=0.5, message="fisher 1/2")
    row = read(db, build)
    assert row.progress == pytest.approx(0.375)
    assert row.message == "mask: fisher 1/2"


@pytest.mark.parametrize("order", [("mask", "quantization"), ("quantization", "mask")])
def test_a_failed_part_fails_the_build_and_stops_its_siblings(
    db: Database, tenant_id: str, order: tuple[str, str]
) -> None:
    build = submit_build(db, tenant_id)
    first, second = (take(db, parts(db, build)[kind].id) for kind in order)
    assert first is not None
    assert second is not None
    with db.write() as session:
        claims.fail(session, first, error={"type": "InputError", "message": "bad text"}, retryable=False)
    with db.read() as session:
        assert claims.is_cancel_requested(session, second)
    assert read(db, build).state == "running"
    with db.write() as session:
        claims.cancelled(session, second)
    after = read(db, build)
    assert after.state == "failed"
    assert after.error is not None
    assert "bad text" in str(after.error["message"])


def test_a_part_whose_hub_is_unreachable_ends_the_build_before_other_parts_begin(
    db: Database, tenant_id: str, clock: Clock
) -> None:
    build = submit_build(db, tenant_id, attempts=2)
    mask = parts(db, build)["mask"].id
    for state in ("running", "dead"):
        claim = take(db)
        assert claim is not None and claim.job_id == mask
        with db.write() as session:
            claims.fail(session, claim, error={"type": "T", "message": "no hub"}, retryable=True)
        assert take(db) is None
        assert read(db, build).state == state
        clock.forward(10)
    assert parts(db, build)["quantization"].state == "cancelled"


def test_a_part_that_a_server_asks_to_wait_holds_no_other(db: Database, tenant_id: str) -> None:
    submit_build(db, tenant_id)
    claim = take(db)
    assert claim is not None
    with db.write() as session:
        claims.fail(session, claim, error={"type": "T", "message": "slowly"}, retryable=True, wait_s=60)
    other = take(db)
    assert other is not None and other.kind == "quantization"


def test_cancel_of_a_build_cancels_its_parts(db: Database, tenant_id: str) -> None:
    build = submit_build(db, tenant_id)
    running = take(db)
    assert running is not None
    with db.write() as session:
        queue.request_cancel(session, tenant_id=tenant_id, job_id=build.id)
    states = {job.id: job.state for job in parts(db, build).values()}
    assert states.pop(running.job_id) == "running"
    assert set(states.values()) == {"cancelled"}
    with db.write() as session:
        claims.cancelled(session, running)
    assert read(db, build).state == "cancelled"
    assert take(db) is None


def test_cancel_of_a_part_cancels_the_build(db: Database, tenant_id: str) -> None:
    build = submit_build(db, tenant_id)
    with db.write() as session:
        queue.request_cancel(session, tenant_id=tenant_id, job_id=parts(db, build)["mask"].id)
    assert read(db, build).state == "cancelled"


def test_retry_of_a_build_repeats_only_what_failed(db: Database, tenant_id: str) -> None:
    build = submit_build(db, tenant_id)
    run(db, build, "mask")
    claim = take(db)  # the quantization job
    assert claim is not None
    with db.write() as session:
        claims.fail(session, claim, error={"type": "T", "message": "m"}, retryable=True)
    after = read(db, build)
    assert after.state == "dead"
    assert after.error is not None and after.error["retryable"]
    with pytest.raises(ConflictError, match="Retry that"), db.write() as session:
        queue.retry(session, tenant_id=tenant_id, job_id=claim.job_id)
    with db.write() as session:
        queue.retry(session, tenant_id=tenant_id, job_id=build.id)
    run(db, build, "quantization")
    run(db, build, "package")
    assert read(db, build).state == "succeeded"


def test_a_lost_attempt_of_a_part_leaves_the_message_of_the_build(
    db: Database, tenant_id: str, clock: Clock
) -> None:
    with db.write() as session:
        new = NewJob(tenant_id=tenant_id, kind="build", payload=PAYLOAD, max_attempts=2)
        build = queue.submit(session, new)
    claim = take(db, parts(db, build)["mask"].id)
    assert claim is not None
    with db.write() as session:
        claims.report_progress(session, claim, fraction=0.5, message="fisher 1/2")
    clock.forward(31)
    assert claims.sweep(db).requeued == 1
    assert read(db, build).message is None


@contextmanager
def counted_writes() -> Iterator[Counter[str]]:
    """Count the locks and changes of the block: write transactions of SQLite, and rows that are changed."""
    found: Counter[str] = Counter()

    def count(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        found.update(re.findall(r"BEGIN IMMEDIATE|^UPDATE|^INSERT|^DELETE|FOR NO KEY UPDATE", statement))

    event.listen(Engine, "before_cursor_execute", count)
    try:
        yield found
    finally:
        event.remove(Engine, "before_cursor_execute", count)


def test_a_sweep_writes_nothing_for_builds_that_wait(db: Database, tenant_id: str, clock: Clock) -> None:
    builds = [submit_build(db, tenant_id) for _ in range(3)]
    split_mask(db, builds[0])
    run(db, builds[1], "mask")
    stopped = take(db, parts(db, builds[2])["mask"].id)
    assert stopped is not None
    with db.write() as session:
        queue.request_cancel(session, tenant_id=tenant_id, job_id=builds[2].id)
    before = [read(db, build) for build in builds]
    clock.forward(5)
    with counted_writes() as writes:
        claims.sweep(db)
    assert not writes
    assert [read(db, build).updated_at for build in builds] == [build.updated_at for build in before]


def test_a_sweep_advances_a_build_whose_parts_have_ended(db: Database, tenant_id: str) -> None:
    build = submit_build(db, tenant_id)
    with db.write() as session:
        for part in parts(db, build).values():
            # Another program wrote these rows, so nothing has advanced the build.
            ended = {"state": "succeeded", "result_id": IDS[part.kind]}
            session.execute(update(Job).where(Job.id == part.id).values(ended))
    with counted_writes() as writes:
        claims.sweep(db)
    assert writes
    assert set(parts(db, build)) == {"mask", "quantization", "package"}


def split_mask(db: Database, build: Job) -> tuple[Claim, list[Job]]:
    """Return the claim of the build's mask job, and the two shards into which its first attempt splits it."""
    claim = take(db, parts(db, build)["mask"].id)
    assert claim is not None
    shards = [
        (JobKind.SHARD, ShardRequest.model_validate({**SHARD, "first": at, "stop": at + 16}))
        for at in (0, 16)
    ]
    with db.write() as session:
        claims.split(session, claim, shards)
    with db.read() as session:
        mask = queue.parts_of(session, build)[0]
        return claim, list(queue.parts_of(session, mask))


def test_a_split_job_holds_no_worker_and_is_queued_again_after_its_parts(
    db: Database, tenant_id: str, clock: Clock
) -> None:
    build = submit_build(db, tenant_id)
    first, shards = split_mask(db, build)
    with pytest.raises(StaleClaimError), db.write() as session:
        claims.fail(session, first, error={"type": "T", "message": "the process has ended"}, retryable=True)
    clock.forward(3600)
    assert claims.sweep(db).requeued == 0
    mask = parts(db, build)["mask"]
    assert (mask.state, mask.worker, mask.attempt) == ("running", None, 0)
    claim = take(db, shards[1].id)
    assert claim is not None
    assert claim.parent_id == mask.id
    with db.write() as session:
        claims.report_progress(session, claim, fraction=0.5, message="fisher 8/16")
    assert read(db, mask).message == "parts: 0 of 2 done, 1 running"
    assert read(db, mask).progress == pytest.approx(0.05 + 0.8 / 4)
    assert read(db, build).progress == pytest.approx(0.75 * read(db, mask).progress)
    finish(db, claim)
    assert read(db, mask).state == "running"
    claim = take(db, shards[0].id)
    assert claim is not None
    finish(db, claim)
    again = take(db, mask.id)
    assert again is not None
    assert again.attempt == 1
    with db.read() as session:
        found = claims.results_of_parts(session, again)
    assert [(payload["first"], result) for payload, result in found] == [
        (0, IDS["shard"]),
        (16, IDS["shard"]),
    ]
    finish(db, again)
    assert read(db, mask).state == "succeeded"
    assert read(db, build).state == "running"


def test_cancel_of_a_build_reaches_the_parts_of_its_parts(db: Database, tenant_id: str) -> None:
    build = submit_build(db, tenant_id)
    _, shards = split_mask(db, build)
    running = take(db, shards[0].id)
    assert running is not None
    with db.write() as session:
        queue.request_cancel(session, tenant_id=tenant_id, job_id=build.id)
    assert [read(db, job).state for job in shards] == ["running", "cancelled"]
    assert read(db, build).state == "running"
    with db.write() as session:
        assert claims.is_cancel_requested(session, running)
        claims.cancelled(session, running)
    assert {job.state for job in [read(db, build), *parts(db, build).values()]} == {"cancelled"}
    assert take(db) is None


def test_a_dead_shard_ends_mask_and_build_and_a_retry_repeats_it_alone(db: Database, tenant_id: str) -> None:
    build = submit_build(db, tenant_id)
    _, shards = split_mask(db, build)
    run(db, build, "quantization")
    done, broken = take(db, shards[0].id), take(db, shards[1].id)
    assert done is not None
    assert broken is not None
    finish(db, done)
    with db.write() as session:
        claims.fail(session, broken, error={"type": "T", "message": "out of memory"}, retryable=True)
    mask = parts(db, build)["mask"]
    assert [mask.state, read(db, build).state] == ["dead"] * 2
    assert "out of memory" in str(read(db, build).error)
    with db.write() as session:
        queue.retry(session, tenant_id=tenant_id, job_id=build.id)
    assert read(db, mask).state == "running"
    again = take(db)
    assert again is not None
    assert again.job_id == shards[1].id
    finish(db, again)
    run(db, build, "mask")
    run(db, build, "package")
    assert read(db, build).state == "succeeded"


def test_builds_are_never_claimed(db: Database, tenant_id: str) -> None:
    build = submit_build(db, tenant_id)
    with db.write() as session:
        assert claims.claim(session, worker="w", lease_s=30, job_id=build.id) is None


@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
def test_a_part_with_damaged_numbers_stops_the_others(db: Database, tenant_id: str) -> None:
    build = submit_build(db, tenant_id)
    with db.write() as session:
        session.execute(text("UPDATE jobs SET max_attempts = 'many' WHERE kind = 'mask'"))
    claim = take(db)
    assert claim is not None
    assert claim.kind == "quantization"
    claims.sweep(db)
    assert read(db, build).state == "running"
    with db.write() as session:
        assert session.get_one(Job, claim.job_id).cancel_requested_at is not None
        claims.cancelled(session, claim)
    claims.sweep(db)
    ended = read(db, build)
    assert (ended.state, "row is damaged" in str(ended.error)) == ("failed", True)

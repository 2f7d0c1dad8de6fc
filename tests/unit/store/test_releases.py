"""Tests of releases, access and runs: versions only grow, aliases move, and yanked packages are hidden."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from permille.errors import InputError
from permille.schemas.access import Role
from permille.schemas.jobs import JobKind
from permille.schemas.runs import LogForm, LogState
from permille.store import access, artifacts, releases, rows, runs, uploads
from permille.store.access import find_caller
from permille.store.artifacts import Blob, TaskResult
from permille.store.database import Database, now
from permille.store.errors import ConflictError, NotFoundError
from permille.store.jobs import claims, queue
from permille.store.rows import Window
from permille.store.tables import Artifact, Device, Job, Release, Run
from permille.trust.listed import Listed
from tests.artifacts import PARTS, QUOTA, add_artifact, some_model
from tests.unit.store.conftest import Clock

VERIFIED = runs.LogVerdict(state=LogState.VERIFIED)
LOG, LAYER = "sha256:" + "a" * 64, "sha256:" + "b" * 64


def add_package(db: Database, tenant_id: str, name: str = "1") -> Artifact:
    layer = Blob(role="dense", media_type="m", digest=LAYER, size_bytes=7)
    with db.write() as session:
        made = TaskResult(
            model_id=some_model(session, tenant_id),
            digest="sha256:" + name * 64,
            k=1,
            provenance={},
            blobs=(layer, layer),
        )
        return add_artifact(session, tenant_id=tenant_id, kind=JobKind.PACKAGE, request=PARTS, made=made)


def resolve_stable(db: Database, tenant_id: str) -> Any:
    """Return the version of the alias `stable` of this tenant's release."""
    return releases.resolve_alias(db, tenant_id=tenant_id, name="tiny", alias="stable")


def publish(
    db: Database, package: Artifact, *, version: int | None = None, alias: str | None = None
) -> Release:
    with db.write() as session:
        row = releases.publish(session, name="tiny", package=package, version=version)
        if alias is not None:
            releases.set_alias(
                session, tenant_id=row.tenant_id, name="tiny", alias=alias, version=row.version
            )
        return row


def test_versions_grow(db: Database, tenant_id: str) -> None:
    package = add_package(db, tenant_id)
    made = [publish(db, package), publish(db, package, version=7), publish(db, package)]
    assert [row.version for row in made] == [1, 7, 8]


@pytest.mark.attack(2, "a version of 2^53 - 1, so that the name is dead")
def test_a_version_jumps_no_further_than_a_thousand(db: Database, tenant_id: str) -> None:
    package = add_package(db, tenant_id)
    for version in (2**53 - 1, 1001):
        with pytest.raises(InputError, match="too far above 0"):
            publish(db, package, version=version)
    assert publish(db, package).version == 1


def test_rows_follow_a_list_that_was_signed_elsewhere(db: Database, tenant_id: str) -> None:
    one, two = add_package(db, tenant_id), add_package(db, tenant_id, "2")
    publish(db, one, alias="stable")
    stays = {("tiny", 1): Listed(digest=one.digest, aliases=frozenset({"stable"}))}
    comes = {("tiny", 2): Listed(digest=two.digest, aliases=frozenset({"stable"}))}
    with db.write() as session:
        releases.follow(session, tenant_id=tenant_id, before=stays, after=stays | comes)
    found = resolve_stable(db, tenant_id)
    assert (found.version, found.package_digest, found.size_bytes) == (2, two.digest, two.size_bytes)
    with db.write() as session:
        releases.follow(session, tenant_id=tenant_id, before=stays | comes, after=comes)
        withdrawn = releases.get(session, tenant_id=tenant_id, name="tiny", version=1)
        assert withdrawn.yanked_reason == "no longer listed"
    with pytest.raises(ConflictError), db.write() as session:
        releases.follow(session, tenant_id=tenant_id, before=comes, after=comes | stays)
    missing = {("tiny", 3): Listed(digest="sha256:" + "9" * 64, aliases=frozenset())}
    with pytest.raises(NotFoundError), db.write() as session:
        releases.follow(session, tenant_id=tenant_id, before=comes, after=comes | missing)


@pytest.mark.parametrize("version", [1, 2])
def test_versions_that_do_not_grow_are_a_conflict(db: Database, tenant_id: str, version: int) -> None:
    package = add_package(db, tenant_id)
    publish(db, package, version=2)
    with pytest.raises(ConflictError, match="above 2"):
        publish(db, package, version=version)


def test_a_yanked_version_is_not_used_again(db: Database, tenant_id: str) -> None:
    package = add_package(db, tenant_id)
    publish(db, package)
    with db.write() as session:
        releases.yank(session, tenant_id=tenant_id, name="tiny", version=1, reason="broken")
        again = releases.yank(session, tenant_id=tenant_id, name="tiny", version=1, reason="other")
        assert again.yanked_reason == "broken"
        with pytest.raises(ConflictError, match="yanked"):
            releases.set_alias(session, tenant_id=tenant_id, name="tiny", alias="stable", version=1)
    assert publish(db, package).version == 2


def test_aliases_move(db: Database, tenant_id: str) -> None:
    package = add_package(db, tenant_id)
    publish(db, package, alias="stable")
    publish(db, package, alias="canary")
    stable = resolve_stable(db, tenant_id)
    assert stable.version == 1
    with db.write() as session:
        releases.set_alias(session, tenant_id=tenant_id, name="tiny", alias="stable", version=2)
    moved = resolve_stable(db, tenant_id)
    assert moved.version == 2
    with db.write() as session:
        releases.delete_alias(session, tenant_id=tenant_id, name="tiny", alias="canary")
        left = releases.list_aliases(session, tenant_id=tenant_id, name="tiny")
        assert [row.alias for row in left] == ["stable"]
    with pytest.raises(NotFoundError), db.write() as session:
        releases.set_alias(session, tenant_id=tenant_id, name="tiny", alias="stable", version=9)


def test_releases_of_another_tenant_do_not_exist(db: Database, tenant_id: str, other_tenant_id: str) -> None:
    publish(db, add_package(db, tenant_id), alias="stable")
    with pytest.raises(NotFoundError):
        resolve_stable(db, other_tenant_id)
    with db.read() as session:
        assert releases.list_releases(session, tenant_id=other_tenant_id).items == ()


def test_devices_read_only_what_their_release_publishes(db: Database, tenant_id: str) -> None:
    package = add_package(db, tenant_id)
    publish(db, package)

    def readable(release: str) -> str:
        with db.read() as session:
            return artifacts.package_for_device(
                session, tenant_id=tenant_id, release=release, digest=package.digest
            ).digest

    assert readable("tiny") == package.digest
    with pytest.raises(NotFoundError):
        readable("other")
    with db.write() as session:
        releases.yank(session, tenant_id=tenant_id, name="tiny", version=1, reason="broken")
    with pytest.raises(NotFoundError):
        readable("tiny")


def test_a_package_is_stored_once_and_its_size_counts_a_blob_once(db: Database, tenant_id: str) -> None:
    first, again = add_package(db, tenant_id), add_package(db, tenant_id)
    assert (again.id, again.size_bytes) == (first.id, 7)
    with db.read() as session:
        found = artifacts.get(session, tenant_id=tenant_id, kind=JobKind.PACKAGE, key=first.digest)
    assert artifacts.blob_with(found, digest=LAYER).size_bytes == 7
    with pytest.raises(NotFoundError):
        artifacts.blob_with(found, digest=LOG)


def test_operator_tokens_expire_and_are_revoked(db: Database, tenant_id: str, clock: Clock) -> None:
    with db.write() as session:
        until = clock.at + timedelta(hours=1)
        token, secret = access.create_token(
            session, tenant_id=tenant_id, name="ci", role=Role.VIEWER, expires_at=until
        )
        forever, other_secret = access.create_token(session, tenant_id=tenant_id, name="me", role=Role.ADMIN)
    found = find_caller(db, secret)
    assert found is not None
    assert (found.caller_id, found.caller_role) == (token.id, "viewer")
    assert find_caller(db, secret + "x") is None
    clock.forward(3600)
    assert find_caller(db, secret) is None
    assert find_caller(db, other_secret) is not None
    with db.write() as session:
        access.revoke_token(session, tenant_id=tenant_id, token_id=forever.id)
    assert find_caller(db, other_secret) is None


def test_another_tenants_token_cannot_be_revoked(db: Database, tenant_id: str, other_tenant_id: str) -> None:
    with db.write() as session:
        token, _ = access.create_token(session, tenant_id=tenant_id, name="ci", role=Role.ADMIN)
    with pytest.raises(NotFoundError), db.write() as session:
        access.revoke_token(session, tenant_id=other_tenant_id, token_id=token.id)


def test_tenant_names_are_taken_once(db: Database, tenant_id: str) -> None:
    with pytest.raises(ConflictError, match="acme"), db.write() as session:
        access.create_tenant(session, name="acme")


# --- runs


def report(
    db: Database, tenant_id: str, device_id: str, run_id: str = "run", steps: int = 1, **more: object
) -> bool:
    metrics = {"steps": steps, **more}
    with db.write() as session:
        return runs.report(session, tenant_id=tenant_id, device_id=device_id, run_id=run_id, metrics=metrics)[
            1
        ]


def begin_upload(session: Session, tenant_id: str, device_id: str) -> str:
    """Begin an upload. Return its id."""
    row = uploads.begin(session, tenant_id=tenant_id, device_id=device_id, run_id="run", quota=QUOTA)
    return row.id


def attach(db: Database, tenant_id: str, device_id: str, run_id: str = "run", log: str = LOG) -> str:
    with db.write() as session:
        upload_id = begin_upload(session, tenant_id, device_id)
        _, job = runs.attach_log(
            session,
            tenant_id=tenant_id,
            device_id=device_id,
            run_id=run_id,
            log=runs.SentLog(form=LogForm.LOG, digest=log, size_bytes=9, upload_id=upload_id),
        )
        return job.id


def test_a_run_is_reported_once(db: Database, tenant_id: str, device_id: str) -> None:
    assert report(db, tenant_id, device_id)
    assert not report(db, tenant_id, device_id)
    with pytest.raises(ConflictError):
        report(db, tenant_id, device_id, steps=2)


def test_runs_are_listed_the_newest_first_whatever_their_ids(
    db: Database, tenant_id: str, device_id: str, clock: Clock
) -> None:
    told = ["m", "z", "a", "q", "b"]
    for number, run_id in enumerate(told):
        report(db, tenant_id, device_id, run_id)
        if number != 3:  # q and b have the same time, so the larger id is listed first
            clock.forward(1)
    found: list[str] = []
    cursor = None
    with db.read() as session:
        while True:
            page = runs.list_runs(session, tenant_id=tenant_id, window=Window(limit=2, cursor=cursor))
            found += [row.run_id for row in page.items]
            cursor = page.next_cursor
            if cursor is None:
                break
        for foreign in ("?", "m", "1e3.m", "9" * 18 + ".m"):
            with pytest.raises(InputError, match="cursor"):
                runs.list_runs(session, tenant_id=tenant_id, window=Window(cursor=foreign))
    assert found == ["q", "b", "a", "z", "m"]


def test_the_newest_run_is_the_one_that_ended_last_however_reports_arrive(
    db: Database, tenant_id: str, device_id: str, clock: Clock
) -> None:
    with db.read() as session:
        arrival = now(session)
    on_version: dict[str, Any] = {"release": "tiny", "version": 1, "agent_version": "0.1.0"}
    for name, seconds in (("second", -10), ("third", -5), ("first", -20), ("ahead", 3600)):
        ended_at = (arrival + timedelta(seconds=seconds)).isoformat()
        report(db, tenant_id, device_id, name, ended_at=ended_at, engine=name, **on_version)
    report(db, tenant_id, device_id, "broken", ended_at="0001-01-01T00:00:00Z", engine="broken", **on_version)

    def listed() -> list[str]:
        with db.read() as session:
            return [row.run_id for row in runs.list_runs(session, tenant_id=tenant_id).items]

    def newest() -> list[str]:
        with db.read() as session:
            return list(session.scalars(select(Run.run_id).where(Run.newest)))

    assert listed() == ["ahead", "third", "second", "first", "broken"]
    assert newest() == ["ahead"]
    with db.read() as session:
        assert session.get_one(Device, device_id).engine == "ahead"
    with db.write() as session:
        assert runs.get(session, tenant_id=tenant_id, run_id="ahead").ended_at == arrival
        runs.delete_run(session, tenant_id=tenant_id, run_id="ahead")
    assert newest() == ["third"]


def test_a_log_is_replayed_once_and_not_replaced(db: Database, tenant_id: str, device_id: str) -> None:
    report(db, tenant_id, device_id)
    assert attach(db, tenant_id, device_id) == attach(db, tenant_id, device_id)
    with pytest.raises(ConflictError, match="another log"):
        attach(db, tenant_id, device_id, log=LAYER)


def test_a_deleted_log_takes_its_job_and_verdict_along(db: Database, tenant_id: str, device_id: str) -> None:
    report(db, tenant_id, device_id)
    job_id = attach(db, tenant_id, device_id)
    with db.write() as session:
        upload_id = runs.get(session, tenant_id=tenant_id, run_id="run").log_upload_id
        assert upload_id is not None
        assert runs.delete_log(session, tenant_id=tenant_id, run_id="run", device_id=device_id) == upload_id
        assert runs.delete_log(session, tenant_id=tenant_id, run_id="run", device_id=device_id) is None
        assert rows.get(session, Job, tenant_id=tenant_id, row_id=job_id).state == "cancelled"
        runs.finish_log(session, tenant_id=tenant_id, run_id="run", log_digest=LOG, verdict=VERIFIED)
        row = runs.get(session, tenant_id=tenant_id, run_id="run")
        assert (row.log_state, row.log_digest) == (None, None)


def test_equal_logs_are_uploads_of_their_own(db: Database, tenant_id: str, device_id: str) -> None:
    for run_id in ("one", "two"):
        report(db, tenant_id, device_id, run_id)
        attach(db, tenant_id, device_id, run_id)
    with db.write() as session:
        gone = runs.delete_log(session, tenant_id=tenant_id, run_id="one")
        kept = runs.get(session, tenant_id=tenant_id, run_id="two").log_upload_id
    assert None not in (gone, kept)
    assert gone != kept


def test_a_deleted_run_is_gone(db: Database, tenant_id: str, device_id: str) -> None:
    report(db, tenant_id, device_id)
    attach(db, tenant_id, device_id)
    with db.write() as session:
        assert runs.delete_run(session, tenant_id=tenant_id, run_id="run") is not None
    with pytest.raises(NotFoundError), db.read() as session:
        runs.get(session, tenant_id=tenant_id, run_id="run")


def test_runs_of_others_do_not_exist(
    db: Database, tenant_id: str, other_tenant_id: str, device_id: str
) -> None:
    report(db, tenant_id, device_id)
    for tenant, device in ((other_tenant_id, None), (tenant_id, "dev_other")):
        with pytest.raises(NotFoundError), db.read() as session:
            runs.get(session, tenant_id=tenant, run_id="run", device_id=device)


def fail_for_good(db: Database, tenant_id: str, held: claims.Claim) -> None:
    with db.write() as session:
        claims.fail(session, held, error={"type": "T", "message": "no disk"}, retryable=False)


def fail_too_often(db: Database, tenant_id: str, held: claims.Claim) -> None:
    with db.write() as session:
        rows.get(session, Job, tenant_id=tenant_id, row_id=held.job_id).max_attempts = 1
        claims.fail(session, held, error={"type": "T", "message": "killed"}, retryable=True)


def stop(db: Database, tenant_id: str, held: claims.Claim) -> None:
    with db.write() as session:
        queue.request_cancel(session, tenant_id=tenant_id, job_id=held.job_id)
        claims.cancelled(session, held)


def cancel_in_the_queue(db: Database, tenant_id: str, held: claims.Claim) -> None:
    with db.write() as session:
        claims.release(session, held)
        queue.request_cancel(session, tenant_id=tenant_id, job_id=held.job_id)


def claimed(db: Database) -> claims.Claim:
    with db.write() as session:
        held = claims.claim(session, worker="w", lease_s=30)
    assert held is not None
    return held


def log_of(db: Database, tenant_id: str) -> tuple[str | None, str | None]:
    with db.read() as session:
        row = runs.get(session, tenant_id=tenant_id, run_id="run")
    return row.log_state, row.log_reason


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (fail_for_good, "replay-failed: no disk"),
        (fail_too_often, "replay-failed: killed"),
        (stop, "replay-cancelled"),
        (cancel_in_the_queue, "replay-cancelled"),
    ],
)
@pytest.mark.parametrize("again", ["retry", "send"])
def test_a_log_whose_replay_ends_without_a_verdict_is_undecided_until_it_is_tried_again(
    db: Database,
    tenant_id: str,
    device_id: str,
    end: Callable[[Database, str, claims.Claim], None],
    reason: str,
    again: str,
) -> None:
    report(db, tenant_id, device_id)
    job_id = attach(db, tenant_id, device_id)
    end(db, tenant_id, claimed(db))
    assert log_of(db, tenant_id) == ("undecided", reason)

    if again == "send":
        assert attach(db, tenant_id, device_id) == job_id
    else:
        with db.write() as session:
            queue.retry(session, tenant_id=tenant_id, job_id=job_id)
    assert log_of(db, tenant_id) == ("pending", None)

    held = claimed(db)
    with db.write() as session:
        runs.finish_log(session, tenant_id=tenant_id, run_id="run", log_digest=LOG, verdict=VERIFIED)
        claims.complete(session, held, result_id="run")
    assert log_of(db, tenant_id) == ("verified", None)


def test_a_verdict_stays_when_the_same_log_is_sent_again(
    db: Database, tenant_id: str, device_id: str
) -> None:
    report(db, tenant_id, device_id)
    job_id = attach(db, tenant_id, device_id)
    held = claimed(db)
    with db.write() as session:
        refused = runs.LogVerdict(state=LogState.REFUSED, reason="log-corrupt")
        runs.finish_log(session, tenant_id=tenant_id, run_id="run", log_digest=LOG, verdict=refused)
        claims.complete(session, held, result_id="run")
    assert attach(db, tenant_id, device_id) == job_id
    assert log_of(db, tenant_id) == ("refused", "log-corrupt")


def test_a_deleted_log_does_not_come_back_with_its_job(db: Database, tenant_id: str, device_id: str) -> None:
    report(db, tenant_id, device_id)
    job_id = attach(db, tenant_id, device_id)
    with db.write() as session:
        runs.delete_log(session, tenant_id=tenant_id, run_id="run", device_id=device_id)
        queue.retry(session, tenant_id=tenant_id, job_id=job_id)
    fail_for_good(db, tenant_id, claimed(db))
    assert log_of(db, tenant_id) == (None, None)


def test_the_job_of_a_deleted_log_says_nothing_of_the_next_one(
    db: Database, tenant_id: str, device_id: str
) -> None:
    report(db, tenant_id, device_id)
    earlier = attach(db, tenant_id, device_id)
    with db.write() as session:
        runs.delete_log(session, tenant_id=tenant_id, run_id="run", device_id=device_id)
    assert attach(db, tenant_id, device_id, log=LAYER) != earlier
    with db.write() as session:
        queue.retry(session, tenant_id=tenant_id, job_id=earlier)
        queue.request_cancel(session, tenant_id=tenant_id, job_id=earlier)
    assert log_of(db, tenant_id) == ("pending", None)

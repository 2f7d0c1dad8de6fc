"""Tests of replaying the logs that devices share, and of checking packed states."""

import hashlib
import shutil
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from permille.choices import EstimatorKind
from permille.package.manifest import Manifest
from permille.package.reader import Package
from permille.schemas.jobs import JobKind
from permille.schemas.runs import LogForm
from permille.store import devices, rows, runs, uploads
from permille.store.tables import Artifact, Job, Run
from permille.zo.header import DirectionKind, LogHeader, Schedule
from permille.zo.lattice import state_digest
from permille.zo.log import decode_canonical, encode_canonical
from permille.zo.packed_state import StateHeader, StateOrigin, encode_state
from permille.zo.records import StepFlag, StepRecord
from permille.zo.replay import replay
from tests.artifacts import QUOTA
from tests.unit.workers.conftest import Bench
from tests.unit.workers.jobs import build_request, made_by, manifest_of, succeeded

RUN_ID = "5a0d2d3c-1c51-4b71-9a53-0d4f1f2f7c11"


def shared_log(bench: Bench, package: Artifact, **changes: Any) -> bytes:
    manifest = manifest_of(bench, package)
    fields: dict[str, Any] = {
        "package_digest": package.digest,
        "mask_digest": manifest.mask_digest,
        "seed": 7,
        "estimator": EstimatorKind.SPSA,
        "queries": 2,
        "epsilon": 1e-2,
        "learning_rate": 1e-2,
        "schedule": Schedule.CONSTANT,
        "total_steps": 5,
        "step_unit_exponent": -20,
        "counts": manifest.counts,
        **changes,
    }
    records = [
        StepRecord(step=step, coefficients=(step + 1, -3 * step), loss=1.0, flags=StepFlag.NONE)
        for step in range(5)
    ]
    return encode_canonical(LogHeader(**fields), records)


def state_of(data: bytes) -> str:
    log = decode_canonical(data, max_bytes=1 << 20, max_steps=100)
    s_K = replay(log.header, log.coefficients_TQ)
    return state_digest(
        s_K, mask_digest=log.header.mask_digest, step_unit_exponent=log.header.step_unit_exponent
    )


def queued_replay(
    bench: Bench,
    package: Artifact,
    data: bytes,
    claimed: str | None,
    form: LogForm = LogForm.LOG,
    **more: object,
) -> Job:
    with bench.db.write() as session:
        _, code = devices.invite(session, tenant_id=bench.tenant_id, release="r", alias="stable")
        device = devices.enrol(session, code=code, public_key="k", name="n", agent_version="1.0.0").device
        metrics: dict[str, object] = {"package_digest": package.digest, "state_digest": claimed, **more}
        runs.report(session, tenant_id=bench.tenant_id, device_id=device.id, run_id=RUN_ID, metrics=metrics)
        upload_id = uploads.begin(
            session, tenant_id=bench.tenant_id, device_id=device.id, run_id=RUN_ID, quota=QUOTA
        ).id
        folder = uploads.open_folder(bench.blobs, tenant_id=bench.tenant_id, upload_id=upload_id)
        digest = folder.put_bytes(data)
        _, job = runs.attach_log(
            session,
            tenant_id=bench.tenant_id,
            device_id=device.id,
            run_id=RUN_ID,
            log=runs.SentLog(form=form, digest=digest, size_bytes=len(data), upload_id=upload_id),
        )
    return job


def replayed(
    bench: Bench,
    package: Artifact,
    data: bytes,
    claimed: str | None,
    form: LogForm = LogForm.LOG,
    **more: object,
) -> Run:
    job = queued_replay(bench, package, data, claimed, form, **more)
    bench.run_queued()
    succeeded(bench.read(job))
    with bench.db.read() as session:
        return runs.get(session, tenant_id=bench.tenant_id, run_id=RUN_ID)


def test_replay_verifies_the_devices_state(bench: Bench, package: Artifact) -> None:
    data = shared_log(bench, package)
    run = replayed(bench, package, data, state_of(data))
    assert (run.log_state, run.log_reason, run.state_digest) == ("verified", None, state_of(data))


def test_a_log_in_a_basis_is_replayed_with_the_basis_of_its_package(bench: Bench) -> None:
    package = made_by(bench, JobKind.BUILD, build_request(bench, basis=True))
    one_sided = {"estimator": EstimatorKind.ONE_SIDED, "directions": DirectionKind.GROUPS}
    data = shared_log(bench, package, basis_steps=3, **one_sided)
    log = decode_canonical(data, max_bytes=1 << 20, max_steps=100)
    basis = Package.open(bench.blobs, package.digest).basis()
    s_K = replay(log.header, log.coefficients_TQ, basis=basis)
    expected = state_digest(s_K, mask_digest=log.header.mask_digest, step_unit_exponent=-20)
    run = replayed(bench, package, data, expected)
    assert (run.log_state, run.log_reason) == ("verified", None)


def test_a_log_in_a_basis_that_its_package_lacks_is_refused(bench: Bench, package: Artifact) -> None:
    one_sided = {"estimator": EstimatorKind.ONE_SIDED, "directions": DirectionKind.GROUPS}
    run = replayed(bench, package, shared_log(bench, package, basis_steps=3, **one_sided), None)
    assert run.log_state == "refused" and "the package has none" in str(run.log_reason)


def scaled_state_of(data: bytes, eighths: int) -> str:
    log = decode_canonical(data, max_bytes=1 << 20, max_steps=100)
    s_K = np.array([round(Fraction(int(s) * eighths, 8)) for s in replay(log.header, log.coefficients_TQ)])
    return state_digest(s_K, mask_digest=log.header.mask_digest, step_unit_exponent=-20)


def test_replay_leads_to_the_trained_state_and_at_its_strength_to_the_adopted_one(
    bench: Bench, package: Artifact
) -> None:
    data = shared_log(bench, package)
    adopted = scaled_state_of(data, 3)
    run = replayed(bench, package, data, state_of(data), strength=3, scaled_digest=adopted)
    assert adopted != state_of(data)
    assert (run.log_state, run.log_reason, run.state_digest) == ("verified", None, state_of(data))


@pytest.mark.parametrize(("strength", "words"), [(4, "at 4/8 of its strength"), (0, "1 to 8 eighths")])
def test_replay_refuses_another_strength(bench: Bench, package: Artifact, strength: int, words: str) -> None:
    data = shared_log(bench, package)
    adopted = scaled_state_of(data, 3)
    run = replayed(bench, package, data, state_of(data), strength=strength, scaled_digest=adopted)
    assert (run.log_state, run.state_digest) == ("refused", state_of(data))
    assert words in str(run.log_reason)


def test_replay_refuses_another_state(bench: Bench, package: Artifact) -> None:
    data = shared_log(bench, package)
    run = replayed(bench, package, data, "sha256:" + "0" * 64)
    assert (run.log_state, run.state_digest) == ("refused", state_of(data))
    assert "state-differs" in str(run.log_reason)


@pytest.mark.parametrize(
    "changes",
    [
        {"package_digest": "sha256:" + "1" * 64},
        {"mask_digest": "sha256:" + "1" * 64},
        {"counts": (1, 2, 3)},
    ],
)
def test_replay_refuses_a_foreign_log(bench: Bench, package: Artifact, changes: dict[str, Any]) -> None:
    run = replayed(bench, package, shared_log(bench, package, **changes), None)
    assert run.log_state == "refused"
    assert "log-foreign" in str(run.log_reason)


def test_replay_refuses_a_malformed_log(bench: Bench, package: Artifact) -> None:
    data = shared_log(bench, package)
    run = replayed(bench, package, data[:-1] + bytes([data[-1] ^ 1]), None)
    assert run.log_state == "refused"
    assert "log-corrupt" in str(run.log_reason)


def deleted_manifest(bench: Bench, manifest: Manifest) -> None:
    bench.blobs.delete(manifest.digest)


def deleted_log(bench: Bench, _: Manifest) -> None:
    shutil.rmtree(bench.settings.blob_root / "uploads" / bench.tenant_id)


@pytest.mark.parametrize("damage", [deleted_manifest, deleted_log])
def test_a_damaged_blob_of_the_service_is_no_verdict_on_the_devices_log(
    bench: Bench, package: Artifact, damage: Callable[[Bench, Manifest], None]
) -> None:
    data = shared_log(bench, package)
    job = queued_replay(bench, package, data, None)
    damage(bench, manifest_of(bench, package))
    with bench.db.write() as session:
        rows.get(session, Job, tenant_id=bench.tenant_id, row_id=job.id).max_attempts = 1
    bench.run_queued()
    after = bench.read(job)
    assert after.state == "dead" and "cannot be read from the blob store" in str(after.error)
    with bench.db.read() as session:
        run = runs.get(session, tenant_id=bench.tenant_id, run_id=RUN_ID)
    assert run.log_state == "undecided"
    assert str(run.log_reason).startswith("replay-failed: ")


# --- packed states in a log's place

OTHER = "sha256:" + "1" * 64


def sent_state(bench: Bench, package: Artifact, **changes: Any) -> tuple[bytes, str]:
    """Return a packed state of every masked weight, and its digest."""
    manifest = manifest_of(bench, package)
    fields: dict[str, Any] = {
        "package_digest": package.digest,
        "mask_digest": manifest.mask_digest,
        "step_unit_exponent": -20,
        "k": manifest.k,
        "origin": StateOrigin.PERSONAL,
        **changes,
    }
    s_K = np.arange(fields["k"], dtype=np.int64) - 7
    data = encode_state(StateHeader(**fields), s_K)
    return data, state_digest(s_K, mask_digest=fields["mask_digest"], step_unit_exponent=-20)


def test_a_packed_state_is_verified_by_its_digest(bench: Bench, package: Artifact) -> None:
    data, digest = sent_state(bench, package)
    run = replayed(bench, package, data, digest, LogForm.STATE)
    assert (run.log_state, run.log_reason, run.state_digest) == ("verified", None, digest)
    assert run.log_form == "state"


FOREIGN_STATES: list[tuple[str, dict[str, Any]]] = [
    ("state-binding", {"package_digest": OTHER}),
    ("state-binding", {"mask_digest": OTHER}),
    ("state-binding", {"k": 3}),
    ("state-limit", {"k": 20_000}),
    ("state-binding", {"origin": StateOrigin.POOLED}),
]


@pytest.mark.attack(13, "uploads a state of another package, mask, size or origin")
@pytest.mark.parametrize(("code", "changes"), FOREIGN_STATES)
def test_a_foreign_state_is_refused(
    bench: Bench, package: Artifact, code: str, changes: dict[str, Any]
) -> None:
    data, digest = sent_state(bench, package, **changes)
    run = replayed(bench, package, data, digest, LogForm.STATE)
    assert (run.log_state, run.state_digest) == ("refused", None)
    assert code in str(run.log_reason)


def resealed(data: bytes) -> bytes:
    return data + hashlib.sha256(data).digest()


MALFORMED_STATES: list[tuple[str, Callable[[bytes], bytes]]] = [
    ("state-corrupt", lambda data: data[:-1]),
    ("state-corrupt", lambda data: data[:-33] + bytes([data[-33] ^ 1]) + data[-32:]),
    ("state-content", lambda data: resealed(data[:-33])),
    ("state-content", lambda data: resealed(data[:-32] + b"\0")),
    ("state-corrupt", lambda data: b""),
]


@pytest.mark.attack(13, "uploads a state that is cut, flipped or followed by more")
@pytest.mark.parametrize(("code", "change"), MALFORMED_STATES)
def test_a_malformed_state_is_refused(
    bench: Bench, package: Artifact, code: str, change: Callable[[bytes], bytes]
) -> None:
    data, digest = sent_state(bench, package)
    run = replayed(bench, package, change(data), digest, LogForm.STATE)
    assert run.log_state == "refused"
    assert code in str(run.log_reason)


@pytest.mark.attack(13, "uploads a state with an integer beyond 2^53")
def test_a_state_beyond_the_exact_range_is_refused(bench: Bench, package: Artifact) -> None:
    data, digest = sent_state(bench, package)
    head = data[: 12 + int.from_bytes(data[8:12], "little")]
    k = manifest_of(bench, package).k
    block = b"\x37" + (2**54 + 1).to_bytes(-(-55 * k // 8), "little")
    run = replayed(bench, package, resealed(head + block), digest, LogForm.STATE)
    assert run.log_state == "refused"
    assert "state-content" in str(run.log_reason)


@pytest.mark.attack(13, "uploads another state than the one it reported")
def test_another_state_than_the_reported_one_is_refused(bench: Bench, package: Artifact) -> None:
    data, digest = sent_state(bench, package)
    run = replayed(bench, package, data, OTHER, LogForm.STATE)
    assert (run.log_state, run.state_digest) == ("refused", digest)
    assert "state-differs" in str(run.log_reason)


@pytest.mark.attack(13, "uploads a log as a state, and a state as a log")
@pytest.mark.parametrize("form", list(LogForm))
def test_the_form_that_was_said_is_the_one_that_is_read(
    bench: Bench, package: Artifact, form: LogForm
) -> None:
    data = shared_log(bench, package) if form is LogForm.STATE else sent_state(bench, package)[0]
    assert replayed(bench, package, data, None, form).log_state == "refused"

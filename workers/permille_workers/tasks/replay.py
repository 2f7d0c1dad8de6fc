"""The replay job: replay an uploaded log, and compare the result with the digest that the device reports.

A device may send a packed state instead of a log. The state is decoded, and compared in the same way. A
device can use its state at a reduced strength, which multiplies all changes of weights by a number of
eighths. If it does so, the digest of the reduced state is compared as well.

If an upload is malformed, foreign or too large, it is refused with a reason, and the job itself succeeds.
Uploads are not trusted: they are read with a limit, decoded strictly, and never executed.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sqlalchemy.orm import Session

from permille.errors import InputError, PackageError, RetryableError
from permille.package.basis import Basis, stored_basis
from permille.package.blobs import BlobFolder
from permille.package.limits import MAX_MANIFEST_BYTES
from permille.package.manifest import Manifest
from permille.schemas.jobs import JobKind
from permille.schemas.runs import MAX_LOG_BYTES, LogForm, LogState, ReplayRequest
from permille.store import runs, uploads
from permille.store.errors import NotFoundError
from permille.store.runs import LogVerdict
from permille.store.tables import Run
from permille.training.strength import EIGHTHS, scaled
from permille.zo.header import MAX_STEPS
from permille.zo.lattice import state_digest
from permille.zo.log import MAX_HEAD_BYTES, CanonicalLog, decode_canonical
from permille.zo.packed_state import StateOrigin, decode_state
from permille.zo.replay import check_replay_work, replay
from permille_workers.runtime.context import Publish, TaskContext


def run(context: TaskContext, request: ReplayRequest) -> Publish:
    """Replay the log of a run, or decode its state, and record the verdict.

    Raises:
        InputError: the run or its log was deleted.
        RetryableError: a stored blob is missing or damaged, so the log can neither be verified nor refused.
    """
    with context.db.read() as session:
        row = runs.get(session, tenant_id=context.claim.tenant_id, run_id=request.run_id)
    log_digest, upload_id = row.log_digest, row.log_upload_id
    if log_digest is None or upload_id is None:
        raise InputError(f"The log of run {request.run_id} was deleted.")
    context.progress(0.0, "reading the log")
    folder = uploads.open_folder(context.blobs, tenant_id=row.tenant_id, upload_id=upload_id)
    verdict = verdict_of_replay(context, row, _stored_log(folder, log_digest))

    def publish(session: Session) -> str:
        runs.finish_log(
            session,
            tenant_id=context.claim.tenant_id,
            run_id=request.run_id,
            log_digest=log_digest,
            verdict=verdict,
        )
        return request.run_id

    return publish


def verdict_of_replay(context: TaskContext, run_row: Run, data: bytes) -> LogVerdict:
    """Decode a log or a state, check that it belongs to the run's package, and replay the log. Compare the
    result with the device's digests.

    Raises:
        RetryableError: the manifest of the package cannot be read from the blob store.
    """
    reached_by = _decoded_state if run_row.log_form == LogForm.STATE else _replayed_log
    try:
        reached = reached_by(context, data, _manifest(context, run_row))
    except (PackageError, InputError) as exc:
        return LogVerdict(state=LogState.REFUSED, reason=str(exc))
    metrics, found = run_row.metrics, reached.digest()
    if (reason := _difference(metrics.get("state_digest"), found)) is not None:
        return LogVerdict(state=LogState.REFUSED, reason=reason, state_digest=found)
    strength, claimed = metrics.get("strength"), metrics.get("scaled_digest")
    if isinstance(strength, int) and claimed is not None:
        try:
            at_strength = reached.digest(strength)
        except InputError as exc:
            return LogVerdict(state=LogState.REFUSED, reason=str(exc), state_digest=found)
        if (reason := _difference(claimed, at_strength)) is not None:
            reason = f"{reason} at {strength}/{EIGHTHS} of its strength"
            return LogVerdict(state=LogState.REFUSED, reason=reason, state_digest=found)
    return LogVerdict(state=LogState.VERIFIED, state_digest=found)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Reached:
    """The state at the end of a log, or the state that was sent instead of a log."""

    s_K: NDArray[np.int64]
    mask_digest: str
    step_unit_exponent: int

    def digest(self, eighths: int = EIGHTHS) -> str:
        """Compute the digest of the state at a strength of this number of eighths."""
        s_K = scaled(self.s_K, eighths)
        return state_digest(s_K, mask_digest=self.mask_digest, step_unit_exponent=self.step_unit_exponent)


def _difference(claimed: object, found: str) -> str | None:
    """Describe how the device's digest differs from the computed one.

    Return None if they are equal, or if the device sent no digest.
    """
    if claimed is None or claimed == found:
        return None
    return f"state-differs: the device reports {claimed}, but the replay gives {found}"


def _replayed_log(context: TaskContext, data: bytes, manifest: Manifest) -> _Reached:
    check_replay_work(data[:MAX_HEAD_BYTES])
    log = decode_canonical(data, max_bytes=MAX_LOG_BYTES, max_steps=MAX_STEPS)
    _check_bound_to(log, manifest)
    context.progress(0.1, "replaying")
    header, threads = log.header, context.settings.threads or 1
    basis = _basis(context, manifest) if header.basis_steps else None
    s_K = replay(header, log.coefficients_TQ, threads=threads, basis=basis)
    return _Reached(s_K=s_K, mask_digest=header.mask_digest, step_unit_exponent=header.step_unit_exponent)


def _decoded_state(_: TaskContext, data: bytes, manifest: Manifest) -> _Reached:
    state = decode_state(data, max_bytes=MAX_LOG_BYTES, max_k=manifest.k)
    mask_digest = manifest.mask_digest
    state.check_binding(package_digest=manifest.digest, mask_digest=mask_digest, k=manifest.k)
    if state.header.origin is not StateOrigin.PERSONAL:
        raise PackageError(
            "state-binding", f"The origin of the state must be personal, got {state.header.origin}"
        )
    return _Reached(
        s_K=state.s_K, mask_digest=mask_digest, step_unit_exponent=state.header.step_unit_exponent
    )


def _basis(context: TaskContext, manifest: Manifest) -> Basis | None:
    try:
        return stored_basis(context.blobs, manifest)
    except PackageError as exc:
        raise RetryableError(f"The basis of {manifest.digest} cannot be read: {exc}") from exc


def _manifest(context: TaskContext, run_row: Run) -> Manifest:
    digest = str(run_row.metrics.get("package_digest"))
    try:
        context.artifact(JobKind.PACKAGE, digest)
    except NotFoundError as exc:
        raise PackageError("log-foreign", f"The package {digest} does not belong to this service") from exc
    try:
        return Manifest.from_bytes(context.blobs.read(digest, limit=MAX_MANIFEST_BYTES))
    except PackageError as exc:
        raise RetryableError(f"The manifest {digest} cannot be read from the blob store: {exc}") from exc


def _stored_log(folder: BlobFolder, log_digest: str) -> bytes:
    try:
        return folder.read(log_digest, limit=MAX_LOG_BYTES)
    except PackageError as exc:
        raise RetryableError(f"The log {log_digest} cannot be read from the blob store: {exc}") from exc


def _check_bound_to(log: CanonicalLog, manifest: Manifest) -> None:
    header = log.header
    expected = (manifest.digest, manifest.mask_digest, manifest.counts)
    if (header.package_digest, header.mask_digest, header.counts) != expected:
        raise PackageError(
            "log-foreign",
            f"The log belongs to package {header.package_digest}, but the run to package {manifest.digest}",
        )

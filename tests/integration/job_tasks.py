"""Scripted tasks for tests of the job protocol: `python -m tests.integration.job_tasks child`.

The payload of a job is its script: `steps` of `step_s` seconds, then `ends` ("well", "badly" ...). Each
attempt appends a line to the file `trace`, so that a test sees which attempts ran. With the argument
`worker`, the program is a worker whose children run these tasks. The variable `JOB_TASKS_SILENCE_S` shortens
the minute after which a worker without messages looks into the database.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

from sqlalchemy.orm import Session

from permille.errors import InputError, RetryableError
from permille.files import write_atomic
from permille.store import artifacts
from permille.store.artifacts import Blob, TaskResult
from permille_workers.__main__ import run_worker
from permille_workers.runtime import celery_app, supervisor, sweeper
from permille_workers.runtime.child import run_child
from permille_workers.runtime.context import Publish, TaskContext
from permille_workers.runtime.settings import RESEND_AFTER_S, WorkerSettings
from tests.artifacts import some_model

CHILD_COMMAND = (sys.executable, "-m", "tests.integration.job_tasks", "child")


def scripted(context: TaskContext) -> Publish:
    """Do what the payload says. The result is a row whose digest contains the job and the fence."""
    claim = context.claim
    payload: dict[str, Any] = dict(claim.payload)
    with Path(payload["trace"]).open("a") as trace:
        trace.write(f"{claim.job_id} {claim.attempt} {claim.fence} {os.getpid()}\n")
    done = context.work_folder / "done"
    first = int(done.read_text()) if done.exists() else 0
    for step in range(first, payload["steps"]):
        if not payload.get("deaf"):
            context.progress(step / payload["steps"], f"step {step}")
        time.sleep(payload["step_s"])
        write_atomic(done, str(step + 1).encode())
    if payload.get("ends") == "badly":
        raise InputError("expected good input, got bad")
    if payload.get("ends") == "flakily" and claim.attempt == 1:
        raise RetryableError("not yet")
    if payload.get("ends") == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    blob = context.blobs.put_bytes(f"{claim.job_id} {first}".encode())

    def publish(session: Session) -> str:
        made = TaskResult(
            model_id=some_model(session, claim.tenant_id),
            digest=f"{claim.job_id}/{claim.fence}",
            k=claim.fence,
            provenance={},
            blobs=(Blob(role="mask", media_type="m", digest=blob, size_bytes=1),),
        )
        return artifacts.add(session, job=claim, made=made).id

    return publish


def main() -> None:
    """Run the child or the worker."""
    if sys.argv[1] == "child":
        run_child(dict.fromkeys(("mask", "quantization", "package"), scripted), sys.stdin.buffer)
    else:
        silence_s = float(os.environ.get("JOB_TASKS_SILENCE_S", RESEND_AFTER_S))
        with (
            patch.object(celery_app, "RESEND_AFTER_S", silence_s),
            patch.object(sweeper, "RESEND_AFTER_S", silence_s),
            patch.object(supervisor, "CANCEL_GRACE_S", 1.0),
        ):
            run_worker(WorkerSettings.model_validate({}), child_command=CHILD_COMMAND)


if __name__ == "__main__":
    main()

"""Long work: its state, its progress, and the events that it leaves."""

from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field

from permille.schemas.fields import Closed, Count, Id, Timestamp


class JobKind(StrEnum):
    """What a job makes."""

    MASK = "mask"
    QUANTIZATION = "quantization"
    PACKAGE = "package"
    BUILD = "build"
    REPLAY = "replay"


class JobState(StrEnum):
    """Where a job is. `failed`, `cancelled` and `dead` may be retried; `succeeded` is final."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    DEAD = "dead"


class JobProgress(Closed):
    """How far a running job is. `seconds_left` is an estimate, null while there is none."""

    fraction: Annotated[float, Field(ge=0, le=1)]
    message: str | None = Field(examples=["scoring sequence 12 of 100"])
    seconds_left: Annotated[float, Field(ge=0)] | None


class JobError(Closed):
    """Why a job failed, and whether a retry may help."""

    type: str = Field(examples=["InputError"])
    message: str
    retryable: bool


class Job(Closed):
    """One job. `result` is the path of what it made, once it succeeded; `result_id` its id (a package's
    digest)."""

    id: Id
    kind: JobKind
    state: JobState
    parent_id: Id | None
    children: list[Id]
    attempt: Count
    progress: JobProgress
    error: JobError | None
    result: str | None = Field(examples=["/v1/masks/mask_01jd3kq8z7m4n5p6r7s8t9v0wx"])
    result_id: str | None = Field(examples=["mask_01jd3kq8z7m4n5p6r7s8t9v0wx"])
    cancel_requested: bool
    created_at: Timestamp
    started_at: Timestamp | None
    finished_at: Timestamp | None


class JobEvent(Closed):
    """One event of a job. `seq` counts 1, 2, 3 within the job; it is the id of the event's line in the
    stream."""

    seq: Count
    job_id: Id
    kind: str = Field(examples=["progress"])
    data: dict[str, Any]
    created_at: Timestamp

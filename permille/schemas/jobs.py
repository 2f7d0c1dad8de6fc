"""Jobs with their states, progress, events and results. Preflights compare the needs of a job with
what the machine has.
"""

from enum import StrEnum
from typing import Annotated, Final

from pydantic import Field

from permille.schemas.fields import Closed, Count, Digest, Id, Timestamp
from permille.schemas.problems import Figure


class JobKind(StrEnum):
    """Kind of a job.

    A build consists of child jobs, and a large mask is split into shards. The service starts a replay when a
    device has shared a log. It starts a round job to close a round of a federation.
    """

    SPARSIFICATION = "sparsification"
    MASK = "mask"
    SHARD = "shard"
    QUANTIZATION = "quantization"
    PACKAGE = "package"
    EXPORT = "export"
    BUILD = "build"
    REPLAY = "replay"
    ROUND = "round"


class JobState(StrEnum):
    """State of a job.

    A `failed` job has a wrong input. A `dead` job used up its attempts. A job with parts ends like the
    part that broke it. Failed, dead and cancelled jobs may be retried. Only `succeeded` is final.
    """

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    DEAD = "dead"


ENDED: Final = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.DEAD})
# This is computed, so that a new state is always in one of the two sets.
UNFINISHED: Final = frozenset(JobState) - ENDED


class EventKind(StrEnum):
    """Kind of event of a job."""

    STATE = "state"
    PROGRESS = "progress"
    MESSAGE = "message"


class JobProgress(Closed):
    """Progress of a running job. `seconds_left` is an estimate, or null."""

    # If an ended job is retried, its progress starts again at 0.
    fraction: Annotated[float, Field(ge=0, le=1)]
    message: str | None = Field(examples=["scoring sequence 12 of 100"])
    seconds_left: Annotated[float, Field(ge=0)] | None


class JobError(Closed):
    """The reason for which an attempt or a job failed, and whether a retry may help."""

    type: str = Field(examples=["InputError"])
    message: str
    retryable: bool


class Job(Closed):
    """One job.

    After success, `result_id` names the result, and `result` is its path. A package's id is its
    digest. A shard has no path, since only its parent reads its result.
    """

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


class EventData(Closed):
    """Data of an event. Fields that do not apply are null."""

    state: JobState | None = None
    progress: float | None = None
    eta_s: float | None = Field(default=None, description="estimate of the seconds left")
    message: str | None = None
    attempt: Count | None = None
    worker: str | None = None
    job_id: Id | None = Field(default=None, description="id of a child job that was added")
    result_id: str | None = None
    error: JobError | None = None


class JobEvent(Closed):
    """One event of a job. `seq` counts 1, 2, 3 within the job, and is the id of the event in the
    stream.
    """

    seq: Count
    job_id: Id
    kind: EventKind
    data: EventData
    created_at: Timestamp


class Preflight(Closed):
    """The needs of a job, and whether the machine meets them."""

    accepted: bool
    figures: list[Figure]
    unknown: str | None = Field(
        default=None,
        description="reason why the needs are unknown, or null. A job with unknown needs is not refused",
        examples=["the files of this hub model have not been read yet: its first job reads them"],
    )


class Result(Closed):
    """Fields that all results of jobs have."""

    model_id: Id
    job_id: Id
    digest: Digest
    size_bytes: Count
    created_at: Timestamp

"""Long work: its state, its progress, the events that it leaves, and whether a machine can hold it."""

from enum import StrEnum
from typing import Annotated, Final

from pydantic import Field

from permille.schemas.fields import Closed, Count, Digest, Id, Timestamp
from permille.schemas.problems import Figure


class JobKind(StrEnum):
    """Kind of a job. A build is done by its child jobs, a mask of much work by shards; a shared log starts
    its replay, a federation the closing of a round."""

    SPARSIFICATION = "sparsification"
    MASK = "mask"
    SHARD = "shard"
    QUANTIZATION = "quantization"
    PACKAGE = "package"
    POOLING = "pooling"
    EXPORT = "export"
    BUILD = "build"
    REPLAY = "replay"
    ROUND = "round"


class JobState(StrEnum):
    """State of a job. `failed`: its input or a part is wrong; `dead`: it was tried too often. Both, and
    `cancelled`, may be retried; `succeeded` is final."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    DEAD = "dead"


ENDED: Final = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.DEAD})
UNFINISHED: Final = frozenset(JobState) - ENDED


class EventKind(StrEnum):
    """Kind of event of a job."""

    STATE = "state"
    PROGRESS = "progress"
    MESSAGE = "message"


class JobProgress(Closed):
    """Progress of a running job. `seconds_left` is an estimate, or null."""

    fraction: Annotated[float, Field(ge=0, le=1)]
    message: str | None = Field(examples=["scoring sequence 12 of 100"])
    seconds_left: Annotated[float, Field(ge=0)] | None


class JobError(Closed):
    """Reason that an attempt or a job failed, and whether a retry may help."""

    type: str = Field(examples=["InputError"])
    message: str
    retryable: bool


class Job(Closed):
    """One job. `result` is the path of what it made, once it succeeded; `result_id` its id (a package's
    digest). A shard's sums are of use to its parent alone, and have no path."""

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
    eta_s: float | None = Field(default=None, description="seconds left, as estimated")
    message: str | None = None
    attempt: Count | None = None
    worker: str | None = None
    job_id: Id | None = Field(default=None, description="the part that was added")
    result_id: str | None = None
    error: JobError | None = None


class JobEvent(Closed):
    """One event of a job. `seq` counts 1, 2, 3 within the job; it is the id of the event's line in the
    stream."""

    seq: Count
    job_id: Id
    kind: EventKind
    data: EventData
    created_at: Timestamp


class Preflight(Closed):
    """Needs of the work, and whether the machine can meet them."""

    accepted: bool
    figures: list[Figure]
    unknown: str | None = Field(
        default=None,
        description="why needs are unknown, so that nothing is refused",
        examples=["the files of this hub model have not been read yet: its first job does"],
    )


class Made(Closed):
    """Fields of every result of a job."""

    model_id: Id
    job_id: Id
    digest: Digest
    size_bytes: Count
    created_at: Timestamp

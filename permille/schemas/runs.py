"""Runs: the reports of devices about their trainings. A report consists of numbers, times, digests, the
release, the version of the agent, and names from fixed sets. It contains no text of a user.
"""

from enum import StrEnum
from typing import Annotated, ClassVar, Final

from pydantic import Field, StringConstraints

from permille.choices import EstimatorKind, Method
from permille.schemas.devices import AgentVersion
from permille.schemas.fields import (
    EXAMPLE_DIGEST,
    Closed,
    Count,
    Digest,
    Examples,
    Finite,
    Id,
    Name,
    Timestamp,
    WholeNumber,
)
from permille.schemas.releases import Version

LOG_MEDIA_TYPE: Final = "application/vnd.permille.log"
STATE_MEDIA_TYPE: Final = "application/vnd.permille.state"
MAX_LOG_BYTES: Final = 64 * 1024 * 1024
# The examples in the OpenAPI document are JSON, so bytes are in base64. Devices send the bytes themselves.
_LOG: Final = (
    "UE1MTE9HMQohAgAAeyJiYXNpc19zdGVwcyI6MCwiY291bnRzIjpbMyw1XSwiZGlyZWN0aW9ucyI6InJhZGVtYWNoZXIiLCJlcHNp"
    "bG9uIjoiMHgxLjQ3YWUxNDdhZTE0N2JwLTciLCJlc3RpbWF0b3IiOiJzcHNhIiwiZmlyc3RfdGVuc29yIjowLCJmb3JtYXQiOiJw"
    "ZXJtaWxsZS1sb2ciLCJnZW5lcmF0b3IiOiJwaGlsb3g0eDMyLTEwIiwiZ2VuZXJhdG9yX3ZlcnNpb24iOjEsImxlYXJuaW5nX3Jh"
    "dGUiOiIweDEuNDdhZTE0N2FlMTQ3YnAtNyIsIm1hc2tfZGlnZXN0Ijoic2hhMjU2OjAxMjM0NTY3ODlhYmNkZWYwMTIzNDU2Nzg5"
    "YWJjZGVmMDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWYiLCJwYWNrYWdlX2RpZ2VzdCI6InNoYTI1NjowMTIzNDU2Nzg5"
    "YWJjZGVmMDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWYwMTIzNDU2Nzg5YWJjZGVmIiwicXVlcmllcyI6Miwic2NoZWR1"
    "bGUiOiJjb25zdGFudCIsInNlZWQiOiIwMDAwMDAwMDAwMDAwMDAxIiwic3BsaXQiOm51bGwsInN0ZXBfdW5pdF9leHBvbmVudCI6"
    "LTIwLCJ0b3RhbF9zdGVwcyI6MiwidmVyc2lvbiI6MX0CAAAAMCbZZQUAAAAAAgAEBZ3b22U="
)
_STATE: Final = (
    "UE1MU1RBMQoNAQAAeyJmb3JtYXQiOiJwZXJtaWxsZS1zdGF0ZSIsImsiOjgsIm1hc2tfZGlnZXN0Ijoic2hhMjU2OjAxMjM0NTY3"
    "ODlhYmNkZWYwMTIzNDU2Nzg5YWJjZGVmMDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWYiLCJvcmlnaW4iOiJwZXJzb25h"
    "bCIsInBhY2thZ2VfZGlnZXN0Ijoic2hhMjU2OjAxMjM0NTY3ODlhYmNkZWYwMTIzNDU2Nzg5YWJjZGVmMDEyMzQ1Njc4OWFiY2Rl"
    "ZjAxMjM0NTY3ODlhYmNkZWYiLCJzdGVwX3VuaXRfZXhwb25lbnQiOi0yMCwidmVyc2lvbiI6MX0D7wLRmtZK3RNGT3sKENwIVBJ+"
    "wH6yV4G6UyT8VqPpdNrxXwo="
)
UPLOAD_EXAMPLES: Final = {
    LOG_MEDIA_TYPE: {"a log of two steps, in base64": _LOG},
    STATE_MEDIA_TYPE: {"a state of eight weights, in base64": _STATE},
    "application/octet-stream": {"a log of two steps, in base64": _LOG},
}

RunId = Annotated[
    str,
    # Lower case only, so that a run has one id.
    StringConstraints(pattern=r"^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$"),
    Field(description="UUID that the device made", examples=["5a0d2d3c-1c51-4b71-9a53-0d4f1f2f7c11"]),
]
Seconds = Annotated[float, Field(strict=True, ge=0, le=1e9, allow_inf_nan=False)]
Rate = Annotated[float, Field(strict=True, ge=0, le=1e9, allow_inf_nan=False)]


class Outcome(StrEnum):
    """Outcome of a run."""

    ADOPTED = "adopted"
    KEPT_BASE = "kept_base"
    REFUSED_DATA = "refused_data"
    INTERRUPTED = "interrupted"
    FAILED = "failed"


# Without "auto", unlike `permille.choices.EngineName`: a report says which engine ran.
class EngineName(StrEnum):
    """Engine that computed the losses."""

    TORCH = "torch"
    LIGHT = "light"
    LIGHT_INT8 = "light-int8"
    EXECUTORCH = "executorch"


class OperatingSystem(StrEnum):
    """The device's operating system."""

    LINUX = "linux"
    DARWIN = "darwin"
    WINDOWS = "windows"
    OTHER = "other"


class Machine(StrEnum):
    """The device's processor family."""

    X86_64 = "x86_64"
    AARCH64 = "aarch64"
    ARMV7 = "armv7"
    RISCV64 = "riscv64"
    OTHER = "other"


class Accelerator(StrEnum):
    """The device on which the engine computed the forward passes."""

    CPU = "cpu"
    CUDA = "cuda"
    MPS = "mps"
    OTHER = "other"


class RunMetrics(Closed):
    """The metrics of a run. Losses that were not measured are null."""

    package_digest: Digest
    release: Name
    version: Version
    outcome: Outcome
    began_at: Timestamp = Field(description="start by the device's clock, which may be wrong")
    ended_at: Timestamp = Field(
        description="end by the device's clock, which may be wrong; runs are ordered by `ended_at` of `Run`"
    )
    steps: Count
    rejected_steps: Count
    queries: Count
    method: Method
    estimator: EstimatorKind
    seconds: Seconds
    tokens_trained: Count
    train_tokens: Count
    select_tokens: Count
    test_tokens: Count
    loss_base: Finite | None
    loss_personal: Finite | None
    improvement_low: Finite | None
    improvement_high: Finite | None
    learning_rate: Rate
    epsilon: Rate
    # The limits are the exponents of the smallest and of the largest float64.
    step_unit_exponent: Annotated[int, Field(strict=True, ge=-1074, le=1023), WholeNumber]
    k: Count
    peak_rss_bytes: Count
    personal_bytes: Count = Field(description="bytes of the log, or of the packed state of a gradient run")
    state_digest: Digest | None = Field(
        description="digest of the state at full strength, if the log or state is shared; else null"
    )
    agent_version: AgentVersion
    engine: EngineName
    operating_system: OperatingSystem
    machine: Machine
    accelerator: Accelerator
    general_loss_base: Finite | None = Field(
        default=None, description="loss of the base on the package's reference text; null if it has none"
    )
    general_loss_personal: Finite | None = Field(
        default=None, description="loss of the personal state, scaled by `strength`, on the reference text"
    )
    # An integer, so that device and service scale a state to the same bits.
    strength: Annotated[int, Field(strict=True, ge=0, le=8), WholeNumber] | None = Field(
        default=None,
        description="the trained state was tested at this number of eighths of its strength; 0 if even one "
        "eighth costs too much general knowledge",
    )
    scaled_digest: Digest | None = Field(
        default=None,
        description="digest of the scaled state, if the log or state is shared and `strength` is below 8; "
        "else null",
    )


class RunCreate(Closed):
    """A report of a run. A device may send the same report again."""

    examples: ClassVar[Examples] = {
        "a run whose result is in use": {
            "run_id": "5a0d2d3c-1c51-4b71-9a53-0d4f1f2f7c11",
            "metrics": {
                "package_digest": EXAMPLE_DIGEST,
                "release": "tiny-llama",
                "version": 1,
                "outcome": "adopted",
                "began_at": "2026-11-20T10:00:00Z",
                "ended_at": "2026-11-20T10:05:00Z",
                "steps": 100,
                "rejected_steps": 0,
                "queries": 8,
                "method": "zeroth-order",
                "estimator": "one_sided",
                "seconds": 300.0,
                "tokens_trained": 51200,
                "train_tokens": 9000,
                "select_tokens": 1000,
                "test_tokens": 2000,
                "loss_base": 3.42,
                "loss_personal": 3.17,
                "improvement_low": 0.19,
                "improvement_high": 0.31,
                "learning_rate": 0.01,
                "epsilon": 0.001,
                "step_unit_exponent": -30,
                "k": 94208,
                "peak_rss_bytes": 310_000_000,
                "personal_bytes": 4200,
                "state_digest": None,
                "agent_version": "0.1.0",
                "engine": "light",
                "operating_system": "linux",
                "machine": "aarch64",
                "accelerator": "cpu",
            },
        }
    }

    run_id: RunId
    metrics: RunMetrics


class LogForm(StrEnum):
    """Form of a shared run: its log of seeds and scalars, or its packed state."""

    LOG = "log"
    STATE = "state"


class LogState(StrEnum):
    """State of a shared log.

    Verified and refused are verdicts of its replay. A log is undecided if its replay failed or was
    cancelled. It becomes pending again if its job is retried, or if the device sends the same log
    again.
    """

    PENDING = "pending"
    VERIFIED = "verified"
    REFUSED = "refused"
    UNDECIDED = "undecided"


class RunLog(Closed):
    """A shared log, or a packed state in its place. It is personal data of its device and is deleted
    on request.
    """

    form: LogForm
    state: LogState
    log_digest: Digest
    state_digest: Digest | None
    reason: str | None
    size_bytes: Count
    job_id: Id | None = Field(description="job of its replay; retry this job if the log is undecided")


class Run(Closed):
    """A run, as its device and the operators of its tenant see it."""

    run_id: RunId
    device_id: Id
    created_at: Timestamp = Field(description="arrival of the report")
    ended_at: Timestamp = Field(description="end by the device's clock, at most the arrival of the report")
    metrics: RunMetrics
    log: RunLog | None


class ReplayRequest(Closed):
    """Replay the log, or check the state, that a run has shared. The service itself starts this job."""

    run_id: RunId


class LogAccepted(Closed):
    """The job that checks a shared log or state."""

    job_id: Id

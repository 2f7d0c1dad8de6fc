"""The settings of a worker process."""

from typing import Final

from pydantic import Field, SecretStr

from permille.schemas.masks import Dtype
from permille.store.settings import SettingsGroup, StoreSettings

RESEND_AFTER_S: Final = 60.0
"""Time after which a message for a queued job is repeated, and a worker without messages looks for jobs."""


class QueueSettings(SettingsGroup):
    """How workers take jobs"""

    concurrency: int = Field(default=1, ge=1, le=64, description="jobs at a time")
    lease_s: float = Field(
        default=30.0, gt=0, description="time without a sign of life after which another worker gets the job"
    )
    poll_s: float = Field(default=0.5, gt=0, description="time between two looks for jobs, and for a cancel")
    sweep_s: float = Field(
        default=2.0,
        gt=0,
        description="time between two looks for expired leases, rounds past their deadline, builds to "
        "continue, and lost messages",
    )
    collect_every_s: float = Field(
        default=3600.0,
        ge=0,
        description="time between two collections, in which one worker applies retention rules and deletes "
        "unreferenced blobs; 0: only `permille blobs collect` does this",
    )
    drain_s: float = Field(
        default=20.0,
        ge=0,
        description="time that running jobs get after SIGTERM, before they go back to the queue",
    )


class ComputeSettings(SettingsGroup):
    """Where and how jobs compute"""

    threads: int | None = Field(
        default=None, ge=1, description="compute threads of each job; none: the library's default"
    )
    device: str = Field(
        default="cpu",
        pattern=r"^(cpu|cuda(:[0-9]{1,2})?)$",
        description="where scores, sparse models, perplexity and pooled states are computed: `cuda`, "
        "`cuda:1`. It has not run on a GPU: `make gpu` tests it",
    )
    dtype: Dtype = Field(
        default="float32",
        description="precision of scores and perplexity on that device: `float32`, `bfloat16` or `float16`; "
        "sums stay float32. Set the same for all workers that share jobs",
    )


class ReachSettings(SettingsGroup):
    """Metrics, webhooks and keeper of a worker"""

    metrics_port: int | None = Field(
        default=None,
        ge=1,
        le=65_535,
        description="port of the worker's metrics, which need no token; none: no metrics",
    )
    metrics_host: str = Field(default="127.0.0.1", description="address of the worker's metrics")
    webhook_private: bool = Field(
        default=False, description="allow webhooks to loopback and to private networks"
    )
    keeper_token: SecretStr | None = Field(
        default=None, description="token for the [keeper](../explanation/privacy.md) of masked rounds"
    )


class WorkerSettings(ReachSettings, ComputeSettings, QueueSettings, StoreSettings):
    """Settings of a worker, beyond the store's."""

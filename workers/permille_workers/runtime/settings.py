"""The settings of a worker process."""

from typing import Final

from pydantic import Field, SecretStr

from permille.schemas.masks import Dtype
from permille.store.settings import SettingsGroup, StoreSettings

RESEND_AFTER_S: Final = 60.0
"""Seconds after which a queued job is sent again, and a worker that was sent none looks for jobs itself."""


class QueueSettings(SettingsGroup):
    """How workers take jobs"""

    concurrency: int = Field(default=1, ge=1, le=64, description="jobs at a time")
    lease_s: float = Field(
        default=30.0, gt=0, description="silence after which a job is given to another worker"
    )
    poll_s: float = Field(default=0.5, gt=0, description="how often to look for jobs, and for a cancel")
    sweep_s: float = Field(
        default=2.0,
        gt=0,
        description="how often to look for expired leases, rounds past their deadline, builds to move on, "
        "lost messages",
    )
    collect_every_s: float = Field(
        default=3600.0,
        ge=0,
        description="how often one of the workers applies retention rules and deletes what no row names; "
        "0: only `permille blobs collect` does",
    )
    drain_s: float = Field(
        default=20.0,
        ge=0,
        description="after SIGTERM running jobs may take so long, then they go back to the queue",
    )


class ComputeSettings(SettingsGroup):
    """Where and how jobs compute"""

    threads: int | None = Field(
        default=None, ge=1, description="compute threads of each job; none: as many as the library takes"
    )
    device: str = Field(
        default="cpu",
        pattern=r"^(cpu|cuda(:[0-9]{1,2})?)$",
        description="where scores, sparse models, perplexity and pooled states are computed: `cuda`, "
        "`cuda:1`. It has not run on a GPU: `make gpu` tests it",
    )
    dtype: Dtype = Field(
        default="float32",
        description="in which precision scores and perplexity are computed there: `bfloat16`, `float16`; "
        "sums stay float32. The same for all workers that share jobs",
    )


class ReachSettings(SettingsGroup):
    """Metrics, webhooks and keeper of a worker"""

    metrics_port: int | None = Field(
        default=None,
        ge=1,
        le=65_535,
        description="where a worker serves its numbers, without a token; none: it does not",
    )
    metrics_host: str = Field(default="127.0.0.1", description="address for them")
    webhook_private: bool = Field(
        default=False, description="webhooks may also go to loopback and to private networks"
    )
    keeper_token: SecretStr | None = Field(
        default=None, description="what the [keeper](../explanation/privacy.md) of masked rounds asks for"
    )


class WorkerSettings(ReachSettings, ComputeSettings, QueueSettings, StoreSettings):
    """Settings of a worker, beyond the store's."""

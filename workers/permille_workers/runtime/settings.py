"""The settings of a worker process."""

from typing import Final

from pydantic import Field

from permille.schemas.masks import Dtype
from permille.store.settings import MAX_S, HeaderToken, SettingsGroup, StoreSettings

RESEND_AFTER_S: Final = 60.0
"""Seconds after which the message for a queued job is sent again.

A worker that has got no message for this time looks for jobs in the database.
"""


class QueueSettings(SettingsGroup):
    """Jobs of a worker"""

    concurrency: int = Field(default=1, ge=1, le=64, description="number of jobs that run at the same time")
    lease_s: float = Field(
        default=30.0,
        gt=0,
        le=MAX_S,
        description="seconds without a sign of life from a worker, after which another worker gets its job",
    )
    poll_s: float = Field(
        default=0.5, gt=0, le=MAX_S, description="seconds between two checks for new jobs and cancellations"
    )
    sweep_s: float = Field(
        default=2.0,
        gt=0,
        le=MAX_S,
        description="seconds between two checks for expired leases, rounds past their deadline, builds to "
        "continue, and lost messages",
    )
    collect_every_s: float = Field(
        default=3600.0,
        ge=0,
        le=MAX_S,
        description="seconds between two collections, in which one worker applies the retention rules and "
        "deletes unreferenced blobs. With 0, workers do neither; use `permille retention apply` and "
        "`permille blobs collect`",
    )
    drain_s: float = Field(
        default=20.0,
        ge=0,
        le=MAX_S,
        description="seconds that running jobs get after SIGTERM, before they go back to the queue",
    )


class ComputeSettings(SettingsGroup):
    """Where and how jobs compute"""

    threads: int | None = Field(
        default=None,
        ge=1,
        description="compute threads of each job. Default: as the libraries choose, within the limit of a "
        "container",
    )
    device: str = Field(
        default="cpu",
        pattern=r"^(cpu|cuda(:(0|[1-9][0-9]?))?)$",
        description="device that computes scores, sparse models and perplexity: `cpu`, `cuda` "
        "or, for example, `cuda:1`. This has not run on a GPU yet; to test yours, run `make gpu`",
    )
    dtype: Dtype = Field(
        default="float32",
        description="precision of scores and perplexity on `PERMILLE_DEVICE`: `float32`, `bfloat16` or "
        "`float16`. Sums are always float32. All workers that share jobs need the same value",
    )


class ReachSettings(SettingsGroup):
    """Metrics, webhooks and keeper of a worker"""

    metrics_port: int | None = Field(
        default=None,
        ge=1,
        le=65_535,
        description="port of the worker's metrics, which need no token. Without it, there are no metrics",
    )
    metrics_host: str = Field(default="127.0.0.1", description="address of the worker's metrics")
    webhook_private: bool = Field(
        default=False, description="whether webhooks may call loopback and private networks"
    )
    keeper_token: HeaderToken | None = Field(
        default=None, description="token for the [keeper](../explanation/privacy.md) of masked rounds"
    )


class WorkerSettings(ReachSettings, ComputeSettings, QueueSettings, StoreSettings):
    """Settings of a worker: those of the store, and those of this module."""

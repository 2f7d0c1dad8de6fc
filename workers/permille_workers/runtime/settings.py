"""The settings of a worker process."""

from pydantic import Field, SecretStr

from permille.schemas.masks import Dtype
from permille.store.settings import StoreSettings


class WorkerSettings(StoreSettings):
    """What a worker needs beyond the store.

    Attributes:
        lease_s: a job whose worker is silent for so long is given to another.
        poll_s: how often a local worker looks for queued jobs, and any worker for a cancel.
        sweep_s: how often to look for expired leases, builds to move on and messages to send again.
        collect_every_s: how often one of the workers applies retention rules and deletes what no row names;
            0: only who asks for it does.
        resend_after_s: a queued job is sent to the broker again after this time.
        cancel_grace_s: a job that was asked to stop is killed after this time.
        drain_s: after SIGTERM, running jobs may take so long; then they are given back to the queue.
        concurrency: jobs at a time.
        threads: compute threads of each job; None: the library's default.
        device: where scores, perplexity, NF4 (by bitsandbytes) and pooled states are computed: `cpu`, `cuda`,
            `cuda:1`.
        dtype: in which precision scores and perplexity are computed there; sums are float32 always.
        metrics_port: serves `/metrics` there, without a token; None: not at all.
        metrics_host: address for it.
        keeper_token: what a keeper of masked rounds asks for; None: there is none.
    """

    lease_s: float = Field(default=30.0, gt=0)
    poll_s: float = Field(default=0.5, gt=0)
    sweep_s: float = Field(default=2.0, gt=0)
    collect_every_s: float = Field(default=3600.0, ge=0)
    resend_after_s: float = Field(default=60.0, gt=0)
    cancel_grace_s: float = Field(default=10.0, ge=0)
    drain_s: float = Field(default=20.0, ge=0)
    concurrency: int = Field(default=1, ge=1, le=64)
    threads: int | None = Field(default=None, ge=1)
    device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:[0-9]{1,2})?)$")
    dtype: Dtype = "float32"
    metrics_port: int | None = Field(default=None, ge=1, le=65_535)
    metrics_host: str = "127.0.0.1"
    keeper_token: SecretStr | None = None

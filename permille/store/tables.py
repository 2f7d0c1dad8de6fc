"""The tables. One class a table, no behaviour; queries live in the store's domain modules.

Rules: every row has `tenant_id`. Instants are UTC, kept as integer microseconds. Secrets are kept as sha256
hex of the secret, never as themselves. Blobs are named by digest ("sha256:" + 64 hex) and live in the blob
store. Rows that others may still refer to are marked (`revoked_at`, `yanked_at`, `deleted_at`), not removed.
"""

from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Dialect,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Text,
    UniqueConstraint,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


class Instant(TypeDecorator[datetime]):
    """An aware UTC `datetime`, kept as integer microseconds: the same order in every database."""

    impl = BigInteger
    cache_ok = True

    def process_bind_param(self, value: datetime | None, _dialect: Dialect) -> int | None:
        """Aware datetime to microseconds. Raises ValueError for a naive one."""
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"expected an aware datetime, got {value!r}")
        return (value - _EPOCH) // _MICROSECOND

    def process_result_value(self, value: int | None, _dialect: Dialect) -> datetime | None:
        """Microseconds to aware datetime."""
        return None if value is None else _EPOCH + value * _MICROSECOND


class Role(StrEnum):
    """What an operator token may do: everything, everything but tokens, or look."""

    ADMIN = "admin"
    OPERATOR = "operator"
    VIEWER = "viewer"


class JobKind(StrEnum):
    """What a job makes."""

    MASK = "mask"
    QUANTIZATION = "quantization"
    PACKAGE = "package"
    BUILD = "build"
    REPLAY = "replay"


class JobState(StrEnum):
    """Where a job stands. `failed`: its input or a child is wrong; `dead`: it was tried too often."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    DEAD = "dead"


ENDED = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.DEAD})


class EventKind(StrEnum):
    """What a job event tells."""

    STATE = "state"
    PROGRESS = "progress"
    MESSAGE = "message"


class LogState(StrEnum):
    """Where an uploaded log stands."""

    PENDING = "pending"
    VERIFIED = "verified"
    REFUSED = "refused"
    UNDECIDED = "undecided"


class Base(DeclarativeBase):
    """Base of all tables; constraint names are fixed so that migrations can name them."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {  # noqa: RUF012 - SQLAlchemy reads it as a class attribute
        datetime: Instant,
        dict[str, Any]: JSON,
        list[Any]: JSON,
        str: String(255),
    }


class Tenant(Base):
    """A customer: the wall that no query crosses."""

    __tablename__ = "tenants"
    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    created_at: Mapped[datetime]


class _Owned:
    """Mixin: the columns that (nearly) every table has."""

    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), index=True)
    created_at: Mapped[datetime]


class OperatorToken(_Owned, Base):
    """A principal that calls the operator's routes: a bearer token, kept as its hash."""

    __tablename__ = "operator_tokens"
    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    role: Mapped[str]
    token_hash: Mapped[str] = mapped_column(unique=True)
    expires_at: Mapped[datetime | None]
    last_used_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]


class SigningKey(_Owned, Base):
    """The public half of a release key: devices pin these at enrolment. The private half is never in the
    database.
    """

    __tablename__ = "signing_keys"
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    key_id: Mapped[str] = mapped_column(primary_key=True)
    public_key: Mapped[str]  # base64url of 32 raw bytes
    retired_at: Mapped[datetime | None]
    __table_args__ = (UniqueConstraint("tenant_id", "public_key"),)


class Model(_Owned, Base):
    """A registered base model: a hub id pinned to a commit, or a folder under the model root."""

    __tablename__ = "models"
    id: Mapped[str] = mapped_column(primary_key=True)
    kind: Mapped[str]  # folder | hub
    location: Mapped[str] = mapped_column(String(1024))
    commit: Mapped[str | None]
    name: Mapped[str]
    # What follows is None for a hub model that no worker has read yet.
    family: Mapped[str | None]
    config: Mapped[dict[str, Any] | None]
    size_bytes: Mapped[int | None] = mapped_column(BigInteger)
    parameter_count: Mapped[int | None] = mapped_column(BigInteger)
    scoped_parameter_count: Mapped[int | None] = mapped_column(BigInteger)
    digest: Mapped[str | None]  # of the list of its files' names and digests


class Corpus(_Owned, Base):
    """A registered corpus: a file under the corpus root, or a data set of the allow-list."""

    __tablename__ = "corpora"
    id: Mapped[str] = mapped_column(primary_key=True)
    kind: Mapped[str]  # file | streamed
    location: Mapped[str] = mapped_column(String(1024))  # path below the corpus root, or the data set's name
    name: Mapped[str]
    split: Mapped[str | None]
    field: Mapped[str | None]
    size_bytes: Mapped[int | None] = mapped_column(BigInteger)
    digest: Mapped[str | None]


class Job(_Owned, Base):
    """A piece of long work. `jobs.py` holds the only functions that change these rows."""

    __tablename__ = "jobs"
    id: Mapped[str] = mapped_column(primary_key=True)
    kind: Mapped[str]
    state: Mapped[str]
    payload: Mapped[dict[str, Any]]
    idempotency_key: Mapped[str | None]
    parent_id: Mapped[str | None] = mapped_column(ForeignKey("jobs.id"), index=True)
    progress: Mapped[float] = mapped_column(default=0.0)  # 0..1
    message: Mapped[str | None] = mapped_column(Text)
    eta_at: Mapped[datetime | None]  # when it should end, by its own estimate
    attempt: Mapped[int] = mapped_column(default=0)
    max_attempts: Mapped[int]
    fence: Mapped[int] = mapped_column(BigInteger, default=0)
    event_seq: Mapped[int] = mapped_column(BigInteger, default=0)  # seq of the newest event
    worker: Mapped[str | None]
    lease_expires_at: Mapped[datetime | None]
    available_at: Mapped[datetime]  # not to be claimed before: backoff
    dispatched_at: Mapped[datetime | None]  # last sent to the broker, if there is one
    cancel_requested_at: Mapped[datetime | None]
    error: Mapped[dict[str, Any] | None]  # type, message, retryable, and for a bug the traceback
    result_kind: Mapped[str | None]  # mask | quantization | package | run
    result_id: Mapped[str | None]
    started_at: Mapped[datetime | None]  # of the newest attempt
    updated_at: Mapped[datetime]
    ended_at: Mapped[datetime | None]
    __table_args__ = (
        UniqueConstraint("tenant_id", "idempotency_key"),
        Index("ix_jobs_state_available_at", "state", "available_at"),
    )


class JobEvent(Base):
    """One line of a job's story. `seq` counts 1, 2, 3 ... within the job: its stream's `Last-Event-ID`."""

    __tablename__ = "job_events"
    id: Mapped[int] = mapped_column(BigInteger().with_variant(Integer, "sqlite"), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"))
    seq: Mapped[int] = mapped_column(BigInteger)
    kind: Mapped[str]
    data: Mapped[dict[str, Any]]
    at: Mapped[datetime]
    __table_args__ = (UniqueConstraint("job_id", "seq"), {"sqlite_autoincrement": True})


class Mask(_Owned, Base):
    """The result of a mask job."""

    __tablename__ = "masks"
    id: Mapped[str] = mapped_column(primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), unique=True)
    model_id: Mapped[str] = mapped_column(ForeignKey("models.id"))
    corpus_id: Mapped[str | None] = mapped_column(ForeignKey("corpora.id"))
    options: Mapped[dict[str, Any]]  # method, density, sequences, length, seed, scope, allocation
    k: Mapped[int] = mapped_column(BigInteger)
    layer: Mapped[dict[str, Any]]  # role, media_type, digest, size_bytes
    provenance: Mapped[dict[str, Any]]
    mask_digest: Mapped[str]
    scores_digest: Mapped[str | None]
    report_digest: Mapped[str]
    picture_digest: Mapped[str]
    size_bytes: Mapped[int] = mapped_column(BigInteger)


class QuantizationRow(_Owned, Base):
    """The result of a quantization job: a dense layer and a layer of the tensors that stay as they are."""

    __tablename__ = "quantizations"
    id: Mapped[str] = mapped_column(primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), unique=True)
    model_id: Mapped[str] = mapped_column(ForeignKey("models.id"))
    evaluation_corpus_id: Mapped[str | None] = mapped_column(ForeignKey("corpora.id"))
    options: Mapped[dict[str, Any]]  # scheme, group_size, evaluation_tokens
    dense_layer: Mapped[dict[str, Any]]
    plain_layer: Mapped[dict[str, Any]]
    provenance: Mapped[dict[str, Any]]
    dense_digest: Mapped[str]
    plain_digest: Mapped[str]
    report_digest: Mapped[str]
    picture_digest: Mapped[str]
    size_bytes: Mapped[int] = mapped_column(BigInteger)


class PackageRow(_Owned, Base):
    """A package that its reader has accepted."""

    __tablename__ = "packages"
    id: Mapped[str] = mapped_column(primary_key=True)
    job_id: Mapped[str | None] = mapped_column(ForeignKey("jobs.id"))
    model_id: Mapped[str | None] = mapped_column(ForeignKey("models.id"))
    mask_id: Mapped[str | None] = mapped_column(ForeignKey("masks.id"))
    quantization_id: Mapped[str | None] = mapped_column(ForeignKey("quantizations.id"))
    digest: Mapped[str]
    manifest: Mapped[bytes] = mapped_column(LargeBinary)  # canonical bytes
    k: Mapped[int] = mapped_column(BigInteger)
    size_bytes: Mapped[int] = mapped_column(BigInteger)  # of all layers
    __table_args__ = (UniqueConstraint("tenant_id", "digest"),)


class PackageBlob(Base):
    """Which blobs a package gives access to."""

    __tablename__ = "package_blobs"
    package_id: Mapped[str] = mapped_column(ForeignKey("packages.id"), primary_key=True)
    digest: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), index=True)
    role: Mapped[str]
    media_type: Mapped[str]
    size_bytes: Mapped[int] = mapped_column(BigInteger)


class Release(_Owned, Base):
    """A signed, named version of a package. Versions of a name only grow."""

    __tablename__ = "releases"
    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    version: Mapped[int] = mapped_column(BigInteger)
    package_id: Mapped[str] = mapped_column(ForeignKey("packages.id"), index=True)
    package_digest: Mapped[str]
    expires_at: Mapped[datetime]  # whole seconds: they are signed
    key_id: Mapped[str]
    signature: Mapped[str]  # base64url
    yanked_at: Mapped[datetime | None]
    yanked_reason: Mapped[str | None] = mapped_column(Text)
    __table_args__ = (UniqueConstraint("tenant_id", "name", "version"),)


class Alias(Base):
    """A moving name of a version: `stable`, `canary`."""

    __tablename__ = "aliases"
    tenant_id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    alias: Mapped[str] = mapped_column(primary_key=True)
    version: Mapped[int] = mapped_column(BigInteger)
    updated_at: Mapped[datetime]
    __table_args__ = (
        ForeignKeyConstraint(
            ["tenant_id", "name", "version"], ["releases.tenant_id", "releases.name", "releases.version"]
        ),
    )


class Invitation(_Owned, Base):
    """A one-time code that enrols one device."""

    __tablename__ = "invitations"
    id: Mapped[str] = mapped_column(primary_key=True)
    code_hash: Mapped[str] = mapped_column(unique=True)
    release: Mapped[str]
    alias: Mapped[str]
    note: Mapped[str | None] = mapped_column(Text)
    expires_at: Mapped[datetime]
    used_at: Mapped[datetime | None]
    device_id: Mapped[str | None] = mapped_column(ForeignKey("devices.id"))  # who used it
    revoked_at: Mapped[datetime | None]


class Device(_Owned, Base):
    """An enrolled device and the release that it follows."""

    __tablename__ = "devices"
    id: Mapped[str] = mapped_column(primary_key=True)
    public_key: Mapped[str]  # base64url of 32 raw bytes
    name: Mapped[str]
    agent_version: Mapped[str | None]
    release: Mapped[str]
    alias: Mapped[str]
    last_seen_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]  # by an operator
    unenrolled_at: Mapped[datetime | None]  # by the device itself
    __table_args__ = (UniqueConstraint("tenant_id", "public_key"),)


class DeviceNonce(_Owned, Base):
    """A nonce that a device must sign once to get an access token."""

    __tablename__ = "device_nonces"
    nonce_hash: Mapped[str] = mapped_column(primary_key=True)
    device_id: Mapped[str] = mapped_column(ForeignKey("devices.id"), index=True)
    expires_at: Mapped[datetime]
    used_at: Mapped[datetime | None]


class DeviceToken(_Owned, Base):
    """A device's short-lived access token, kept as its hash."""

    __tablename__ = "device_tokens"
    token_hash: Mapped[str] = mapped_column(primary_key=True)
    device_id: Mapped[str] = mapped_column(ForeignKey("devices.id"), index=True)
    expires_at: Mapped[datetime]


class Run(_Owned, Base):
    """One training run that a device reported, and the log that it may have shared."""

    __tablename__ = "runs"
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    run_id: Mapped[str] = mapped_column(primary_key=True)  # made by the device
    device_id: Mapped[str] = mapped_column(ForeignKey("devices.id"), index=True)
    metrics: Mapped[dict[str, Any]]
    log_state: Mapped[str | None]
    log_digest: Mapped[str | None]
    log_sent_at: Mapped[datetime | None]
    log_size_bytes: Mapped[int | None] = mapped_column(BigInteger)
    log_job_id: Mapped[str | None] = mapped_column(ForeignKey("jobs.id"))
    log_reason: Mapped[str | None] = mapped_column(Text)
    log_deleted_at: Mapped[datetime | None]
    state_digest: Mapped[str | None]  # of the server's replay
    deleted_at: Mapped[datetime | None]


class IdempotentAnswer(Base):
    """The answer to a request that carried an idempotency key and made something other than a job."""

    __tablename__ = "idempotent_answers"
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    key: Mapped[str] = mapped_column(primary_key=True)
    request_digest: Mapped[str]
    status: Mapped[int]
    sealed: Mapped[bytes] = mapped_column(
        LargeBinary
    )  # encrypted by the API: an answer may hold a new secret
    created_at: Mapped[datetime] = mapped_column(index=True)

"""The tables of the database, one class each. Queries live in the modules of the store.

Rules:

- Every row that belongs to a tenant (a customer) has a `tenant_id`.
- Times are UTC, stored as integer microseconds.
- A secret is stored as the hexadecimal SHA-256 of the secret. The exception is a webhook's secret,
  which is stored in plain text, since it signs each delivery.
- A blob is named by its digest (`sha256:` and 64 hex digits). Its bytes are in the blob store.
- A row to which other rows refer is not deleted. It may be marked with a time instead (`revoked_at`,
  `yanked_at`, `deleted_at`).
"""

from datetime import UTC, datetime, timedelta
from typing import ClassVar, Final, cast

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
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship
from sqlalchemy.types import TypeDecorator

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)


def microseconds_of(moment: datetime) -> int:
    """Return the microseconds since 1970 of an aware time."""
    return (moment - EPOCH) // MICROSECOND


class Instant(TypeDecorator[datetime]):
    """An aware UTC `datetime`, stored as integer microseconds so that every database sorts it in the same
    way.
    """

    impl = BigInteger
    cache_ok = True

    def process_bind_param(self, value: datetime | None, _dialect: Dialect) -> int | None:
        """Convert an aware time to microseconds. Raises ValueError for a naive time."""
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"The time {value!r} has no time zone: make it aware.")
        return microseconds_of(value)

    def process_result_value(self, value: int | None, _dialect: Dialect) -> datetime | None:
        """Convert microseconds to an aware time. Return a damaged value as it is: it must stop no query."""
        try:
            return None if value is None else EPOCH + value * MICROSECOND
        except (OverflowError, TypeError):  # a time that a person wrote into a database of SQLite
            return cast(datetime, value)


class Base(DeclarativeBase):
    """Base class of all tables. It fixes the names of constraints, so that migrations can refer to
    them.
    """

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
        dict[str, object]: JSON,
        str: String(255),
    }


class Tenant(Base):
    """A customer. The rows of a tenant are hidden from all other tenants."""

    __tablename__ = "tenants"
    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    created_at: Mapped[datetime]
    # When one of its jobs last started or ended. The tenant that waited longest comes first (`claims.claim`).
    served_at: Mapped[datetime | None]


class _OfTenant:
    """Mixin for the tenant to which a row belongs. Queries for requests filter by it."""

    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), index=True)


class _Owned(_OfTenant):
    """Mixin for the columns that nearly every table has."""

    created_at: Mapped[datetime]


class Named(_Owned, Base):
    """Base of the tables whose ids the service makes.

    Attributes:
        noun: the word for one row in error messages.
    """

    __abstract__ = True
    noun: ClassVar[str]
    id: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))  # indexed at the end of this module


class OperatorToken(Named):
    """A bearer token that calls the operator's routes."""

    __tablename__ = "operator_tokens"
    noun = "token"
    name: Mapped[str]
    role: Mapped[str]
    token_hash: Mapped[str] = mapped_column(unique=True)
    expires_at: Mapped[datetime | None]
    last_used_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]


class EndedSession(_Owned, Base):
    """A session of the web pages that its operator ended before it expired. All other data of a session is in
    its cookie, so a session that was not ended has no row.
    """

    __tablename__ = "ended_sessions"
    id: Mapped[str] = mapped_column(primary_key=True)
    expires_at: Mapped[datetime]


class TrustMetadata(Base):
    """One file of a tenant's TUF repository, under the name by which clients fetch it.

    The database holds no private key.
    """

    __tablename__ = "trust_metadata"
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    file: Mapped[str] = mapped_column(primary_key=True)
    role: Mapped[str]
    version: Mapped[int] = mapped_column(BigInteger)
    data: Mapped[bytes] = mapped_column(LargeBinary)
    created_at: Mapped[datetime]
    # Two concurrent changes cannot both store version n of a role.
    __table_args__ = (UniqueConstraint("tenant_id", "role", "version"),)


class Probe(Base):
    """A single row that is written to test the database. A read is no test, since it succeeds even if the
    disk is full.
    """

    __tablename__ = "probes"
    id: Mapped[int] = mapped_column(primary_key=True)
    filler: Mapped[bytes] = mapped_column(LargeBinary)
    written_at: Mapped[datetime]


class Worker(Base):
    """A worker that was seen within the last day. See `permille.store.jobs.dispatch`."""

    __tablename__ = "workers"
    name: Mapped[str] = mapped_column(primary_key=True)
    exports: Mapped[bool]  # whether it can export programs: executorch is installed
    # Memory that a job could use when the worker last had none.
    memory_bytes: Mapped[int | None] = mapped_column(BigInteger)
    seen_at: Mapped[datetime]


class Model(Named):
    """A registered base model: a hub repository at a commit, a folder, a GGUF file, or a sparsified
    model.
    """

    __tablename__ = "models"
    noun = "model"
    name: Mapped[str]
    source: Mapped[dict[str, object]]  # the source in the form of the request
    # The following columns are None for a hub model that no worker has read yet.
    family: Mapped[str | None]
    config: Mapped[dict[str, object] | None]
    size_bytes: Mapped[int | None] = mapped_column(BigInteger)
    parameter_count: Mapped[int | None] = mapped_column(BigInteger)
    scoped_parameter_count: Mapped[int | None] = mapped_column(BigInteger)
    digest: Mapped[str | None]  # digest of a list of its files' names and digests
    __table_args__ = (Index(None, "tenant_id", "name"),)


class Corpus(Named):
    """A registered corpus: a file below the corpus root, or a public dataset of the allow-list."""

    __tablename__ = "corpora"
    noun = "corpus"
    name: Mapped[str]
    source: Mapped[dict[str, object]]  # the source in the form of the request
    size_bytes: Mapped[int | None] = mapped_column(BigInteger)
    __table_args__ = (Index(None, "tenant_id", "name"),)


def _partial_index(name: str, where: str, *columns: str) -> Index:
    """Return an index of the rows for which the condition holds."""
    return Index(name, *columns, sqlite_where=text(where), postgresql_where=text(where))


def _index_of_some(table: str, column: str) -> Index:
    """Return an index of a column that has a value in few rows."""
    # Leave out the rows with NULL. With them, SQLite would expect many rows for each value, and avoid the
    # index.
    return _partial_index(f"ix_{table}_{column}", f"{column} IS NOT NULL", column)


# The condition of the index `ix_jobs_unsuccessful`. Only a statement with exactly these words uses the index.
UNSUCCESSFUL: Final = "state IN ('cancelled', 'dead', 'failed')"


class Job(Named):
    """A long-running task. Only `permille.store.jobs` changes these rows."""

    __tablename__ = "jobs"
    noun = "job"
    kind: Mapped[str]
    state: Mapped[str]
    payload: Mapped[dict[str, object]]
    request_digest: Mapped[str]  # equal for equal requests; see `transitions.request_digest`
    idempotency_key: Mapped[str | None]
    parent_id: Mapped[str | None] = mapped_column(ForeignKey("jobs.id"))
    # The device whose upload the job checks.
    device_id: Mapped[str | None] = mapped_column(ForeignKey("devices.id"))
    progress: Mapped[float] = mapped_column(default=0.0)  # 0..1
    message: Mapped[str | None] = mapped_column(Text)
    eta_at: Mapped[datetime | None]  # the worker's estimate of the end
    attempt: Mapped[int] = mapped_column(default=0)
    max_attempts: Mapped[int]
    # Grows with each claim, so that older claims become invalid. See `permille.store.jobs.claims`.
    fence: Mapped[int] = mapped_column(BigInteger, default=0)
    event_seq: Mapped[int] = mapped_column(BigInteger, default=0)  # seq of the newest event
    worker: Mapped[str | None]
    lease_expires_at: Mapped[datetime | None]
    available_at: Mapped[datetime]  # no worker may claim it before this time (backoff)
    dispatched_at: Mapped[datetime | None]  # when its last message to the broker was sent, if any
    cancel_requested_at: Mapped[datetime | None]
    error: Mapped[dict[str, object] | None]  # type, message, retryable, and for a bug the traceback
    result_id: Mapped[str | None]
    traceparent: Mapped[str | None]  # from the request that made the job, or from the parent job
    started_at: Mapped[datetime | None]  # start of the newest attempt
    updated_at: Mapped[datetime]
    ended_at: Mapped[datetime | None]
    __table_args__ = (
        UniqueConstraint("tenant_id", "idempotency_key"),
        Index("ix_jobs_state", "tenant_id", "state", "id"),
        Index("ix_jobs_kind", "tenant_id", "kind", "id"),
        _index_of_some("jobs", "parent_id"),
        _partial_index("ix_jobs_device", "device_id IS NOT NULL", "device_id", "state"),
        Index("ix_jobs_request_digest", "tenant_id", "request_digest"),
        _partial_index("ix_jobs_ended", "parent_id IS NULL", "tenant_id", "ended_at"),
        _partial_index("ix_jobs_unsuccessful", UNSUCCESSFUL, "kind", "state"),
        # Indexes of the queue. None may begin with `available_at`. PostgreSQL would search such an index for
        # the first job of a tenant, and read the jobs of all other tenants on the way.
        _partial_index("ix_jobs_queued", "state = 'queued'", "tenant_id", "available_at"),
        _partial_index(
            "ix_jobs_queued_devices", "state = 'queued'", "tenant_id", "device_id", "available_at", "id"
        ),
        _partial_index("ix_jobs_undispatched", "state = 'queued'", "dispatched_at"),
        _partial_index("ix_jobs_running", "state = 'running'", "worker", "tenant_id", "device_id"),
    )


class JobEvent(Base):
    """An event of a job. `seq` counts 1, 2, 3, ... within the job and is the stream's `Last-Event-ID`."""

    __tablename__ = "job_events"
    id: Mapped[int] = mapped_column(BigInteger().with_variant(Integer, "sqlite"), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"))
    seq: Mapped[int] = mapped_column(BigInteger)
    kind: Mapped[str]
    data: Mapped[dict[str, object]]
    at: Mapped[datetime]
    __table_args__ = (UniqueConstraint("job_id", "seq"), {"sqlite_autoincrement": True})


class Artifact(Named):
    """The result of a job: a sparse model, a mask, a quantization, or a package."""

    __tablename__ = "artifacts"
    noun = "artifact"
    kind: Mapped[str]  # sparsification, mask, quantization or package
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), index=True)
    model_id: Mapped[str] = mapped_column(ForeignKey("models.id"))
    request: Mapped[dict[str, object]]  # the payload of its job
    digest: Mapped[str]
    k: Mapped[int | None] = mapped_column(BigInteger)  # number of trained numbers of a mask or a package
    made_model_id: Mapped[str | None] = mapped_column(ForeignKey("models.id"))  # made by a sparsification
    size_bytes: Mapped[int] = mapped_column(BigInteger)  # bytes of its distinct blobs, without the report
    provenance: Mapped[dict[str, object]]
    blobs: Mapped[list["ArtifactBlob"]] = relationship(lazy="selectin", order_by="ArtifactBlob.position")
    __table_args__ = (
        Index("ix_artifacts_kind", "tenant_id", "kind", "id"),
        Index("ix_artifacts_model", "model_id", "kind", "id"),
        _index_of_some("artifacts", "made_model_id"),
        Index(
            "uq_artifacts_package",
            "tenant_id",
            "digest",
            unique=True,
            sqlite_where=text("kind = 'package'"),
            postgresql_where=text("kind = 'package'"),
        ),
    )


class ArtifactBlob(_OfTenant, Base):
    """A blob of an artifact. A device that may read a package may read its blobs."""

    __tablename__ = "artifact_blobs"
    artifact_id: Mapped[str] = mapped_column(ForeignKey("artifacts.id"), primary_key=True)
    position: Mapped[int] = mapped_column(primary_key=True)
    role: Mapped[str]
    media_type: Mapped[str]
    digest: Mapped[str]
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    path: Mapped[str | None] = mapped_column(String(1024))
    __table_args__ = (Index("ix_artifact_blobs_digest", "digest", "size_bytes"),)


class ArtifactSource(_OfTenant, Base):
    """An input of an artifact: the id of a model, a corpus or another artifact."""

    __tablename__ = "artifact_sources"
    artifact_id: Mapped[str] = mapped_column(ForeignKey("artifacts.id"), primary_key=True)
    source_id: Mapped[str] = mapped_column(primary_key=True, index=True)


class BlobCollection(Base):
    """A single row with the time and the result of the last collection of unreferenced blobs."""

    __tablename__ = "blob_collections"
    id: Mapped[int] = mapped_column(primary_key=True)
    began_at: Mapped[datetime]
    ended_at: Mapped[datetime | None]
    # Bytes of unreferenced blobs that were too young to be deleted.
    unreferenced_bytes: Mapped[int] = mapped_column(BigInteger, default=0)


class RetentionRule(Base):
    """A tenant's rule for deleting old objects. Objects whose limit is None are never deleted."""

    __tablename__ = "retention_rules"
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    token_id: Mapped[str]  # token of the operator who set the rule; the audit log names it for deletions
    rule: Mapped[dict[str, object]]
    updated_at: Mapped[datetime]


class Release(Named):
    """A package under a name and a version. Each new version of a name is higher than all before."""

    __tablename__ = "releases"
    noun = "release"
    name: Mapped[str]
    version: Mapped[int] = mapped_column(BigInteger)
    package_id: Mapped[str] = mapped_column(ForeignKey("artifacts.id"), index=True)
    package_digest: Mapped[str]
    yanked_at: Mapped[datetime | None]
    yanked_reason: Mapped[str | None] = mapped_column(Text)
    __table_args__ = (UniqueConstraint("tenant_id", "name", "version"),)


class Alias(Base):
    """A movable name of a version, such as `stable` or `canary`."""

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


class Invitation(Named):
    """A one-time code that enrols one device."""

    __tablename__ = "invitations"
    noun = "invitation"
    code_hash: Mapped[str] = mapped_column(unique=True)
    release: Mapped[str]
    alias: Mapped[str]
    expires_at: Mapped[datetime]
    used_at: Mapped[datetime | None]
    device_id: Mapped[str | None] = mapped_column(ForeignKey("devices.id"))  # the device that used it
    revoked_at: Mapped[datetime | None]


class Device(Named):
    """An enrolled device and the release that it follows."""

    __tablename__ = "devices"
    noun = "device"
    public_key: Mapped[str]  # base64url of 32 raw bytes
    name: Mapped[str]
    agent_version: Mapped[str | None]
    release: Mapped[str]
    alias: Mapped[str]
    version: Mapped[int | None] = mapped_column(BigInteger)  # version that it was last told to install
    engine: Mapped[str | None]  # engine of its newest run
    memory_bytes: Mapped[int | None] = mapped_column(BigInteger)
    tags: Mapped[list[str]] = mapped_column(JSON, default=list)  # set by operators
    own_tags: Mapped[list[str]] = mapped_column(JSON, default=list)  # set by the device's owner
    last_seen_at: Mapped[datetime | None]
    served_at: Mapped[datetime | None]  # when one of its jobs last started or ended
    revoked_at: Mapped[datetime | None]  # when an operator revoked it
    unenrolled_at: Mapped[datetime | None]  # when the device itself unenrolled
    __table_args__ = (
        UniqueConstraint("tenant_id", "public_key"),
        _partial_index(
            "ix_devices_active",
            "revoked_at IS NULL AND unenrolled_at IS NULL",
            # The index also has the columns of its condition. Without them, SQLite would read the table, too.
            *("tenant_id", "release", "version", "alias", "revoked_at", "unenrolled_at"),
        ),
    )


class DeviceNonce(_Owned, Base):
    """A nonce that a device has signed to get an access token. It is stored so that it works only
    once.
    """

    __tablename__ = "device_nonces"
    nonce_hash: Mapped[str] = mapped_column(primary_key=True)
    device_id: Mapped[str] = mapped_column(ForeignKey("devices.id"), index=True)
    expires_at: Mapped[datetime] = mapped_column(index=True)
    used_at: Mapped[datetime | None]


class DeviceToken(_Owned, Base):
    """A short-lived access token of a device."""

    __tablename__ = "device_tokens"
    token_hash: Mapped[str] = mapped_column(primary_key=True)
    device_id: Mapped[str] = mapped_column(ForeignKey("devices.id"), index=True)
    expires_at: Mapped[datetime] = mapped_column(index=True)


class Upload(Named):
    """The bytes of a log or a packed state that a device has sent. See `permille.store.uploads`."""

    __tablename__ = "uploads"
    noun = "upload"
    device_id: Mapped[str] = mapped_column(ForeignKey("devices.id"))
    run_id: Mapped[str]
    state: Mapped[str]
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    __table_args__ = (
        Index("ix_uploads_device_id_created_at", "device_id", "created_at"),
        Index("ix_uploads_state", "state", "created_at"),
    )


class Run(_Owned, Base):
    """A training run that a device reported, with its shared log if there is one."""

    __tablename__ = "runs"
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    run_id: Mapped[str] = mapped_column(primary_key=True)  # chosen by the device
    device_id: Mapped[str] = mapped_column(ForeignKey("devices.id"))
    metrics: Mapped[dict[str, object]]
    # Columns for the statistics of the fleet. Those from `release` to `peak_rss_bytes` are derived from the
    # metrics. They are None if the run was deleted.
    ended_at: Mapped[datetime]  # by the device's clock, but never after the report arrived
    newest: Mapped[bool]  # whether it is the device's newest run on this version, by `ended_at`
    release: Mapped[str | None]
    version: Mapped[int | None] = mapped_column(BigInteger)
    outcome: Mapped[str | None]
    gain: Mapped[float | None]  # by how much the personal state lowers the loss, in nats per token
    loss: Mapped[float | None]  # loss of the model that the device uses after the run
    rise: Mapped[float | None]  # by how much the personal state raises the loss on general text
    peak_rss_bytes: Mapped[int | None] = mapped_column(BigInteger)
    log_state: Mapped[str | None]
    log_form: Mapped[str | None]  # `log` or `state`
    log_digest: Mapped[str | None]
    log_upload_id: Mapped[str | None] = mapped_column(ForeignKey("uploads.id"))  # upload of the log's bytes
    log_sent_at: Mapped[datetime | None]
    log_size_bytes: Mapped[int | None] = mapped_column(BigInteger)
    log_job_id: Mapped[str | None] = mapped_column(ForeignKey("jobs.id"))
    log_reason: Mapped[str | None] = mapped_column(Text)
    log_deleted_at: Mapped[datetime | None]
    state_digest: Mapped[str | None]  # digest of the state that the service computed from the log
    deleted_at: Mapped[datetime | None]
    __table_args__ = (
        Index("ix_runs_device", "device_id", "ended_at"),
        Index("ix_runs_created_at", "tenant_id", "created_at"),
        _index_of_some("runs", "log_upload_id"),
        _index_of_some("runs", "log_job_id"),
        _partial_index("ix_runs_log_sent_at", "log_upload_id IS NOT NULL", "tenant_id", "log_sent_at"),
        # The statistics of the fleet are computed from these two indexes only, since the rows themselves are
        # twenty times as large.
        Index("ix_runs_ended_at", "tenant_id", "ended_at", "outcome"),
        Index(
            "ix_runs_newest",
            *("tenant_id", "release", "version", "gain", "outcome", "loss", "rise", "peak_rss_bytes"),
            "device_id",
            sqlite_where=text("newest = 1"),
            postgresql_where=text("newest"),
        ),
    )


class Federation(Named):
    """A federation and its current head: the number of rounds, and the digests of history and state.
    Its extension changes these rows.
    """

    __tablename__ = "federations"
    noun = "federation"
    name: Mapped[str]
    release: Mapped[str]
    version: Mapped[int] = mapped_column(BigInteger)
    package_digest: Mapped[str]
    definition: Mapped[bytes] = mapped_column(LargeBinary)
    definition_digest: Mapped[str]
    state: Mapped[str]
    target: Mapped[int]  # number of contributions at which a round closes before its deadline
    minimum: Mapped[int]  # a round with fewer contributions is void
    deadline_s: Mapped[int]
    rounds: Mapped[int]  # the number of rounds after which the federation is finished
    number: Mapped[int]  # the number of rounds that have ended
    chain: Mapped[str]  # digest of the history (FORMAT 13.4)
    state_digest: Mapped[str]
    reach: Mapped[int] = mapped_column(BigInteger)  # bound on the elements of the state (FORMAT 7.3)
    adopted_round: Mapped[int | None]
    # In how many rounds one device may take part; None without differential privacy.
    participations: Mapped[int | None]
    __table_args__ = (
        UniqueConstraint("tenant_id", "name"),
        UniqueConstraint("tenant_id", "definition_digest"),
    )


class FederationMember(_OfTenant, Base):
    """A device that joined a federation. It may have left again."""

    __tablename__ = "federation_members"
    federation_id: Mapped[str] = mapped_column(ForeignKey("federations.id"), primary_key=True)
    device_id: Mapped[str] = mapped_column(ForeignKey("devices.id"), primary_key=True, index=True)
    joined_at: Mapped[datetime]
    left_at: Mapped[datetime | None]


class Round(_OfTenant, Base):
    """A round of a federation. Once the round has ended, its row holds its record and the federation's new
    head.
    """

    __tablename__ = "rounds"
    federation_id: Mapped[str] = mapped_column(ForeignKey("federations.id"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    state: Mapped[str] = mapped_column(index=True)
    start_digest: Mapped[str]  # digest of the state from which devices begin
    opened_at: Mapped[datetime]
    deadline_at: Mapped[datetime]
    closed_at: Mapped[datetime | None]
    job_id: Mapped[str | None] = mapped_column(ForeignKey("jobs.id"))
    refused: Mapped[dict[str, object]]  # numbers of refused contributions, by error code
    dropped: Mapped[dict[str, object]]  # error codes of contributions that the job left out, by device
    # The following columns are set when the round ends. The first three are numbers of devices: invited, with
    # an accepted contribution, and with a contribution in the sum.
    invited: Mapped[int | None]
    received: Mapped[int | None]
    counted: Mapped[int | None]
    record: Mapped[bytes | None] = mapped_column(LargeBinary)
    reason: Mapped[str | None] = mapped_column(Text)
    chain: Mapped[str | None]
    state_digest: Mapped[str | None]
    reach: Mapped[int | None] = mapped_column(BigInteger)
    gain_mean: Mapped[float | None]  # mean gain of the start state, in nats per token
    gain_error: Mapped[float | None]  # standard error of this mean
    __table_args__ = (_index_of_some("rounds", "job_id"),)


class Participation(_OfTenant, Base):
    """A device's invitation to a round and, until the round ends, its contribution."""

    __tablename__ = "participations"
    federation_id: Mapped[str] = mapped_column(primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    device_id: Mapped[str] = mapped_column(ForeignKey("devices.id"), primary_key=True, index=True)
    invited_at: Mapped[datetime]
    digest: Mapped[str | None]  # digest of the contribution; kept until the next round ends
    data: Mapped[bytes | None] = mapped_column(LargeBinary)
    __table_args__ = (
        ForeignKeyConstraint(["federation_id", "number"], ["rounds.federation_id", "rounds.number"]),
    )


class PrivacyCharge(_OfTenant, Base):
    """The charge of a device for its contribution to a round. Its extension changes these rows."""

    __tablename__ = "privacy_charges"
    federation_id: Mapped[str] = mapped_column(primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    device_id: Mapped[str] = mapped_column(ForeignKey("devices.id"), primary_key=True, index=True)
    state: Mapped[str]
    __table_args__ = (
        ForeignKeyConstraint(["federation_id", "number"], ["rounds.federation_id", "rounds.number"]),
    )


class FederationCheckpoint(_OfTenant, Base):
    """The packed state of a federation after a number of rounds."""

    __tablename__ = "checkpoints"
    federation_id: Mapped[str] = mapped_column(ForeignKey("federations.id"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    state: Mapped[bytes] = mapped_column(LargeBinary)


class DeviceGroup(Named):
    """A group of devices, defined by a rule. When a rollout starts, it fixes the members that the rule
    selects by device or tag.
    """

    __tablename__ = "device_groups"
    noun = "group"
    name: Mapped[str]
    rule: Mapped[dict[str, object]]
    __table_args__ = (UniqueConstraint("tenant_id", "name"),)


_UNENDED = text("state IN ('draft', 'running', 'paused')")


class Rollout(Named):
    """The gradual installation of a version on the devices that follow an alias.
    `permille_rollouts.store.rollouts` changes these rows.
    """

    __tablename__ = "rollouts"
    noun = "rollout"
    # Token of the operator who made the rollout. If the rollout halts itself, the audit log names this token.
    token_id: Mapped[str]
    release: Mapped[str]
    alias: Mapped[str]
    version: Mapped[int] = mapped_column(BigInteger)
    before: Mapped[int] = mapped_column(BigInteger)  # the alias's version before the rollout
    group_id: Mapped[str | None] = mapped_column(ForeignKey("device_groups.id"))  # None: all devices
    choice: Mapped[dict[str, object]]  # the choice of devices, in the form that is signed
    # The bound of each wave. A wave and all earlier waves together consist of the devices whose place
    # (`permille_rollouts.offer.place_of`) is below the wave's bound. The list is empty before the rollout
    # starts.
    bounds: Mapped[list[int]] = mapped_column(JSON, default=list)
    rules: Mapped[dict[str, object]]
    window: Mapped[dict[str, object] | None]  # when devices may begin to install; None: at any time
    on_stop: Mapped[str]
    state: Mapped[str] = mapped_column(index=True)
    wave: Mapped[int]  # index of the open wave, from 0
    wave_devices: Mapped[int]  # number of devices of the open wave
    approved: Mapped[int]  # number of waves that may open, if the rules ask for approval
    awaits_approval: Mapped[bool]  # whether only an approval is missing for the next wave
    opened_at: Mapped[datetime | None]  # the time at which the wave opened; a resume may move it
    looks: Mapped[int]  # how often the reports were tested for harm; see `permille_rollouts.state_machine`
    reason: Mapped[str | None]  # why the rollout halted itself
    numbers: Mapped[dict[str, object] | None]  # the figures that made it halt
    reverting: Mapped[bool]  # whether a revert was requested and is not signed yet
    revision: Mapped[int]  # number of changes of state or wave
    signed_revision: Mapped[int]  # the newest revision that the trust metadata contains
    ended_at: Mapped[datetime | None]
    __table_args__ = (
        ForeignKeyConstraint(
            ["tenant_id", "release", "version"], ["releases.tenant_id", "releases.name", "releases.version"]
        ),
        Index(
            "uq_rollouts_unended",
            *("tenant_id", "release", "alias"),
            unique=True,
            sqlite_where=_UNENDED,
            postgresql_where=_UNENDED,
        ),
        _partial_index("ix_rollouts_unsigned", "signed_revision < revision", "tenant_id"),
    )


class RolloutReport(_OfTenant, Base):
    """The result of a rollout's version on a device that began to install this version."""

    __tablename__ = "rollout_reports"
    rollout_id: Mapped[str] = mapped_column(ForeignKey("rollouts.id"), primary_key=True)
    device_id: Mapped[str] = mapped_column(ForeignKey("devices.id"), primary_key=True, index=True)
    wave: Mapped[int]
    began_at: Mapped[datetime]
    installed: Mapped[bool]
    code: Mapped[str | None]  # None: the device has sent no result yet
    damage: Mapped[str | None]  # the error code of a refused package
    worse: Mapped[bool | None]  # None: the device made no comparison
    # Rise of the loss, in nats per token. It is also None if the owner shares only whether it became worse.
    difference: Mapped[float | None]
    ended_at: Mapped[datetime | None]
    # True if an operator resumed the rollout after this report, so that it no longer counts.
    acknowledged: Mapped[bool] = mapped_column(default=False)
    __table_args__ = (Index("ix_rollout_reports_code", "rollout_id", "code"),)


class AuditEntry(_Owned, Base):
    """A change by an operator. See `permille.store.audit`."""

    __tablename__ = "audit_entries"
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    seq: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    token_id: Mapped[str]
    action: Mapped[str]
    subject: Mapped[str] = mapped_column(String(1024))
    request: Mapped[dict[str, object] | None]
    digest: Mapped[str]


class Webhook(Named):
    """An address that receives events of rollouts."""

    __tablename__ = "webhooks"
    noun = "webhook"
    url: Mapped[str] = mapped_column(String(1000))
    secret: Mapped[str]  # in plain text, since it signs each delivery


class WebhookDelivery(_Owned, Base):
    """An event to deliver to a webhook."""

    __tablename__ = "webhook_deliveries"
    id: Mapped[str] = mapped_column(primary_key=True)
    created_at: Mapped[datetime] = mapped_column(index=True)
    webhook_id: Mapped[str] = mapped_column(ForeignKey("webhooks.id"), index=True)
    event: Mapped[str]
    body: Mapped[dict[str, object]]
    attempts: Mapped[int]
    # Time of the next attempt. None: the event was delivered, or the delivery was given up.
    next_at: Mapped[datetime | None] = mapped_column(index=True)
    failure: Mapped[str | None]  # reason why the last attempt failed


class IdempotentAnswer(Base):
    """The record of a request with an idempotency key, kept for a day. If the request is repeated, the API
    sends the stored answer again. For a request that made a job, the job is the answer, and `sealed` is
    empty.
    """

    __tablename__ = "idempotent_answers"
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    key: Mapped[str] = mapped_column(primary_key=True)
    request_digest: Mapped[str]
    # The answer. The API encrypts it, because it may contain a new secret.
    sealed: Mapped[bytes] = mapped_column(LargeBinary)
    created_at: Mapped[datetime] = mapped_column(index=True)


for _table in Named.__subclasses__():
    Index(None, _table.tenant_id, _table.id)  # a list reads one page of this index, newest first

"""The tables. One class a table, no behaviour; queries live in the store's domain modules.

Rules: every row of somebody's has `tenant_id`. Instants are UTC, kept as integer microseconds. Secrets are
kept as sha256 hex of the secret, never as themselves. Blobs are named by digest ("sha256:" + 64 hex) and live
in the blob store. Rows that others may still refer to are marked (`revoked_at`, `yanked_at`, `deleted_at`),
not removed.
"""

from datetime import UTC, datetime, timedelta
from typing import ClassVar, Final

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
    """An aware UTC `datetime`, kept as integer microseconds: the same order in every database."""

    impl = BigInteger
    cache_ok = True

    def process_bind_param(self, value: datetime | None, _dialect: Dialect) -> int | None:
        """Aware datetime to microseconds. Raises ValueError for a naive one."""
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"The time {value!r} has no time zone: make it aware.")
        return microseconds_of(value)

    def process_result_value(self, value: int | None, _dialect: Dialect) -> datetime | None:
        """Microseconds to aware datetime."""
        return None if value is None else EPOCH + value * MICROSECOND


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
        dict[str, object]: JSON,
        str: String(255),
    }


class Tenant(Base):
    """A customer: the wall that no query crosses."""

    __tablename__ = "tenants"
    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    created_at: Mapped[datetime]
    served_at: Mapped[datetime | None]  # when a job of it last began or ended: whose turn it is


class _OfTenant:
    """Mixin: the tenant that a row belongs to. Every query filters by it."""

    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), index=True)


class _Owned(_OfTenant):
    """Mixin: the columns that nearly every table has."""

    created_at: Mapped[datetime]


class Named(_Owned, Base):
    """Base of the tables whose rows have an id of ours. `noun`: what one row is called."""

    __abstract__ = True
    noun: ClassVar[str]
    id: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))  # its index is at the end of the module


class OperatorToken(Named):
    """A principal that calls the operator's routes: a bearer token, kept as its hash."""

    __tablename__ = "operator_tokens"
    noun = "token"
    name: Mapped[str]
    role: Mapped[str]
    token_hash: Mapped[str] = mapped_column(unique=True)
    expires_at: Mapped[datetime | None]
    last_used_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]


class EndedSession(_Owned, Base):
    """A session of the page that its operator ended before it ran out; the cookie itself has all the rest."""

    __tablename__ = "ended_sessions"
    id: Mapped[str] = mapped_column(primary_key=True)
    expires_at: Mapped[datetime]


class TrustMetadata(Base):
    """One file of a tenant's TUF repository, under the name by which clients fetch it. No private key is in
    the database.
    """

    __tablename__ = "trust_metadata"
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    file: Mapped[str] = mapped_column(primary_key=True)
    role: Mapped[str]
    version: Mapped[int] = mapped_column(BigInteger)
    data: Mapped[bytes] = mapped_column(LargeBinary)
    created_at: Mapped[datetime]
    __table_args__ = (UniqueConstraint("tenant_id", "role", "version"),)


class Probe(Base):
    """A single row that is written to test the database, since a full disk can still be read."""

    __tablename__ = "probes"
    id: Mapped[int] = mapped_column(primary_key=True)
    filler: Mapped[bytes] = mapped_column(LargeBinary)
    written_at: Mapped[datetime]


class Worker(Base):
    """A worker that ran lately; see `permille.store.jobs.dispatch`."""

    __tablename__ = "workers"
    name: Mapped[str] = mapped_column(primary_key=True)
    exports: Mapped[bool]  # whether the exporter of programs is installed there
    seen_at: Mapped[datetime]


class Model(Named):
    """A registered base model: a hub id pinned to a commit, a folder under the model root, or what a
    sparsification made."""

    __tablename__ = "models"
    noun = "model"
    name: Mapped[str]
    source: Mapped[dict[str, object]]  # as requests have it
    # What follows is None for a hub model that no worker has read yet.
    family: Mapped[str | None]
    config: Mapped[dict[str, object] | None]
    size_bytes: Mapped[int | None] = mapped_column(BigInteger)
    parameter_count: Mapped[int | None] = mapped_column(BigInteger)
    scoped_parameter_count: Mapped[int | None] = mapped_column(BigInteger)
    digest: Mapped[str | None]  # of the list of its files' names and digests
    __table_args__ = (Index(None, "tenant_id", "name"),)


class Corpus(Named):
    """A registered corpus: a file under the corpus root, or a data set of the allow-list."""

    __tablename__ = "corpora"
    noun = "corpus"
    name: Mapped[str]
    source: Mapped[dict[str, object]]  # as requests have it
    size_bytes: Mapped[int | None] = mapped_column(BigInteger)
    __table_args__ = (Index(None, "tenant_id", "name"),)


def _partial_index(name: str, where: str, *columns: str) -> Index:
    """An index of the rows for which the condition holds."""
    return Index(name, *columns, sqlite_where=text(where), postgresql_where=text(where))


def _index_of_some(table: str, column: str) -> Index:
    """An index of a column that few rows have. SQLite would count the others as rows of one value."""
    return _partial_index(f"ix_{table}_{column}", f"{column} IS NOT NULL", column)


# The condition of an index. A statement that is to use it must say the same words.
UNSUCCESSFUL: Final = "state IN ('cancelled', 'dead', 'failed')"


class Job(Named):
    """A piece of long work. `jobs.py` holds the only functions that change these rows."""

    __tablename__ = "jobs"
    noun = "job"
    kind: Mapped[str]
    state: Mapped[str]
    payload: Mapped[dict[str, object]]
    request_digest: Mapped[str]  # of version, kind and payload: equal requests have the same
    idempotency_key: Mapped[str | None]
    parent_id: Mapped[str | None] = mapped_column(ForeignKey("jobs.id"))
    device_id: Mapped[str | None] = mapped_column(ForeignKey("devices.id"))  # whose upload it checks
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
    error: Mapped[dict[str, object] | None]  # type, message, retryable, and for a bug the traceback
    result_id: Mapped[str | None]
    traceparent: Mapped[str | None]  # of the request that made it, or of its parent
    started_at: Mapped[datetime | None]  # of the newest attempt
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
        # For the queue. None of them may begin with `available_at`: PostgreSQL would look for a tenant's
        # first job by it, past the jobs of all the others.
        _partial_index("ix_jobs_queued", "state = 'queued'", "tenant_id", "available_at"),
        _partial_index(
            "ix_jobs_queued_devices", "state = 'queued'", "tenant_id", "device_id", "available_at", "id"
        ),
        _partial_index("ix_jobs_undispatched", "state = 'queued'", "dispatched_at"),
        _partial_index("ix_jobs_running", "state = 'running'", "worker", "tenant_id", "device_id"),
    )


class JobEvent(Base):
    """An event of a job. `seq` counts 1, 2, 3, ... in the job: the stream's `Last-Event-ID`."""

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
    """The result of a job: a sparse model, mask, quantization, or a package that its reader accepted."""

    __tablename__ = "artifacts"
    noun = "artifact"
    kind: Mapped[str]  # of its job
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), index=True)
    model_id: Mapped[str] = mapped_column(ForeignKey("models.id"))
    request: Mapped[dict[str, object]]  # what was asked for: its job's payload
    digest: Mapped[str]
    k: Mapped[int | None] = mapped_column(BigInteger)
    made_model_id: Mapped[str | None] = mapped_column(ForeignKey("models.id"))  # of a sparsification
    size_bytes: Mapped[int] = mapped_column(BigInteger)  # of what a package has of it
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
    """Blobs of an artifact. A device that may read a package may read these."""

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
    """Inputs of an artifact: ids of models, corpora and other artifacts."""

    __tablename__ = "artifact_sources"
    artifact_id: Mapped[str] = mapped_column(ForeignKey("artifacts.id"), primary_key=True)
    source_id: Mapped[str] = mapped_column(primary_key=True, index=True)


class BlobCollection(Base):
    """A single row: the time and result of the last collection of unreferenced blobs."""

    __tablename__ = "blob_collections"
    id: Mapped[int] = mapped_column(primary_key=True)
    began_at: Mapped[datetime]
    ended_at: Mapped[datetime | None]
    unreferenced_bytes: Mapped[int] = mapped_column(BigInteger, default=0)  # what was too young stays


class RetentionRule(Base):
    """A tenant's rule for what goes by itself; a limit that is None lets nothing go."""

    __tablename__ = "retention_rules"
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    token_id: Mapped[str]  # of the operator who set it: what it does is done in that name
    rule: Mapped[dict[str, object]]
    updated_at: Mapped[datetime]


class Release(Named):
    """A named version of a package. Versions of a name only grow."""

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


class Invitation(Named):
    """A one-time code that enrols one device."""

    __tablename__ = "invitations"
    noun = "invitation"
    code_hash: Mapped[str] = mapped_column(unique=True)
    release: Mapped[str]
    alias: Mapped[str]
    expires_at: Mapped[datetime]
    used_at: Mapped[datetime | None]
    device_id: Mapped[str | None] = mapped_column(ForeignKey("devices.id"))  # who used it
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
    version: Mapped[int | None] = mapped_column(BigInteger)  # of the release, that it was told last
    engine: Mapped[str | None]  # of its newest run
    memory_bytes: Mapped[int | None] = mapped_column(BigInteger)
    tags: Mapped[list[str]] = mapped_column(JSON, default=list)  # set by operators
    own_tags: Mapped[list[str]] = mapped_column(JSON, default=list)  # set by the device's owner
    last_seen_at: Mapped[datetime | None]
    served_at: Mapped[datetime | None]  # as a tenant's
    revoked_at: Mapped[datetime | None]  # by an operator
    unenrolled_at: Mapped[datetime | None]  # by the device itself
    __table_args__ = (
        UniqueConstraint("tenant_id", "public_key"),
        _partial_index(
            "ix_devices_active",
            "revoked_at IS NULL AND unenrolled_at IS NULL",
            # SQLite reads the rows as well, unless the index has the columns of its own condition.
            *("tenant_id", "release", "version", "alias", "revoked_at", "unenrolled_at"),
        ),
    )


class DeviceNonce(_Owned, Base):
    """A nonce that a device has signed to get an access token, so that it is good once."""

    __tablename__ = "device_nonces"
    nonce_hash: Mapped[str] = mapped_column(primary_key=True)
    device_id: Mapped[str] = mapped_column(ForeignKey("devices.id"), index=True)
    expires_at: Mapped[datetime] = mapped_column(index=True)
    used_at: Mapped[datetime | None]


class DeviceToken(_Owned, Base):
    """A device's short-lived access token, kept as its hash."""

    __tablename__ = "device_tokens"
    token_hash: Mapped[str] = mapped_column(primary_key=True)
    device_id: Mapped[str] = mapped_column(ForeignKey("devices.id"), index=True)
    expires_at: Mapped[datetime] = mapped_column(index=True)


class Upload(Named):
    """Bytes that a device sent of a run, a log or a packed state: `permille.store.uploads` has their life."""

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
    run_id: Mapped[str] = mapped_column(primary_key=True)  # made by the device
    device_id: Mapped[str] = mapped_column(ForeignKey("devices.id"))
    metrics: Mapped[dict[str, object]]
    # What fleets are counted by, taken out of the metrics; None once the run is forgotten.
    ended_at: Mapped[datetime]  # by the device's clock, at most the arrival of the report
    newest: Mapped[bool]  # of its device on this version, by `ended_at`
    release: Mapped[str | None]
    version: Mapped[int | None] = mapped_column(BigInteger)
    outcome: Mapped[str | None]
    gain: Mapped[float | None]  # nats per token that the personal state takes off
    loss: Mapped[float | None]  # of what the device uses after the run
    rise: Mapped[float | None]  # of the loss on general text that the personal state costs
    peak_rss_bytes: Mapped[int | None] = mapped_column(BigInteger)
    log_state: Mapped[str | None]
    log_form: Mapped[str | None]  # log, or state
    log_digest: Mapped[str | None]
    log_upload_id: Mapped[str | None] = mapped_column(ForeignKey("uploads.id"))  # has its bytes
    log_sent_at: Mapped[datetime | None]
    log_size_bytes: Mapped[int | None] = mapped_column(BigInteger)
    log_job_id: Mapped[str | None] = mapped_column(ForeignKey("jobs.id"))
    log_reason: Mapped[str | None] = mapped_column(Text)
    log_deleted_at: Mapped[datetime | None]
    state_digest: Mapped[str | None]  # of the server's replay
    deleted_at: Mapped[datetime | None]
    __table_args__ = (
        Index("ix_runs_device", "device_id", "ended_at"),
        Index("ix_runs_created_at", "tenant_id", "created_at"),
        _index_of_some("runs", "log_upload_id"),
        _index_of_some("runs", "log_job_id"),
        _partial_index("ix_runs_log_sent_at", "log_upload_id IS NOT NULL", "tenant_id", "log_sent_at"),
        # Fleets are counted on these two alone: rows with their metrics are twenty times as large.
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
    """A federation and where it stands; `permille.store.federations` changes these rows."""

    __tablename__ = "federations"
    noun = "federation"
    name: Mapped[str]
    release: Mapped[str]
    version: Mapped[int] = mapped_column(BigInteger)
    package_digest: Mapped[str]
    definition: Mapped[bytes] = mapped_column(LargeBinary)
    definition_digest: Mapped[str]
    state: Mapped[str]
    target: Mapped[int]
    minimum: Mapped[int]
    deadline_s: Mapped[int]
    rounds: Mapped[int]  # the most there will be
    number: Mapped[int]  # rounds done
    chain: Mapped[str]
    state_digest: Mapped[str]
    reach: Mapped[int] = mapped_column(BigInteger)
    adopted_round: Mapped[int | None]
    participations: Mapped[int | None]  # the most rounds of one device, where it is promised privacy
    __table_args__ = (
        UniqueConstraint("tenant_id", "name"),
        UniqueConstraint("tenant_id", "definition_digest"),
    )


class FederationMember(_OfTenant, Base):
    """A device that joined a federation, and may have left it."""

    __tablename__ = "federation_members"
    federation_id: Mapped[str] = mapped_column(ForeignKey("federations.id"), primary_key=True)
    device_id: Mapped[str] = mapped_column(ForeignKey("devices.id"), primary_key=True, index=True)
    joined_at: Mapped[datetime]
    left_at: Mapped[datetime | None]


class Round(_OfTenant, Base):
    """A round. After its end it has its record and the federation's head."""

    __tablename__ = "rounds"
    federation_id: Mapped[str] = mapped_column(ForeignKey("federations.id"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    state: Mapped[str] = mapped_column(index=True)
    start_digest: Mapped[str]  # of the state to begin from
    opened_at: Mapped[datetime]
    deadline_at: Mapped[datetime]
    closed_at: Mapped[datetime | None]
    job_id: Mapped[str | None] = mapped_column(ForeignKey("jobs.id"))
    refused: Mapped[dict[str, object]]  # how many, by code
    # What follows is known once it has ended.
    invited: Mapped[int | None]
    received: Mapped[int | None]
    counted: Mapped[int | None]
    record: Mapped[bytes | None] = mapped_column(LargeBinary)
    reason: Mapped[str | None] = mapped_column(Text)
    chain: Mapped[str | None]
    state_digest: Mapped[str | None]
    reach: Mapped[int | None] = mapped_column(BigInteger)
    gain_mean: Mapped[float | None]  # of the state that it began from, nats per token
    gain_error: Mapped[float | None]
    __table_args__ = (_index_of_some("rounds", "job_id"),)


class Participation(_OfTenant, Base):
    """A device's part in a round, and what it sent, until the round ends."""

    __tablename__ = "participations"
    federation_id: Mapped[str] = mapped_column(primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    device_id: Mapped[str] = mapped_column(ForeignKey("devices.id"), primary_key=True, index=True)
    invited_at: Mapped[datetime]
    digest: Mapped[str | None]  # of the contribution; kept for one round more
    data: Mapped[bytes | None] = mapped_column(LargeBinary)
    __table_args__ = (
        ForeignKeyConstraint(["federation_id", "number"], ["rounds.federation_id", "rounds.number"]),
    )


class PrivacyCharge(_OfTenant, Base):
    """That a device's integers go into a round's sum; see `permille.store.federations.charges`."""

    __tablename__ = "privacy_charges"
    federation_id: Mapped[str] = mapped_column(primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    device_id: Mapped[str] = mapped_column(ForeignKey("devices.id"), primary_key=True, index=True)
    state: Mapped[str]
    __table_args__ = (
        ForeignKeyConstraint(["federation_id", "number"], ["rounds.federation_id", "rounds.number"]),
    )


class FederationCheckpoint(_OfTenant, Base):
    """A federation's packed state after so many rounds."""

    __tablename__ = "checkpoints"
    federation_id: Mapped[str] = mapped_column(ForeignKey("federations.id"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    state: Mapped[bytes] = mapped_column(LargeBinary)


class DeviceGroup(Named):
    """A group of devices: a rule, which is looked at when a rollout on it starts."""

    __tablename__ = "device_groups"
    noun = "group"
    name: Mapped[str]
    rule: Mapped[dict[str, object]]
    __table_args__ = (UniqueConstraint("tenant_id", "name"),)


_UNENDED = text("state IN ('draft', 'running', 'paused')")


class Rollout(Named):
    """A version on its way to the devices of an alias; `permille.store.fleet.rollouts` changes these rows."""

    __tablename__ = "rollouts"
    noun = "rollout"
    token_id: Mapped[str]  # of who made it: what it does by itself is done in that name
    release: Mapped[str]
    alias: Mapped[str]
    version: Mapped[int] = mapped_column(BigInteger)
    before: Mapped[int] = mapped_column(BigInteger)  # the version of the alias when it was made
    group_id: Mapped[str | None] = mapped_column(ForeignKey("device_groups.id"))  # None: all devices
    choice: Mapped[dict[str, object]]  # of devices, as it is signed
    # Of each wave: the devices with a place below it. Empty before the rollout starts.
    bounds: Mapped[list[int]] = mapped_column(JSON, default=list)
    rules: Mapped[dict[str, object]]
    window: Mapped[dict[str, object] | None]  # when devices may begin to install; None: at any time
    on_stop: Mapped[str]
    state: Mapped[str] = mapped_column(index=True)
    wave: Mapped[int]  # from 0
    wave_devices: Mapped[int]  # of the open wave
    approved: Mapped[int]  # waves that may open, where the rules ask for an approval
    awaits_approval: Mapped[bool]  # nothing else holds the next wave back
    opened_at: Mapped[datetime | None]  # the wave
    looks: Mapped[int]  # since then
    reason: Mapped[str | None]  # why it stopped itself
    numbers: Mapped[dict[str, object] | None]  # at that time
    reverting: Mapped[bool]  # asked for, and not signed yet
    revision: Mapped[int]
    signed_revision: Mapped[int]  # what the trust metadata says
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
    """Result of a rollout's version on a device that began to install it."""

    __tablename__ = "rollout_reports"
    rollout_id: Mapped[str] = mapped_column(ForeignKey("rollouts.id"), primary_key=True)
    device_id: Mapped[str] = mapped_column(ForeignKey("devices.id"), primary_key=True, index=True)
    wave: Mapped[int]
    began_at: Mapped[datetime]
    installed: Mapped[bool]
    code: Mapped[str | None]  # None: it has not ended
    damage: Mapped[str | None]  # of a package that was refused, the code
    worse: Mapped[bool | None]  # None: it compared nothing
    difference: Mapped[float | None]  # nats per token; None also where its owner tells one bit
    ended_at: Mapped[datetime | None]
    acknowledged: Mapped[bool] = mapped_column(default=False)  # by a `resume`: it is counted no more
    __table_args__ = (Index("ix_rollout_reports_code", "rollout_id", "code"),)


class AuditEntry(_Owned, Base):
    """A change by an operator; see `permille.store.audit`."""

    __tablename__ = "audit_entries"
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    seq: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    token_id: Mapped[str]
    action: Mapped[str]
    subject: Mapped[str] = mapped_column(String(1024))
    request: Mapped[dict[str, object] | None]
    digest: Mapped[str]


class Webhook(Named):
    """An address that is told of rollouts. Its secret signs, so that it cannot be kept as a hash."""

    __tablename__ = "webhooks"
    noun = "webhook"
    url: Mapped[str] = mapped_column(String(1000))
    secret: Mapped[str]


class WebhookDelivery(_Owned, Base):
    """An event on its way to a webhook."""

    __tablename__ = "webhook_deliveries"
    id: Mapped[str] = mapped_column(primary_key=True)
    created_at: Mapped[datetime] = mapped_column(index=True)
    webhook_id: Mapped[str] = mapped_column(ForeignKey("webhooks.id"), index=True)
    event: Mapped[str]
    body: Mapped[dict[str, object]]
    attempts: Mapped[int]
    next_at: Mapped[datetime | None] = mapped_column(index=True)  # None: delivered, or given up
    failure: Mapped[str | None]  # of the last attempt


class IdempotentAnswer(Base):
    """The answer to a request that carried an idempotency key and made something other than a job."""

    __tablename__ = "idempotent_answers"
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    key: Mapped[str] = mapped_column(primary_key=True)
    request_digest: Mapped[str]
    # Encrypted by the API: an answer may hold a new secret.
    sealed: Mapped[bytes] = mapped_column(LargeBinary)
    created_at: Mapped[datetime] = mapped_column(index=True)


for _table in Named.__subclasses__():
    Index(None, _table.tenant_id, _table.id)  # a list reads one page of it, newest first

"""The first schema. Names of constraints follow the convention of `permille.store.tables`."""

import functools

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision: str | None = None
branch_labels: str | None = None
depends_on: str | None = None

TEXT, BIG = sa.String(255), sa.BigInteger()
_column = functools.partial(sa.Column, nullable=False)


def _create_partial_index(
    name: str, table: str, columns: list[str], condition: str, *, unique: bool = False
) -> None:
    where = sa.text(condition)
    op.create_index(name, table, columns, unique=unique, sqlite_where=where, postgresql_where=where)


def upgrade() -> None:
    """Create all tables."""
    op.create_table(
        "tenants",
        _column("id", TEXT, primary_key=True),
        _column("name", TEXT, unique=True),
        _column("created_at", BIG),
        sa.Column("served_at", BIG),
    )
    op.create_table(
        "audit_entries",
        _column("tenant_id", TEXT, sa.ForeignKey("tenants.id"), primary_key=True),
        _column("seq", BIG, primary_key=True, autoincrement=False),
        _column("token_id", TEXT),
        _column("action", TEXT),
        _column("subject", sa.String(1024)),
        sa.Column("request", sa.JSON()),
        _column("digest", TEXT),
        _column("created_at", BIG),
    )
    op.create_table(
        "probes",
        _column("id", sa.Integer(), primary_key=True),
        _column("filler", sa.LargeBinary()),
        _column("written_at", BIG),
    )
    op.create_table(
        "workers",
        _column("name", TEXT, primary_key=True),
        _column("exports", sa.Boolean()),
        _column("seen_at", BIG),
    )
    op.create_table(
        "blob_collections",
        _column("id", sa.Integer(), primary_key=True),
        _column("began_at", BIG),
        sa.Column("ended_at", BIG),
        _column("unreferenced_bytes", BIG),
    )
    op.create_table(
        "retention_rules",
        _column("tenant_id", TEXT, sa.ForeignKey("tenants.id"), primary_key=True),
        _column("token_id", TEXT),
        _column("rule", sa.JSON()),
        _column("updated_at", BIG),
    )
    op.create_table(
        "corpora",
        _column("name", TEXT),
        _column("source", sa.JSON()),
        sa.Column("size_bytes", BIG),
        _column("id", TEXT, primary_key=True),
        _column("tenant_id", TEXT, sa.ForeignKey("tenants.id")),
        _column("created_at", BIG),
    )
    op.create_table(
        "devices",
        _column("public_key", TEXT),
        _column("name", TEXT),
        sa.Column("agent_version", TEXT),
        _column("release", TEXT),
        _column("alias", TEXT),
        sa.Column("version", BIG),
        sa.Column("engine", TEXT),
        sa.Column("memory_bytes", BIG),
        _column("tags", sa.JSON()),
        sa.Column("last_seen_at", BIG),
        sa.Column("served_at", BIG),
        sa.Column("revoked_at", BIG),
        sa.Column("unenrolled_at", BIG),
        _column("id", TEXT, primary_key=True),
        _column("tenant_id", TEXT, sa.ForeignKey("tenants.id")),
        _column("created_at", BIG),
        sa.UniqueConstraint("tenant_id", "public_key"),
    )
    _create_partial_index(
        "ix_devices_active",
        "devices",
        ["tenant_id", "release", "version", "alias", "revoked_at", "unenrolled_at"],
        "revoked_at IS NULL AND unenrolled_at IS NULL",
    )
    op.create_table(
        "idempotent_answers",
        _column("tenant_id", TEXT, sa.ForeignKey("tenants.id"), primary_key=True),
        _column("key", TEXT, primary_key=True),
        _column("request_digest", TEXT),
        _column("sealed", sa.LargeBinary()),
        _column("created_at", BIG, index=True),
    )
    op.create_table(
        "jobs",
        _column("kind", TEXT),
        _column("state", TEXT),
        _column("payload", sa.JSON()),
        _column("request_digest", TEXT),
        sa.Column("idempotency_key", TEXT),
        sa.Column("parent_id", TEXT, sa.ForeignKey("jobs.id")),
        sa.Column("device_id", TEXT, sa.ForeignKey("devices.id")),
        _column("progress", sa.Double()),
        sa.Column("message", sa.Text()),
        sa.Column("eta_at", BIG),
        _column("attempt", sa.Integer()),
        _column("max_attempts", sa.Integer()),
        _column("fence", BIG),
        _column("event_seq", BIG),
        sa.Column("worker", TEXT),
        sa.Column("lease_expires_at", BIG),
        _column("available_at", BIG),
        sa.Column("dispatched_at", BIG),
        sa.Column("cancel_requested_at", BIG),
        sa.Column("error", sa.JSON()),
        sa.Column("result_id", TEXT),
        sa.Column("traceparent", TEXT),
        sa.Column("started_at", BIG),
        _column("updated_at", BIG),
        sa.Column("ended_at", BIG),
        _column("id", TEXT, primary_key=True),
        _column("tenant_id", TEXT, sa.ForeignKey("tenants.id")),
        _column("created_at", BIG),
        sa.UniqueConstraint("tenant_id", "idempotency_key"),
    )
    op.create_index("ix_jobs_state", "jobs", ["tenant_id", "state", "id"])
    op.create_index("ix_jobs_kind", "jobs", ["tenant_id", "kind", "id"])
    op.create_index("ix_jobs_request_digest", "jobs", ["tenant_id", "request_digest"])
    for name, columns, condition in (
        ("queued", ["tenant_id", "available_at"], "state = 'queued'"),
        ("queued_devices", ["tenant_id", "device_id", "available_at", "id"], "state = 'queued'"),
        ("undispatched", ["dispatched_at"], "state = 'queued'"),
        ("running", ["worker", "tenant_id", "device_id"], "state = 'running'"),
        ("device", ["device_id", "state"], "device_id IS NOT NULL"),
        ("ended", ["tenant_id", "ended_at"], "parent_id IS NULL"),
        ("unsuccessful", ["kind", "state"], "state IN ('cancelled', 'dead', 'failed')"),
    ):
        _create_partial_index(f"ix_jobs_{name}", "jobs", columns, condition)
    op.create_table(
        "models",
        _column("name", TEXT),
        _column("source", sa.JSON()),
        sa.Column("family", TEXT),
        sa.Column("config", sa.JSON()),
        sa.Column("size_bytes", BIG),
        sa.Column("parameter_count", BIG),
        sa.Column("scoped_parameter_count", BIG),
        sa.Column("digest", TEXT),
        _column("id", TEXT, primary_key=True),
        _column("tenant_id", TEXT, sa.ForeignKey("tenants.id")),
        _column("created_at", BIG),
    )
    op.create_table(
        "operator_tokens",
        _column("name", TEXT),
        _column("role", TEXT),
        _column("token_hash", TEXT, unique=True),
        sa.Column("expires_at", BIG),
        sa.Column("last_used_at", BIG),
        sa.Column("revoked_at", BIG),
        _column("id", TEXT, primary_key=True),
        _column("tenant_id", TEXT, sa.ForeignKey("tenants.id")),
        _column("created_at", BIG),
    )
    op.create_table(
        "trust_metadata",
        _column("tenant_id", TEXT, sa.ForeignKey("tenants.id"), primary_key=True),
        _column("file", TEXT, primary_key=True),
        _column("role", TEXT),
        _column("version", BIG),
        _column("data", sa.LargeBinary()),
        _column("created_at", BIG),
        sa.UniqueConstraint("tenant_id", "role", "version"),
    )
    op.create_table(
        "artifacts",
        _column("kind", TEXT),
        _column("job_id", TEXT, sa.ForeignKey("jobs.id"), index=True),
        _column("model_id", TEXT, sa.ForeignKey("models.id")),
        _column("request", sa.JSON()),
        _column("digest", TEXT),
        sa.Column("k", BIG),
        sa.Column("made_model_id", TEXT, sa.ForeignKey("models.id")),
        _column("size_bytes", BIG),
        _column("provenance", sa.JSON()),
        _column("id", TEXT, primary_key=True),
        _column("tenant_id", TEXT, sa.ForeignKey("tenants.id")),
        _column("created_at", BIG),
    )
    op.create_index("ix_artifacts_kind", "artifacts", ["tenant_id", "kind", "id"])
    op.create_index("ix_artifacts_model", "artifacts", ["model_id", "kind", "id"])
    _create_partial_index(
        "uq_artifacts_package", "artifacts", ["tenant_id", "digest"], "kind = 'package'", unique=True
    )
    op.create_table(
        "device_nonces",
        _column("nonce_hash", TEXT, primary_key=True),
        _column("device_id", TEXT, sa.ForeignKey("devices.id"), index=True),
        _column("expires_at", BIG, index=True),
        sa.Column("used_at", BIG),
        _column("tenant_id", TEXT, sa.ForeignKey("tenants.id"), index=True),
        _column("created_at", BIG),
    )
    op.create_table(
        "ended_sessions",
        _column("id", TEXT, primary_key=True),
        _column("expires_at", BIG),
        _column("tenant_id", TEXT, sa.ForeignKey("tenants.id"), index=True),
        _column("created_at", BIG),
    )
    op.create_table(
        "device_tokens",
        _column("token_hash", TEXT, primary_key=True),
        _column("device_id", TEXT, sa.ForeignKey("devices.id"), index=True),
        _column("expires_at", BIG, index=True),
        _column("tenant_id", TEXT, sa.ForeignKey("tenants.id"), index=True),
        _column("created_at", BIG),
    )
    op.create_table(
        "invitations",
        _column("code_hash", TEXT, unique=True),
        _column("release", TEXT),
        _column("alias", TEXT),
        _column("expires_at", BIG),
        sa.Column("used_at", BIG),
        sa.Column("device_id", TEXT, sa.ForeignKey("devices.id")),
        sa.Column("revoked_at", BIG),
        _column("id", TEXT, primary_key=True),
        _column("tenant_id", TEXT, sa.ForeignKey("tenants.id")),
        _column("created_at", BIG),
    )
    op.create_table(
        "job_events",
        _column("id", BIG.with_variant(sa.Integer(), "sqlite"), primary_key=True),
        _column("tenant_id", TEXT, sa.ForeignKey("tenants.id")),
        _column("job_id", TEXT, sa.ForeignKey("jobs.id")),
        _column("seq", BIG),
        _column("kind", TEXT),
        _column("data", sa.JSON()),
        _column("at", BIG),
        sa.UniqueConstraint("job_id", "seq"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "uploads",
        _column("device_id", TEXT, sa.ForeignKey("devices.id")),
        _column("run_id", TEXT),
        _column("state", TEXT),
        _column("size_bytes", BIG),
        _column("id", TEXT, primary_key=True),
        _column("tenant_id", TEXT, sa.ForeignKey("tenants.id")),
        _column("created_at", BIG),
    )
    op.create_index("ix_uploads_device_id_created_at", "uploads", ["device_id", "created_at"])
    op.create_index("ix_uploads_state", "uploads", ["state", "created_at"])
    op.create_table(
        "runs",
        _column("tenant_id", TEXT, sa.ForeignKey("tenants.id"), primary_key=True),
        _column("run_id", TEXT, primary_key=True),
        _column("device_id", TEXT, sa.ForeignKey("devices.id")),
        _column("metrics", sa.JSON()),
        _column("ended_at", BIG),
        _column("newest", sa.Boolean()),
        sa.Column("release", TEXT),
        sa.Column("version", BIG),
        sa.Column("outcome", TEXT),
        sa.Column("gain", sa.Double()),
        sa.Column("loss", sa.Double()),
        sa.Column("rise", sa.Double()),
        sa.Column("peak_rss_bytes", BIG),
        sa.Column("log_state", TEXT),
        sa.Column("log_form", TEXT),
        sa.Column("log_digest", TEXT),
        sa.Column("log_upload_id", TEXT, sa.ForeignKey("uploads.id")),
        sa.Column("log_sent_at", BIG),
        sa.Column("log_size_bytes", BIG),
        sa.Column("log_job_id", TEXT, sa.ForeignKey("jobs.id")),
        sa.Column("log_reason", sa.Text()),
        sa.Column("log_deleted_at", BIG),
        sa.Column("state_digest", TEXT),
        sa.Column("deleted_at", BIG),
        _column("created_at", BIG),
    )
    op.create_index("ix_runs_device", "runs", ["device_id", "ended_at"])
    op.create_index("ix_runs_created_at", "runs", ["tenant_id", "created_at"])
    _create_partial_index(
        "ix_runs_log_sent_at", "runs", ["tenant_id", "log_sent_at"], "log_upload_id IS NOT NULL"
    )
    op.create_index("ix_runs_ended_at", "runs", ["tenant_id", "ended_at", "outcome"])
    op.create_index(
        "ix_runs_newest",
        "runs",
        ["tenant_id", "release", "version", "gain", "outcome", "loss", "rise", "peak_rss_bytes", "device_id"],
        sqlite_where=sa.text("newest = 1"),
        postgresql_where=sa.text("newest"),
    )
    op.create_table(
        "artifact_blobs",
        _column("artifact_id", TEXT, sa.ForeignKey("artifacts.id"), primary_key=True),
        _column("position", sa.Integer(), primary_key=True),
        _column("tenant_id", TEXT, sa.ForeignKey("tenants.id"), index=True),
        _column("role", TEXT),
        _column("media_type", TEXT),
        _column("digest", TEXT),
        _column("size_bytes", BIG),
        sa.Column("path", sa.String(1024)),
    )
    op.create_index("ix_artifact_blobs_digest", "artifact_blobs", ["digest", "size_bytes"])
    op.create_table(
        "artifact_sources",
        _column("artifact_id", TEXT, sa.ForeignKey("artifacts.id"), primary_key=True),
        _column("source_id", TEXT, primary_key=True, index=True),
        _column("tenant_id", TEXT, sa.ForeignKey("tenants.id"), index=True),
    )
    op.create_table(
        "releases",
        _column("name", TEXT),
        _column("version", BIG),
        _column("package_id", TEXT, sa.ForeignKey("artifacts.id"), index=True),
        _column("package_digest", TEXT),
        sa.Column("yanked_at", BIG),
        sa.Column("yanked_reason", sa.Text()),
        _column("id", TEXT, primary_key=True),
        _column("tenant_id", TEXT, sa.ForeignKey("tenants.id")),
        _column("created_at", BIG),
        sa.UniqueConstraint("tenant_id", "name", "version"),
    )
    op.create_table(
        "aliases",
        _column("tenant_id", TEXT, primary_key=True),
        _column("name", TEXT, primary_key=True),
        _column("alias", TEXT, primary_key=True),
        _column("version", BIG),
        _column("updated_at", BIG),
        sa.ForeignKeyConstraint(
            ["tenant_id", "name", "version"], ["releases.tenant_id", "releases.name", "releases.version"]
        ),
    )
    op.create_table(
        "device_groups",
        _column("name", TEXT),
        _column("rule", sa.JSON()),
        _column("id", TEXT, primary_key=True),
        _column("tenant_id", TEXT, sa.ForeignKey("tenants.id")),
        _column("created_at", BIG),
        sa.UniqueConstraint("tenant_id", "name"),
    )
    op.create_table(
        "rollouts",
        _column("token_id", TEXT),
        _column("release", TEXT),
        _column("alias", TEXT),
        _column("version", BIG),
        _column("before", BIG),
        sa.Column("group_id", TEXT, sa.ForeignKey("device_groups.id")),
        _column("choice", sa.JSON()),
        _column("rules", sa.JSON()),
        _column("on_stop", TEXT),
        _column("state", TEXT, index=True),
        _column("wave", sa.Integer()),
        _column("wave_devices", sa.Integer()),
        _column("approved", sa.Integer()),
        _column("awaits_approval", sa.Boolean()),
        sa.Column("opened_at", BIG),
        sa.Column("counted_from", BIG),
        _column("looks", sa.Integer()),
        sa.Column("reason", TEXT),
        sa.Column("numbers", sa.JSON()),
        _column("reverting", sa.Boolean()),
        _column("revision", sa.Integer()),
        _column("signed_revision", sa.Integer()),
        sa.Column("ended_at", BIG),
        _column("id", TEXT, primary_key=True),
        _column("tenant_id", TEXT, sa.ForeignKey("tenants.id")),
        _column("created_at", BIG),
        sa.ForeignKeyConstraint(
            ["tenant_id", "release", "version"], ["releases.tenant_id", "releases.name", "releases.version"]
        ),
    )
    for name, columns, condition in (
        ("uq_rollouts_unended", ["tenant_id", "release", "alias"], "state IN ('draft', 'running', 'paused')"),
        ("ix_rollouts_unsigned", ["tenant_id"], "signed_revision < revision"),
    ):
        where = sa.text(condition)
        unique = name.startswith("uq")
        op.create_index(name, "rollouts", columns, unique=unique, sqlite_where=where, postgresql_where=where)
    op.create_table(
        "rollout_reports",
        _column("rollout_id", TEXT, sa.ForeignKey("rollouts.id"), primary_key=True),
        _column("device_id", TEXT, sa.ForeignKey("devices.id"), primary_key=True, index=True),
        _column("tenant_id", TEXT, sa.ForeignKey("tenants.id"), index=True),
        _column("wave", sa.Integer()),
        _column("began_at", BIG),
        _column("installed", sa.Boolean()),
        sa.Column("code", TEXT),
        sa.Column("damage", TEXT),
        sa.Column("worse", sa.Boolean()),
        sa.Column("difference", sa.Double()),
        sa.Column("ended_at", BIG),
    )
    op.create_index("ix_rollout_reports_code", "rollout_reports", ["rollout_id", "code", "ended_at"])
    op.create_table(
        "federations",
        _column("name", TEXT),
        _column("release", TEXT),
        _column("version", BIG),
        _column("package_digest", TEXT),
        _column("definition", sa.LargeBinary()),
        _column("definition_digest", TEXT),
        _column("state", TEXT),
        _column("target", sa.Integer()),
        _column("minimum", sa.Integer()),
        _column("deadline_s", sa.Integer()),
        _column("rounds", sa.Integer()),
        _column("number", sa.Integer()),
        _column("chain", TEXT),
        _column("state_digest", TEXT),
        _column("reach", BIG),
        sa.Column("adopted_round", sa.Integer()),
        sa.Column("participations", sa.Integer()),
        _column("id", TEXT, primary_key=True),
        _column("tenant_id", TEXT, sa.ForeignKey("tenants.id")),
        _column("created_at", BIG),
        sa.UniqueConstraint("tenant_id", "name"),
        sa.UniqueConstraint("tenant_id", "definition_digest"),
    )
    federation = functools.partial(_column, "federation_id", TEXT)
    op.create_table(
        "federation_members",
        federation(sa.ForeignKey("federations.id"), primary_key=True),
        _column("device_id", TEXT, sa.ForeignKey("devices.id"), primary_key=True, index=True),
        _column("tenant_id", TEXT, sa.ForeignKey("tenants.id"), index=True),
        _column("joined_at", BIG),
        sa.Column("left_at", BIG),
    )
    op.create_table(
        "rounds",
        federation(sa.ForeignKey("federations.id"), primary_key=True),
        _column("number", sa.Integer(), primary_key=True, autoincrement=False),
        _column("tenant_id", TEXT, sa.ForeignKey("tenants.id"), index=True),
        _column("state", TEXT, index=True),
        _column("start_digest", TEXT),
        _column("opened_at", BIG),
        _column("deadline_at", BIG),
        sa.Column("closed_at", BIG),
        sa.Column("job_id", TEXT, sa.ForeignKey("jobs.id")),
        _column("refused", sa.JSON()),
        sa.Column("invited", sa.Integer()),
        sa.Column("received", sa.Integer()),
        sa.Column("counted", sa.Integer()),
        sa.Column("record", sa.LargeBinary()),
        sa.Column("reason", sa.Text()),
        sa.Column("chain", TEXT),
        sa.Column("state_digest", TEXT),
        sa.Column("reach", BIG),
        sa.Column("gain_mean", sa.Double()),
        sa.Column("gain_error", sa.Double()),
    )
    op.create_table(
        "participations",
        federation(primary_key=True),
        _column("number", sa.Integer(), primary_key=True, autoincrement=False),
        _column("device_id", TEXT, sa.ForeignKey("devices.id"), primary_key=True, index=True),
        _column("tenant_id", TEXT, sa.ForeignKey("tenants.id"), index=True),
        _column("invited_at", BIG),
        sa.Column("digest", TEXT),
        sa.Column("data", sa.LargeBinary()),
        sa.ForeignKeyConstraint(["federation_id", "number"], ["rounds.federation_id", "rounds.number"]),
    )
    op.create_table(
        "privacy_charges",
        federation(primary_key=True),
        _column("number", sa.Integer(), primary_key=True, autoincrement=False),
        _column("device_id", TEXT, sa.ForeignKey("devices.id"), primary_key=True, index=True),
        _column("tenant_id", TEXT, sa.ForeignKey("tenants.id"), index=True),
        _column("state", TEXT),
        sa.ForeignKeyConstraint(["federation_id", "number"], ["rounds.federation_id", "rounds.number"]),
    )
    op.create_table(
        "checkpoints",
        federation(sa.ForeignKey("federations.id"), primary_key=True),
        _column("number", sa.Integer(), primary_key=True, autoincrement=False),
        _column("tenant_id", TEXT, sa.ForeignKey("tenants.id"), index=True),
        _column("state", sa.LargeBinary()),
    )
    for table, column in (
        ("jobs", "parent_id"),
        ("artifacts", "made_model_id"),
        ("runs", "log_upload_id"),
        ("runs", "log_job_id"),
        ("rounds", "job_id"),
    ):
        _create_partial_index(f"ix_{table}_{column}", table, [column], f"{column} IS NOT NULL")
    for table in ("models", "corpora"):
        op.create_index(f"ix_{table}_tenant_id_name", table, ["tenant_id", "name"])
    for table in (
        *("artifacts", "corpora", "device_groups", "devices", "federations", "invitations", "jobs"),
        *("models", "operator_tokens", "releases", "rollouts", "uploads"),
    ):
        op.create_index(f"ix_{table}_tenant_id_id", table, ["tenant_id", "id"])

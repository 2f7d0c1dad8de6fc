"""The first schema."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision: str | None = None
branch_labels: str | None = None
depends_on: str | None = None


def upgrade() -> None:
    """Create all tables."""
    op.create_table(
        "tenants",
        sa.Column("id", sa.String(length=255), nullable=False),
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tenants")),
        sa.UniqueConstraint("name", name=op.f("uq_tenants_name")),
    )
    op.create_table(
        "corpora",
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("source", sa.JSON(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=True),
        sa.Column("id", sa.String(length=255), nullable=False),
        sa.Column("tenant_id", sa.String(length=255), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_corpora_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_corpora")),
    )
    op.create_index(op.f("ix_corpora_tenant_id"), "corpora", ["tenant_id"], unique=False)
    op.create_table(
        "devices",
        sa.Column("public_key", sa.String(length=255), nullable=False),
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("agent_version", sa.String(length=255), nullable=True),
        sa.Column("release", sa.String(length=255), nullable=False),
        sa.Column("alias", sa.String(length=255), nullable=False),
        sa.Column("last_seen_at", sa.BigInteger(), nullable=True),
        sa.Column("revoked_at", sa.BigInteger(), nullable=True),
        sa.Column("unenrolled_at", sa.BigInteger(), nullable=True),
        sa.Column("id", sa.String(length=255), nullable=False),
        sa.Column("tenant_id", sa.String(length=255), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_devices_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_devices")),
        sa.UniqueConstraint("tenant_id", "public_key", name=op.f("uq_devices_tenant_id_public_key")),
    )
    op.create_index(op.f("ix_devices_tenant_id"), "devices", ["tenant_id"], unique=False)
    op.create_table(
        "idempotent_answers",
        sa.Column("tenant_id", sa.String(length=255), nullable=False),
        sa.Column("key", sa.String(length=255), nullable=False),
        sa.Column("request_digest", sa.String(length=255), nullable=False),
        sa.Column("sealed", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_idempotent_answers_tenant_id")),
        sa.PrimaryKeyConstraint("tenant_id", "key", name=op.f("pk_idempotent_answers")),
    )
    op.create_index(
        op.f("ix_idempotent_answers_created_at"), "idempotent_answers", ["created_at"], unique=False
    )
    op.create_table(
        "jobs",
        sa.Column("kind", sa.String(length=255), nullable=False),
        sa.Column("state", sa.String(length=255), nullable=False),
        sa.Column("payload", sa.JSON(), nullable=False),
        sa.Column("idempotency_key", sa.String(length=255), nullable=True),
        sa.Column("parent_id", sa.String(length=255), nullable=True),
        sa.Column("progress", sa.Double(), nullable=False),
        sa.Column("message", sa.Text(), nullable=True),
        sa.Column("eta_at", sa.BigInteger(), nullable=True),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("max_attempts", sa.Integer(), nullable=False),
        sa.Column("fence", sa.BigInteger(), nullable=False),
        sa.Column("event_seq", sa.BigInteger(), nullable=False),
        sa.Column("worker", sa.String(length=255), nullable=True),
        sa.Column("lease_expires_at", sa.BigInteger(), nullable=True),
        sa.Column("available_at", sa.BigInteger(), nullable=False),
        sa.Column("dispatched_at", sa.BigInteger(), nullable=True),
        sa.Column("cancel_requested_at", sa.BigInteger(), nullable=True),
        sa.Column("error", sa.JSON(), nullable=True),
        sa.Column("result_id", sa.String(length=255), nullable=True),
        sa.Column("started_at", sa.BigInteger(), nullable=True),
        sa.Column("updated_at", sa.BigInteger(), nullable=False),
        sa.Column("ended_at", sa.BigInteger(), nullable=True),
        sa.Column("id", sa.String(length=255), nullable=False),
        sa.Column("tenant_id", sa.String(length=255), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["parent_id"], ["jobs.id"], name=op.f("fk_jobs_parent_id")),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_jobs_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_jobs")),
        sa.UniqueConstraint("tenant_id", "idempotency_key", name=op.f("uq_jobs_tenant_id_idempotency_key")),
    )
    op.create_index(op.f("ix_jobs_parent_id"), "jobs", ["parent_id"], unique=False)
    op.create_index("ix_jobs_state_available_at", "jobs", ["state", "available_at"], unique=False)
    op.create_index(op.f("ix_jobs_tenant_id"), "jobs", ["tenant_id"], unique=False)
    op.create_table(
        "models",
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("source", sa.JSON(), nullable=False),
        sa.Column("family", sa.String(length=255), nullable=True),
        sa.Column("config", sa.JSON(), nullable=True),
        sa.Column("size_bytes", sa.BigInteger(), nullable=True),
        sa.Column("parameter_count", sa.BigInteger(), nullable=True),
        sa.Column("scoped_parameter_count", sa.BigInteger(), nullable=True),
        sa.Column("digest", sa.String(length=255), nullable=True),
        sa.Column("id", sa.String(length=255), nullable=False),
        sa.Column("tenant_id", sa.String(length=255), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_models_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_models")),
    )
    op.create_index(op.f("ix_models_tenant_id"), "models", ["tenant_id"], unique=False)
    op.create_table(
        "operator_tokens",
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("role", sa.String(length=255), nullable=False),
        sa.Column("token_hash", sa.String(length=255), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=True),
        sa.Column("last_used_at", sa.BigInteger(), nullable=True),
        sa.Column("revoked_at", sa.BigInteger(), nullable=True),
        sa.Column("id", sa.String(length=255), nullable=False),
        sa.Column("tenant_id", sa.String(length=255), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_operator_tokens_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_operator_tokens")),
        sa.UniqueConstraint("token_hash", name=op.f("uq_operator_tokens_token_hash")),
    )
    op.create_index(op.f("ix_operator_tokens_tenant_id"), "operator_tokens", ["tenant_id"], unique=False)
    op.create_table(
        "signing_keys",
        sa.Column("tenant_id", sa.String(length=255), nullable=False),
        sa.Column("key_id", sa.String(length=255), nullable=False),
        sa.Column("public_key", sa.String(length=255), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_signing_keys_tenant_id")),
        sa.PrimaryKeyConstraint("tenant_id", "key_id", name=op.f("pk_signing_keys")),
        sa.UniqueConstraint("tenant_id", "public_key", name=op.f("uq_signing_keys_tenant_id_public_key")),
    )
    op.create_table(
        "artifacts",
        sa.Column("kind", sa.String(length=255), nullable=False),
        sa.Column("job_id", sa.String(length=255), nullable=False),
        sa.Column("model_id", sa.String(length=255), nullable=False),
        sa.Column("request", sa.JSON(), nullable=False),
        sa.Column("digest", sa.String(length=255), nullable=False),
        sa.Column("k", sa.BigInteger(), nullable=True),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("provenance", sa.JSON(), nullable=False),
        sa.Column("id", sa.String(length=255), nullable=False),
        sa.Column("tenant_id", sa.String(length=255), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_artifacts_job_id")),
        sa.ForeignKeyConstraint(["model_id"], ["models.id"], name=op.f("fk_artifacts_model_id")),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_artifacts_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_artifacts")),
    )
    op.create_index(op.f("ix_artifacts_model_id"), "artifacts", ["model_id"], unique=False)
    op.create_index(op.f("ix_artifacts_tenant_id"), "artifacts", ["tenant_id"], unique=False)
    op.create_index(
        "uq_artifacts_package",
        "artifacts",
        ["tenant_id", "digest"],
        unique=True,
        sqlite_where=sa.text("kind = 'package'"),
        postgresql_where=sa.text("kind = 'package'"),
    )
    op.create_table(
        "device_nonces",
        sa.Column("nonce_hash", sa.String(length=255), nullable=False),
        sa.Column("device_id", sa.String(length=255), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=False),
        sa.Column("used_at", sa.BigInteger(), nullable=True),
        sa.Column("tenant_id", sa.String(length=255), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["device_id"], ["devices.id"], name=op.f("fk_device_nonces_device_id")),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_device_nonces_tenant_id")),
        sa.PrimaryKeyConstraint("nonce_hash", name=op.f("pk_device_nonces")),
    )
    op.create_index(op.f("ix_device_nonces_device_id"), "device_nonces", ["device_id"], unique=False)
    op.create_index(op.f("ix_device_nonces_tenant_id"), "device_nonces", ["tenant_id"], unique=False)
    op.create_table(
        "device_tokens",
        sa.Column("token_hash", sa.String(length=255), nullable=False),
        sa.Column("device_id", sa.String(length=255), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=False),
        sa.Column("tenant_id", sa.String(length=255), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["device_id"], ["devices.id"], name=op.f("fk_device_tokens_device_id")),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_device_tokens_tenant_id")),
        sa.PrimaryKeyConstraint("token_hash", name=op.f("pk_device_tokens")),
    )
    op.create_index(op.f("ix_device_tokens_device_id"), "device_tokens", ["device_id"], unique=False)
    op.create_index(op.f("ix_device_tokens_tenant_id"), "device_tokens", ["tenant_id"], unique=False)
    op.create_table(
        "invitations",
        sa.Column("code_hash", sa.String(length=255), nullable=False),
        sa.Column("release", sa.String(length=255), nullable=False),
        sa.Column("alias", sa.String(length=255), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=False),
        sa.Column("used_at", sa.BigInteger(), nullable=True),
        sa.Column("device_id", sa.String(length=255), nullable=True),
        sa.Column("revoked_at", sa.BigInteger(), nullable=True),
        sa.Column("id", sa.String(length=255), nullable=False),
        sa.Column("tenant_id", sa.String(length=255), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["device_id"], ["devices.id"], name=op.f("fk_invitations_device_id")),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_invitations_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_invitations")),
        sa.UniqueConstraint("code_hash", name=op.f("uq_invitations_code_hash")),
    )
    op.create_index(op.f("ix_invitations_tenant_id"), "invitations", ["tenant_id"], unique=False)
    op.create_table(
        "job_events",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("tenant_id", sa.String(length=255), nullable=False),
        sa.Column("job_id", sa.String(length=255), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.String(length=255), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_job_events_job_id")),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_job_events_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_job_events")),
        sa.UniqueConstraint("job_id", "seq", name=op.f("uq_job_events_job_id_seq")),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "runs",
        sa.Column("tenant_id", sa.String(length=255), nullable=False),
        sa.Column("run_id", sa.String(length=255), nullable=False),
        sa.Column("device_id", sa.String(length=255), nullable=False),
        sa.Column("metrics", sa.JSON(), nullable=False),
        sa.Column("log_state", sa.String(length=255), nullable=True),
        sa.Column("log_digest", sa.String(length=255), nullable=True),
        sa.Column("log_sent_at", sa.BigInteger(), nullable=True),
        sa.Column("log_size_bytes", sa.BigInteger(), nullable=True),
        sa.Column("log_job_id", sa.String(length=255), nullable=True),
        sa.Column("log_reason", sa.Text(), nullable=True),
        sa.Column("log_deleted_at", sa.BigInteger(), nullable=True),
        sa.Column("state_digest", sa.String(length=255), nullable=True),
        sa.Column("deleted_at", sa.BigInteger(), nullable=True),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["device_id"], ["devices.id"], name=op.f("fk_runs_device_id")),
        sa.ForeignKeyConstraint(["log_job_id"], ["jobs.id"], name=op.f("fk_runs_log_job_id")),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_runs_tenant_id")),
        sa.PrimaryKeyConstraint("tenant_id", "run_id", name=op.f("pk_runs")),
    )
    op.create_index(op.f("ix_runs_device_id"), "runs", ["device_id"], unique=False)
    op.create_table(
        "artifact_blobs",
        sa.Column("artifact_id", sa.String(length=255), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("tenant_id", sa.String(length=255), nullable=False),
        sa.Column("role", sa.String(length=255), nullable=False),
        sa.Column("media_type", sa.String(length=255), nullable=False),
        sa.Column("digest", sa.String(length=255), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("path", sa.String(length=1024), nullable=True),
        sa.ForeignKeyConstraint(
            ["artifact_id"], ["artifacts.id"], name=op.f("fk_artifact_blobs_artifact_id")
        ),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_artifact_blobs_tenant_id")),
        sa.PrimaryKeyConstraint("artifact_id", "position", name=op.f("pk_artifact_blobs")),
    )
    op.create_index(op.f("ix_artifact_blobs_digest"), "artifact_blobs", ["digest"], unique=False)
    op.create_index(op.f("ix_artifact_blobs_tenant_id"), "artifact_blobs", ["tenant_id"], unique=False)
    op.create_table(
        "artifact_sources",
        sa.Column("artifact_id", sa.String(length=255), nullable=False),
        sa.Column("source_id", sa.String(length=255), nullable=False),
        sa.Column("tenant_id", sa.String(length=255), nullable=False),
        sa.ForeignKeyConstraint(
            ["artifact_id"], ["artifacts.id"], name=op.f("fk_artifact_sources_artifact_id")
        ),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_artifact_sources_tenant_id")),
        sa.PrimaryKeyConstraint("artifact_id", "source_id", name=op.f("pk_artifact_sources")),
    )
    op.create_index(op.f("ix_artifact_sources_source_id"), "artifact_sources", ["source_id"], unique=False)
    op.create_index(op.f("ix_artifact_sources_tenant_id"), "artifact_sources", ["tenant_id"], unique=False)
    op.create_table(
        "releases",
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("package_id", sa.String(length=255), nullable=False),
        sa.Column("package_digest", sa.String(length=255), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=False),
        sa.Column("key_id", sa.String(length=255), nullable=False),
        sa.Column("signature", sa.String(length=255), nullable=False),
        sa.Column("yanked_at", sa.BigInteger(), nullable=True),
        sa.Column("yanked_reason", sa.Text(), nullable=True),
        sa.Column("id", sa.String(length=255), nullable=False),
        sa.Column("tenant_id", sa.String(length=255), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["package_id"], ["artifacts.id"], name=op.f("fk_releases_package_id")),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_releases_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_releases")),
        sa.UniqueConstraint("tenant_id", "name", "version", name=op.f("uq_releases_tenant_id_name_version")),
    )
    op.create_index(op.f("ix_releases_package_id"), "releases", ["package_id"], unique=False)
    op.create_index(op.f("ix_releases_tenant_id"), "releases", ["tenant_id"], unique=False)
    op.create_table(
        "aliases",
        sa.Column("tenant_id", sa.String(length=255), nullable=False),
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("alias", sa.String(length=255), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("updated_at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant_id", "name", "version"],
            ["releases.tenant_id", "releases.name", "releases.version"],
            name=op.f("fk_aliases_tenant_id_name_version"),
        ),
        sa.PrimaryKeyConstraint("tenant_id", "name", "alias", name=op.f("pk_aliases")),
    )

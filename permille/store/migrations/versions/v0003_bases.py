"""Learned bases."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision: str | None = "0002"
branch_labels: str | None = None
depends_on: str | None = None


def upgrade() -> None:
    """Add the table."""
    op.create_table(
        "bases",
        sa.Column("id", sa.String(length=255), nullable=False),
        sa.Column("job_id", sa.String(length=255), nullable=False),
        sa.Column("model_id", sa.String(length=255), nullable=False),
        sa.Column("mask_id", sa.String(length=255), nullable=False),
        sa.Column("corpus_id", sa.String(length=255), nullable=False),
        sa.Column("options", sa.JSON(), nullable=False),
        sa.Column("k", sa.BigInteger(), nullable=False),
        sa.Column("layer", sa.JSON(), nullable=False),
        sa.Column("provenance", sa.JSON(), nullable=False),
        sa.Column("basis_digest", sa.String(length=255), nullable=False),
        sa.Column("report_digest", sa.String(length=255), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("tenant_id", sa.String(length=255), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["corpus_id"], ["corpora.id"], name=op.f("fk_bases_corpus_id")),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_bases_job_id")),
        sa.ForeignKeyConstraint(["mask_id"], ["masks.id"], name=op.f("fk_bases_mask_id")),
        sa.ForeignKeyConstraint(["model_id"], ["models.id"], name=op.f("fk_bases_model_id")),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_bases_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_bases")),
        sa.UniqueConstraint("job_id", name=op.f("uq_bases_job_id")),
    )
    op.create_index(op.f("ix_bases_tenant_id"), "bases", ["tenant_id"], unique=False)


def downgrade() -> None:
    """Drop the table."""
    op.drop_table("bases")

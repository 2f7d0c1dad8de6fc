"""Evaluations, and the models that they compare."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision: str | None = "0003"
branch_labels: str | None = None
depends_on: str | None = None


def upgrade() -> None:
    """Add the tables."""
    op.create_table(
        "evaluations",
        sa.Column("id", sa.String(length=255), nullable=False),
        sa.Column("job_id", sa.String(length=255), nullable=False),
        sa.Column("corpus_id", sa.String(length=255), nullable=False),
        sa.Column("options", sa.JSON(), nullable=False),
        sa.Column("provenance", sa.JSON(), nullable=False),
        sa.Column("cells", sa.BigInteger(), nullable=False),
        sa.Column("bad_rows", sa.BigInteger(), nullable=False),
        sa.Column("results_digest", sa.String(length=255), nullable=False),
        sa.Column("report_digest", sa.String(length=255), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("tenant_id", sa.String(length=255), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["corpus_id"], ["corpora.id"], name=op.f("fk_evaluations_corpus_id")),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_evaluations_job_id")),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_evaluations_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_evaluations")),
        sa.UniqueConstraint("job_id", name=op.f("uq_evaluations_job_id")),
    )
    op.create_index(op.f("ix_evaluations_tenant_id"), "evaluations", ["tenant_id"], unique=False)
    op.create_table(
        "evaluated_models",
        sa.Column("evaluation_id", sa.String(length=255), nullable=False),
        sa.Column("model_id", sa.String(length=255), nullable=False),
        sa.Column("tenant_id", sa.String(length=255), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(
            ["evaluation_id"], ["evaluations.id"], name=op.f("fk_evaluated_models_evaluation_id")
        ),
        sa.ForeignKeyConstraint(["model_id"], ["models.id"], name=op.f("fk_evaluated_models_model_id")),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_evaluated_models_tenant_id")),
        sa.PrimaryKeyConstraint("evaluation_id", "model_id", name=op.f("pk_evaluated_models")),
    )
    op.create_index(op.f("ix_evaluated_models_model_id"), "evaluated_models", ["model_id"], unique=False)
    op.create_index(op.f("ix_evaluated_models_tenant_id"), "evaluated_models", ["tenant_id"], unique=False)


def downgrade() -> None:
    """Drop the tables."""
    op.drop_table("evaluated_models")
    op.drop_table("evaluations")

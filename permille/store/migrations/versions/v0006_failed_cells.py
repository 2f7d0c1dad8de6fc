"""Evaluations of which some cells could not be measured: how many."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision: str | None = "0005"
branch_labels: str | None = None
depends_on: str | None = None


def upgrade() -> None:
    """Evaluations of before have all their cells."""
    op.add_column(
        "evaluations", sa.Column("failed_cells", sa.BigInteger(), nullable=False, server_default="0")
    )


def downgrade() -> None:
    """Forget how many."""
    op.drop_column("evaluations", "failed_cells")

"""Create the first schema from the current tables.

The first release freezes this module: it will then list the statements one by one, as `alembic
revision --autogenerate` writes them. Later changes of the tables are separate migrations.
"""

from alembic import op

from permille.store.tables import Base

revision = "0001"
down_revision: str | None = None
branch_labels: str | None = None
depends_on: str | None = None


def upgrade() -> None:
    """Create all tables. A table that already exists is an error."""
    # Without `checkfirst`, since a database with other tables of these names is not ours.
    Base.metadata.create_all(op.get_bind(), checkfirst=False)

"""Create the first schema: the tables of the model, as they are.

A release freezes this module: from then on the statements stand here one by one, as
`alembic revision --autogenerate` writes them, and a change of the tables is a migration of its own.
"""

from alembic import op

from permille.store.tables import Base

revision = "0001"
down_revision: str | None = None
branch_labels: str | None = None
depends_on: str | None = None


def upgrade() -> None:
    """Create all tables; one that exists already is an error."""
    # Not `checkfirst`: a database that holds other tables of these names is not ours.
    Base.metadata.create_all(op.get_bind(), checkfirst=False)

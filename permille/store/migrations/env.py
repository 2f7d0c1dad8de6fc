"""Entry point of Alembic. It takes the connection from `permille.store.migrations.schema.migrate`."""

from alembic import context

from permille.store.tables import Base

context.configure(
    connection=context.config.attributes["connection"], target_metadata=Base.metadata, render_as_batch=True
)
with context.begin_transaction():
    context.run_migrations()

"""Bringing a database to the newest schema. The migrations are part of the package
(`permille/store/migrations`).
"""

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, text
from sqlalchemy.exc import OperationalError

from permille.errors import OperatorError
from permille.store.database import make_engine

_LOCK_ID = 0x7065726D  # PostgreSQL advisory lock: two processes that start together migrate in turn


def migrate(url: str, *, revision: str = "head") -> None:
    """Create or upgrade the schema at `url`, in one transaction. Does nothing where it is up to date, and
    then waits for no writer: a worker can start while another process holds the database's write lock.

    Safe to call from several processes at once: they take turns.

    Args:
        revision: an earlier schema than the newest, for tests of what comes after it.

    Raises:
        OperatorError: the database cannot be reached, or its write lock stayed taken (SQLite).
    """
    engine = make_engine(url)
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    try:
        if _is_at(engine, config, revision):
            return
        with engine.execution_options(permille_begin="IMMEDIATE").begin() as connection:
            if connection.dialect.name == "postgresql":
                connection.execute(text(f"SELECT pg_advisory_xact_lock({_LOCK_ID})"))
            config.attributes["connection"] = connection
            command.upgrade(config, revision)
    except OperationalError as exc:
        where = engine.url.render_as_string(hide_password=True)
        message = f"expected a database that can be read and written, got {exc.orig} ({where})"
        raise OperatorError(message) from exc
    finally:
        engine.dispose()


def _is_at(engine: Engine, config: Config, revision: str) -> bool:
    wanted = ScriptDirectory.from_config(config).as_revision_number(revision)
    with engine.connect() as connection:
        return MigrationContext.configure(connection).get_current_heads() == (wanted,)

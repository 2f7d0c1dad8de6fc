"""Bringing a database to the newest schema. The migrations are part of the package
(`permille/store/migrations`).
"""

from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import text

from permille.store.database import make_engine

_LOCK_ID = 0x7065726D  # PostgreSQL advisory lock: two processes that start together migrate in turn


def migrate(url: str, *, revision: str = "head") -> None:
    """Create or upgrade the schema at `url`, in one transaction. Does nothing where it is up to date.

    Safe to call from several processes at once: they take turns.

    Args:
        revision: an earlier schema than the newest, for tests of what comes after it.
    """
    engine = make_engine(url).execution_options(permille_begin="IMMEDIATE")
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    try:
        with engine.begin() as connection:
            if connection.dialect.name == "postgresql":
                connection.execute(text(f"SELECT pg_advisory_xact_lock({_LOCK_ID})"))
            config.attributes["connection"] = connection
            command.upgrade(config, revision)
    finally:
        engine.dispose()

"""The database role of workers in tests."""

import psycopg

from tests.unit.store.postgres import Server

ROLE = "permille_worker"


def make_role(server: Server) -> str:
    """Make the role if there is none. Return the URL with it."""
    with psycopg.connect(server.url.replace("+psycopg", ""), autocommit=True) as connection:
        known = connection.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", (ROLE,)).fetchone()
        if known is None:
            connection.execute(f"CREATE ROLE {ROLE} LOGIN")
    return with_role(server)


def with_role(server: Server) -> str:
    """The URL of the server with the role. The server need not run."""
    return server.url.replace("//permille@", f"//{ROLE}@")

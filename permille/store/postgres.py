"""Connections to PostgreSQL that do not wait for ever, and the options that a database's URL may have."""

import time
from collections.abc import Generator
from typing import Any, Final

import psycopg
from psycopg import pq

PREPARE: Final = "prepare_threshold"
"""Option of a URL: how often a statement runs before the server prepares it. 0 prepares none, as PgBouncer
before 1.21 needs.
"""

NUMBERS: Final = frozenset(
    {PREPARE, "connect_timeout", "tcp_user_timeout", "keepalives"}
    | {f"keepalives_{name}" for name in ("count", "idle", "interval")}
)
"""Options of a URL whose values are whole numbers. Without this check, each start would try to connect."""


class BoundedConnection(psycopg.Connection[Any]):
    """A connection that is closed when the server is silent for too long.

    Timeouts of the server cannot help when the server itself hangs, or the network to it.
    """

    answer_s: float | None = None
    """Seconds that a statement may take. None: no limit."""

    def wait(self, gen: Generator[Any, Any, Any], *arguments: Any, **options: Any) -> Any:
        """Run a step of the protocol. See `psycopg.Connection.wait`.

        Raises:
            psycopg.OperationalError: the server did not answer in time. The connection is closed.
        """
        if self.answer_s is None:
            return super().wait(gen, *arguments, **options)
        return super().wait(self._limited(gen, self.answer_s), *arguments, **options)

    def _limited(self, gen: Generator[Any, Any, Any], answer_s: float) -> Generator[Any, Any, Any]:
        # The driver resumes the generator when bytes have come, and at least ten times a second.
        until_s = time.monotonic() + answer_s
        try:
            state = next(gen)
            while True:
                state = gen.send((yield state))
                if time.monotonic() > until_s:
                    self.close()
                    raise psycopg.OperationalError(f"the server did not answer within {answer_s:.0f} s")
        except StopIteration as done:
            return done.value


def connect(arguments: dict[str, Any], answer_s: float | None) -> BoundedConnection:
    """Open a connection with the arguments that SQLAlchemy made of a URL."""
    threshold = int(arguments.pop(PREPARE, 5))
    # Without it, the driver takes the encoding of the database, and returns bytes if that is SQL_ASCII.
    encoded = {"client_encoding": "utf8", **arguments}
    connection = BoundedConnection.connect(**encoded, prepare_threshold=threshold or None)
    connection.answer_s = answer_s
    return connection


def option_names() -> frozenset[str]:
    """Return the names of the options that a URL may have after `?`."""
    return frozenset(option.keyword.decode() for option in pq.Conninfo.get_defaults()) | {PREPARE}

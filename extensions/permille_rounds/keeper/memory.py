"""Memory of the keeper: its answers, and the devices whose seals it has opened.

A question of the service names a round and a set of devices. For each device, it contains a seal: the
encrypted seed of the device's mask.

- An answer is stored durably before it is sent. So the noise for a set of devices is drawn only once, and the
  same question gets the same bytes, even if the process was killed in between.
- A device's seal of a round is opened for only one set of devices. Otherwise the service could subtract the
  answers for two sets. If the sets differ in a single device, this gives that device's mask plus noise.
"""

import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

from permille.digests import digest_of
from permille.errors import PermilleError
from permille_rounds.masked import Opening

_SCHEMA = """
CREATE TABLE IF NOT EXISTS answers (
    question TEXT PRIMARY KEY, definition TEXT NOT NULL, number INTEGER NOT NULL,
    devices INTEGER NOT NULL, answer BLOB NOT NULL, answered_at TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS opened (
    definition TEXT NOT NULL, number INTEGER NOT NULL, device BLOB NOT NULL,
    question TEXT NOT NULL REFERENCES answers (question),
    PRIMARY KEY (definition, number, device)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS refusals (at TEXT NOT NULL, reason TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS second_sets (question TEXT PRIMARY KEY, at TEXT NOT NULL, reason TEXT NOT NULL);
"""
_NOW = "strftime('%Y-%m-%dT%H:%M:%SZ', 'now')"
_KEPT_REFUSALS = 1000


class SecondSetError(PermilleError):
    """A device's seal of this round was already opened for another set of devices."""


class Memory:
    """The keeper's database. Each call opens a new connection, so that threads do not share one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW, 0o600))
        connection = self._connect()
        connection.execute("PRAGMA journal_mode = WAL")
        connection.executescript(_SCHEMA)
        connection.close()

    def answer_once(self, opening: Opening, make: Callable[[], bytes]) -> bytes:
        """Return the answer to a question. If there is none yet, call `make`, and store its result durably.

        For example, the second call returns the answer of the first:

            memory.answer_once(opening, lambda: b"one")
            memory.answer_once(opening, lambda: b"two")

        Raises:
            SecondSetError: the seal of a device in the question was opened for another set in this round.
            Exception: `make` failed, and nothing was stored.
        """
        question = digest_of(opening.to_bytes())
        place = (opening.definition.digest, opening.round_number)
        connection = self._connect()
        try:
            connection.execute("BEGIN IMMEDIATE")
            given = connection.execute("SELECT answer FROM answers WHERE question = ?", [question]).fetchone()
            if given is not None:
                return bytes(given[0])
            query = "SELECT device FROM opened WHERE definition = ? AND number = ?"
            known = {row[0] for row in connection.execute(query, place)}
            again = [entry[0] for entry in opening.entries if entry[0] in known]
            if again:
                raise SecondSetError(
                    f"{len(again)} seals of round {place[1]} of {place[0]} were already opened for another "
                    f"set of devices. The first one belongs to device {again[0].hex()}"
                )
            answer = make()
            connection.execute(
                f"INSERT INTO answers VALUES (?, ?, ?, ?, ?, {_NOW})",  # noqa: S608 - a constant
                [question, *place, len(opening.entries), answer],
            )
            connection.executemany(
                "INSERT INTO opened VALUES (?, ?, ?, ?)",
                [[*place, entry[0], question] for entry in opening.entries],
            )
            connection.execute("COMMIT")
            return answer
        finally:
            connection.close()  # this rolls back a transaction that was not committed

    def note_second_set(self, question: str, reason: str) -> None:
        """Record a question about a second set of devices.

        The record is kept for ever, because such a question suggests that the service cheats.
        """
        connection = self._connect()
        with connection:
            connection.execute(
                f"INSERT OR IGNORE INTO second_sets VALUES (?, {_NOW}, ?)",  # noqa: S608 - a constant
                [question, reason[:1000]],
            )
        connection.close()

    def note_refusal(self, reason: str) -> None:
        """Record a refusal of another kind. Only the newest thousand are kept."""
        connection = self._connect()
        with connection:
            connection.execute(f"INSERT INTO refusals VALUES ({_NOW}, ?)", [reason[:1000]])  # noqa: S608
            connection.execute(
                "DELETE FROM refusals WHERE rowid <= (SELECT MAX(rowid) FROM refusals) - ?", [_KEPT_REFUSALS]
            )
        connection.close()

    def lines(self) -> list[str]:
        """Return a line for each answer and each refusal. The oldest line comes first."""
        query = (
            "SELECT answered_at, 'summed ' || devices || ' devices in round ' || number || ' of ' "
            "|| definition FROM answers UNION ALL SELECT at, 'refused: ' || reason FROM second_sets "
            "UNION ALL SELECT at, 'refused: ' || reason FROM refusals ORDER BY 1"
        )
        connection = self._connect()
        found = [f"{at}  {text}" for at, text in connection.execute(query)]
        connection.close()
        return found

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, timeout=30, isolation_level=None)
        connection.execute("PRAGMA synchronous = FULL")
        return connection

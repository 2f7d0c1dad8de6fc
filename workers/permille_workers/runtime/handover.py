"""The message from a supervisor to its child: the claim and the settings, as one line of JSON in a pipe.

The pipe keeps secrets, such as the password of the database, out of command lines and files. The supervisor
keeps the pipe open. When the child reads the end of the pipe, the supervisor is gone.
"""

import json
from dataclasses import asdict
from typing import Any

from pydantic import SecretStr

from permille.errors import InputError
from permille.store.jobs.claims import Claim
from permille_workers.runtime.settings import WorkerSettings


def encode_handover(claim: Claim, settings: WorkerSettings) -> bytes:
    """Encode a claim and settings as a line."""
    # pydantic's own JSON would mask secrets, which the child needs.
    plain = {name: _plain(value) for name, value in settings}
    return json.dumps({"claim": asdict(claim), "settings": plain}).encode() + b"\n"


def decode_handover(line: bytes) -> tuple[Claim, WorkerSettings]:
    """Decode a line. Raises InputError if it is malformed."""
    try:
        record = json.loads(line)
        return Claim(**record["claim"]), WorkerSettings(**record["settings"])
    except (ValueError, KeyError, TypeError) as exc:
        kind = type(exc).__name__
        raise InputError(f"expected a line from a supervisor, got {len(line)} bytes: {kind}") from exc


def _plain(value: Any) -> Any:
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    return value if value is None or isinstance(value, int | float) else str(value)

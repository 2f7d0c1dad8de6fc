"""The privileges of the database role of workers (PostgreSQL).

    with engine.begin() as connection:
        grant(connection, "permille_worker")

The API, or the migration, connects as the owner of the tables, and grants these privileges to the role of
`PERMILLE_WORKER_ROLE`. So somebody who takes over a worker, or learns its password, can make no tokens and
sign nothing. The role cannot add or change tenants, devices, tokens, releases or signed metadata. It can
still spoil what workers make: jobs, results, rounds, and the progress of rollouts.
"""

import zlib
from collections.abc import Mapping
from typing import Final

from sqlalchemy import Connection, text

_WHOLE: Final = "SELECT, INSERT, UPDATE, DELETE"
PRIVILEGES: Final[Mapping[str, str]] = {
    "alembic_version": "SELECT",
    # Requests, and who may send them. A worker shares its turns among tenants and devices by `served_at`.
    "tenants": "SELECT, UPDATE (served_at)",
    "operator_tokens": "",
    "ended_sessions": "",
    "idempotent_answers": "",
    "devices": "SELECT, UPDATE (served_at)",
    "invitations": "",
    "device_nonces": "SELECT (nonce_hash, expires_at), DELETE",
    "device_tokens": "SELECT (token_hash, expires_at), DELETE",
    "device_groups": "SELECT",
    "audit_entries": "SELECT, INSERT",
    "probes": "",
    # Releases, which the API signs.
    "trust_metadata": "",
    "releases": "SELECT",
    "aliases": "SELECT",
    "retention_rules": "SELECT",
    # Jobs and their results.
    "workers": _WHOLE,
    "jobs": _WHOLE,
    "job_events": _WHOLE,
    "models": "SELECT, INSERT, DELETE, UPDATE (family, config, size_bytes, parameter_count, "
    "scoped_parameter_count, digest)",
    "corpora": "SELECT",
    "artifacts": _WHOLE,
    "artifact_blobs": _WHOLE,
    "artifact_sources": _WHOLE,
    "blob_collections": _WHOLE,
    # What devices send.
    "uploads": "SELECT, UPDATE, DELETE",
    "runs": "SELECT, UPDATE, DELETE",
    "federations": "SELECT, UPDATE",
    "federation_members": "SELECT, UPDATE",
    "rounds": "SELECT, INSERT, UPDATE",
    "participations": "SELECT, UPDATE, DELETE",
    "privacy_charges": "SELECT, INSERT, UPDATE",
    "checkpoints": "SELECT, INSERT, DELETE",
    "rollouts": "SELECT, UPDATE",
    "rollout_reports": "SELECT, UPDATE",
    "webhooks": "SELECT",
    "webhook_deliveries": _WHOLE,
}
"""Privileges by table."""

ACTIONS: Final = ("apply_retention", "halt_rollout")
"""Actions of the audit log that workers write. Row-level security refuses others."""


def grant(connection: Connection, role: str) -> None:
    """Give a role exactly the privileges of workers. The caller owns the tables.

    Args:
        connection: a connection in a transaction.
        role: the name of the role. It must exist.

    Raises:
        DBAPIError: there is no such role, or the caller does not own the tables.
    """
    quoted = connection.dialect.identifier_preparer.quote_identifier(role)
    for table, privileges in PRIVILEGES.items():
        connection.execute(text(f"REVOKE ALL ON {table} FROM {quoted}"))
        if privileges:
            connection.execute(text(f"GRANT {privileges} ON {table} TO {quoted}"))
    connection.execute(text(f"GRANT USAGE ON SEQUENCE job_events_id_seq TO {quoted}"))
    _restrict_audit(connection, quoted)


def _restrict_audit(connection: Connection, quoted: str) -> None:
    """Let the role read the audit log, and add entries of `ACTIONS` only."""
    actions = ", ".join(f"'{action}'" for action in ACTIONS)
    rules = [
        f"FOR SELECT TO {quoted} USING (true)",
        f"FOR INSERT TO {quoted} WITH CHECK (action IN ({actions}))",
    ]
    # The name tells whether a policy is as we want it. Changes would lock out readers, such as a backup.
    wanted = {f"permille_worker_{zlib.crc32(rule.encode()):08x}": rule for rule in rules}
    query = text(
        "SELECT policyname FROM pg_policies "
        "WHERE tablename = 'audit_entries' AND schemaname = current_schema()"
    )
    found = set(connection.scalars(query))
    if found == wanted.keys():
        return
    # The owner passes row-level security, so it changes nothing for the API.
    connection.execute(text("ALTER TABLE audit_entries ENABLE ROW LEVEL SECURITY"))
    for name in found:
        connection.execute(text(f"DROP POLICY {name} ON audit_entries"))
    for name, rule in wanted.items():
        connection.execute(text(f"CREATE POLICY {name} ON audit_entries {rule}"))

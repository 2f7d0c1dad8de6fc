"""Audit the tables and files after all faults have ended.

The audit calls no code of the product.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, create_engine, text

ENDED = ("succeeded", "failed", "cancelled", "dead")
_PACKAGES = ("package", "build", "export")
_INPUT_ERRORS = ("InputError", "PartFailed")
"""Errors that the infrastructure does not cause. PartFailed: the part of the job has the real error."""


@dataclass(slots=True)
class Findings:
    """The errors that were found, one line each."""

    lost: list[str] = field(default_factory=list)
    published_twice: list[str] = field(default_factory=list)
    orphan_blobs: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not (self.lost or self.published_twice or self.orphan_blobs)

    def __add__(self, other: "Findings") -> "Findings":
        return Findings(
            self.lost + other.lost,
            self.published_twice + other.published_twice,
            self.orphan_blobs + other.orphan_blobs,
        )

    def line(self, jobs: int) -> str:
        """Return the last line of a run."""
        return (
            f"chaos: jobs={jobs} lost={len(self.lost)} published_twice={len(self.published_twice)} "
            f"orphan_blobs={len(self.orphan_blobs)}"
        )


def audit(url: str, blob_root: Path, accepted: Mapping[str, Sequence[str]]) -> Findings:
    """Find jobs that were lost or published twice, and files that were left over.

    Args:
        accepted: For the key of each request, the job ids of all 2xx answers.
    """
    engine = create_engine(url)
    try:
        with engine.connect() as connection:
            tables = _Tables(connection)
            return Findings(
                lost=sorted({*_lost(tables, accepted), *_lost_rounds(tables)}),
                published_twice=sorted({*_twice(tables), *_accepted_twice(accepted)}),
                orphan_blobs=sorted({*_orphans(tables, blob_root), *_damaged(tables, blob_root)}),
            )
    finally:
        engine.dispose()


@dataclass(frozen=True, slots=True)
class _Tables:
    """Rows by plain SQL for SQLite and PostgreSQL."""

    connection: Connection

    def rows(self, query: str) -> list[Any]:
        return list(self.connection.execute(text(query)))


def _lost(tables: _Tables, accepted: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield accepted jobs without a row, and jobs that have not ended, have failed, or have no result."""
    found = {row.id: row for row in tables.rows("SELECT id, kind, state, error, result_id FROM jobs")}
    made = _made(tables)
    for key, ids in accepted.items():
        for job_id in ids:
            if job_id not in found:
                yield f"{key}: {job_id} has no row"
    for job_id, row in found.items():
        if row.state not in ENDED:
            yield f"{row.kind} {job_id} is {row.state}"
        elif row.state == "dead" or (row.state == "failed" and not _is_of_input(row.error)):
            yield f"{row.kind} {job_id} is {row.state}: {str(row.error)[:300]}"
        elif row.state == "succeeded" and row.kind != "shard" and (row.kind, row.result_id) not in made:
            yield f"{row.kind} {job_id} has succeeded, and its result {row.result_id} is not there"


def _is_of_input(error: Any) -> bool:
    return any(f'"{name}"' in str(error).replace("'", '"') for name in _INPUT_ERRORS)


def _made(tables: _Tables) -> set[tuple[str, str]]:
    """Return the existing results by the kind of their job and their name."""
    made: set[tuple[str, str]] = set()
    for row in tables.rows("SELECT id, kind, digest FROM artifacts"):
        if row.kind == "package":
            made |= {(kind, row.digest) for kind in _PACKAGES}
        made.add((row.kind, row.id))
    decided = "SELECT run_id FROM runs WHERE log_state IN ('verified', 'refused')"
    made |= {("replay", row.run_id) for row in tables.rows(decided)}
    rounds = "SELECT federation_id, number FROM rounds WHERE state IN ('published', 'void')"
    return made | {("round", f"{row.federation_id}/rounds/{row.number}") for row in tables.rows(rounds)}


def _lost_rounds(tables: _Tables) -> Iterator[str]:
    """Yield rounds that are void although they received enough contributions."""
    query = """SELECT r.federation_id, r.number, r.reason
               FROM rounds r JOIN federations f ON f.id = r.federation_id
               WHERE r.state = 'void' AND r.received >= f.minimum"""
    for row in tables.rows(query):
        yield f"round {row.number} of {row.federation_id} is void: {row.reason}"


def _twice(tables: _Tables) -> Iterator[str]:
    """Yield jobs and packages that were published more than once."""
    of_job = "SELECT job_id, count(*) AS n FROM artifacts GROUP BY job_id HAVING count(*) > 1"
    for row in tables.rows(of_job):
        yield f"{row.job_id} has {row.n} artifacts"
    ends: dict[str, int] = {}
    for row in tables.rows("SELECT job_id, data FROM job_events WHERE kind = 'state'"):
        ends[row.job_id] = ends.get(row.job_id, 0) + ("succeeded" in str(row.data))
    yield from (f"{job_id} has succeeded {count} times" for job_id, count in ends.items() if count > 1)
    same = """SELECT tenant_id, digest, count(*) AS n FROM artifacts WHERE kind = 'package'
              GROUP BY tenant_id, digest HAVING count(*) > 1"""
    for row in tables.rows(same):
        yield f"package {row.digest} has {row.n} rows"


def _accepted_twice(accepted: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield keys whose requests were answered with more than one job."""
    for key, ids in accepted.items():
        if len(set(ids)) > 1:
            yield f"{key} was answered with {sorted(set(ids))}"


def _orphans(tables: _Tables, root: Path) -> Iterator[str]:
    """Yield files that belong to no row."""
    named = {row.digest for row in tables.rows("SELECT DISTINCT digest FROM artifact_blobs")}
    for path in _files(root / "sha256"):
        if f"sha256:{path.name}" not in named:
            yield f"blob sha256:{path.name} is of no artifact"
    # If the sender or receiver of an upload died, the upload keeps the state 'coming' for an hour.
    known = {row.id for row in tables.rows("SELECT id FROM uploads WHERE state IN ('coming', 'held')")}
    for path in _files(root / "uploads"):
        if path.relative_to(root).parts[2] not in known:
            yield f"{path.relative_to(root)} is of no upload"
    for path in _files(root / "parts"):
        yield f"{path.relative_to(root)} is of a split job that has ended"


def _damaged(tables: _Tables, root: Path) -> Iterator[str]:
    """Yield rows whose files are missing or damaged."""
    for row in tables.rows("SELECT DISTINCT digest, size_bytes FROM artifact_blobs"):
        yield from _wrong(_path(root, row.digest), row.digest, row.size_bytes)
    logs = """SELECT r.log_digest, r.log_size_bytes, u.tenant_id, u.id FROM runs r
              JOIN uploads u ON u.id = r.log_upload_id WHERE u.state = 'held'"""
    for row in tables.rows(logs):
        path = _path(root / "uploads" / row.tenant_id / row.id, row.log_digest)
        yield from _wrong(path, row.log_digest, row.log_size_bytes)


def _path(root: Path, digest: str) -> Path:
    digits = digest.removeprefix("sha256:")
    return root / "sha256" / digits[:2] / digits


def _wrong(path: Path, digest: str, size_bytes: int) -> Iterator[str]:
    if not path.is_file():
        yield f"{digest} has a row and no bytes"
        return
    data = path.read_bytes()
    if len(data) != size_bytes or f"sha256:{hashlib.sha256(data).hexdigest()}" != digest:
        yield f"{digest} has a row and other bytes"


def _files(folder: Path) -> Iterable[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())

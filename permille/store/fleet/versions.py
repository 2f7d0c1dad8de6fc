"""Results of devices on the versions of releases.

Only the newest run of each device on a version counts, so a device that reports two hundred runs a
day has one vote. The median of a column is the value at its middle rank. For the gain, an index gives
this value without a sort.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.orm import InstrumentedAttribute, Session

from permille.schemas.releases import Band, Outcomes, VersionResults
from permille.schemas.runs import Outcome
from permille.store.fleet.few import coarse, hide, rounded
from permille.store.fleet.statistics import Interval, median_ranks
from permille.store.rows import records_of
from permille.store.tables import Alias, Device, Release, Run

Version = tuple[str | None, int | None]


def results(session: Session, releases: Sequence[Release], *, least: int = 0) -> list[VersionResults]:
    """Return the results of devices on these releases of one tenant.

    Args:
        least: hide counts below this number, and round the others to multiples of it; 0 shows exact counts.
    """
    if not releases:
        return []
    tenant_id = releases[0].tenant_id
    told = hide(_devices_by_version(session, tenant_id), least)
    outcomes = _outcomes(session, tenant_id)
    aliases = _aliases(session, tenant_id)
    return records_of(releases, lambda row: _results(session, row, told, outcomes, aliases, least))


def _results(
    session: Session,
    row: Release,
    told: Mapping[Version, int | None],
    outcomes: Mapping[Version, Counter[str | None]],
    aliases: Mapping[Version, list[str]],
    least: int,
) -> VersionResults:
    key = (row.name, row.version)
    found = outcomes.get(key, Counter[str | None]())
    reported = found.total()
    shown = hide({outcome.value: found[outcome.value] for outcome in Outcome}, least)
    adopted, told_reported = shown[Outcome.ADOPTED], rounded(reported, least)
    improvement = _median(session, row, Run.gain, least)
    # No index sorts runs by the rise or the memory, so only the medians are computed, without intervals.
    memory = _median(session, row, Run.peak_rss_bytes, least, bounds=False)
    rise = _median(session, row, Run.rise, least, bounds=False)
    return VersionResults(
        name=row.name,
        version=row.version,
        aliases=aliases.get(key, []),
        yanked=row.yanked_at is not None,
        published_at=row.created_at,
        devices=told.get(key, rounded(0, least)),
        reported=told_reported,
        outcomes=Outcomes(**shown),
        adopted_fraction=None if adopted is None or not told_reported else adopted / told_reported,
        improvement=None if improvement is None else _band(improvement, least),
        general_rise=None if rise is None else coarse(rise.value, least),
        peak_rss_bytes=None if memory is None else int(coarse(memory.value, least)),
    )


def _band(found: Interval, least: int) -> Band:
    median, low, high = (
        one if one is None else coarse(one, least) for one in (found.value, found.low, found.high)
    )
    return Band(median=median or 0.0, low=low, high=high)


def of_version(row: Release) -> tuple[ColumnElement[bool] | InstrumentedAttribute[bool], ...]:
    """Return the conditions for the newest runs of all devices on a version."""
    return Run.newest, Run.tenant_id == row.tenant_id, Run.release == row.name, Run.version == row.version


def _median(
    session: Session, row: Release, column: InstrumentedAttribute[Any], least: int, *, bounds: bool = True
) -> Interval | None:
    """Return the median of a column over the newest runs on a version, with or without its bounds.

    Return None for fewer than `least` runs: the median of few devices would reveal the value of one of them.
    """
    known = (*of_version(row), column.is_not(None))
    n = session.scalar(select(func.count()).where(*known)) or 0
    if n < max(least, 1):
        return None
    values = select(column).where(*known).order_by(column).limit(1)
    middle, low, high = (
        session.scalar(values.offset(rank)) if 0 <= rank < n else None
        for rank in (median_ranks(n) if bounds else (n // 2, -1, n))
    )
    return Interval(float(middle or 0), low, high)


def _devices_by_version(session: Session, tenant_id: str) -> dict[Version, int]:
    """Count the active devices by the version that they were last told."""
    query = (
        select(Device.release, Device.version, func.count())
        .where(*active(tenant_id), Device.version.is_not(None))
        .group_by(Device.release, Device.version)
    )
    return {(name, version): count for name, version, count in session.execute(query)}


def active(tenant_id: str) -> tuple[ColumnElement[bool] | InstrumentedAttribute[bool], ...]:
    """Return the conditions for a tenant's devices that are neither revoked nor unenrolled."""
    return Device.tenant_id == tenant_id, Device.revoked_at.is_(None), Device.unenrolled_at.is_(None)


def followers(session: Session, tenant_id: str, release: str, alias: str) -> int:
    """Count the active devices that follow an alias."""
    following = (Device.release == release, Device.alias == alias)
    return session.scalar(select(func.count()).where(*active(tenant_id), *following)) or 0


def _outcomes(session: Session, tenant_id: str) -> dict[Version, Counter[str | None]]:
    """Count the devices by version and by the outcome of their newest run."""
    query = (
        select(Run.release, Run.version, Run.outcome, func.count())
        .where(Run.tenant_id == tenant_id, Run.newest, Run.release.is_not(None))
        .group_by(Run.release, Run.version, Run.outcome)
    )
    found: dict[Version, Counter[str | None]] = {}
    for name, version, outcome, count in session.execute(query):
        found.setdefault((name, version), Counter())[outcome] += count
    return found


def _aliases(session: Session, tenant_id: str) -> dict[Version, list[str]]:
    query = select(Alias.name, Alias.version, Alias.alias).where(Alias.tenant_id == tenant_id)
    found: dict[Version, list[str]] = {}
    for name, version, alias in session.execute(query.order_by(Alias.alias)):
        found.setdefault((name, version), []).append(alias)
    return found

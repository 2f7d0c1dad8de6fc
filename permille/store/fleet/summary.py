"""A tenant's whole fleet in numbers, for the API, the web page and the command line."""

from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Final

from sqlalchemy import BigInteger, ColumnElement, and_, case, func, or_, select, type_coerce
from sqlalchemy.orm import Session

from permille.schemas.devices import Fleet, Group, RunsOfDay
from permille.schemas.runs import Outcome
from permille.store.database import now
from permille.store.fleet.few import hide, rounded
from permille.store.fleet.versions import active, results
from permille.store.tables import Alias, Device, Release, Run

DAYS: Final = 30
MOST_VERSIONS: Final = 50
_SEEN: Final = (("within a day", 1), ("within a week", 7), ("within 30 days", 30))
_OTHERS: Final = "others"
_DAY_US: Final = 86_400_000_000


def summary(session: Session, *, tenant_id: str, least: int = 0) -> Fleet:
    """Count a tenant's active devices.

    Args:
        least: hide counts below this number, and round the others to multiples of it; 0 shows exact counts.
    """
    at = now(session)
    seen, agents, engines = _count_devices(session, tenant_id, at)
    return Fleet(
        devices=rounded(seen.total(), least),
        seen=_groups(seen, least),
        agents=_groups(agents, least),
        engines=_groups(engines, least),
        versions=[
            one
            for one in results(session, _known_releases(session, tenant_id), least=least)
            # A version that only few devices have is not named.
            if not least or one.aliases or one.devices or one.reported
        ],
        # All runs of a day may come from one device, so the days are left out where counts are hidden.
        days=[] if least else _days(session, tenant_id, at),
    )


def _known_releases(session: Session, tenant_id: str) -> list[Release]:
    """Return the versions that devices have or have reported, or at which an alias points, newest first.

    Yanked versions are included. If there are too many, versions without devices are dropped first.
    """
    had = select(Device.release, Device.version).where(*active(tenant_id)).distinct().subquery()
    this = and_(had.c.release == Release.name, had.c.version == Release.version)
    reported = select(Run.run_id).where(
        Run.newest,
        Run.tenant_id == Release.tenant_id,
        Run.release == Release.name,
        Run.version == Release.version,
    )
    aliased = select(Alias.alias).where(
        Alias.tenant_id == Release.tenant_id, Alias.name == Release.name, Alias.version == Release.version
    )
    query = (
        select(Release)
        .outerjoin(had, this)
        .where(
            Release.tenant_id == tenant_id,
            or_(had.c.version.is_not(None), reported.exists(), aliased.exists()),
        )
        .order_by(had.c.version.is_(None), Release.id.desc())
        .limit(MOST_VERSIONS)
    )
    return sorted(session.scalars(query), key=lambda row: row.id, reverse=True)


def _count_devices(session: Session, tenant_id: str, at: datetime) -> list[Counter[str]]:
    """Count devices by the time when they were last seen, by agent version and by engine, in one query."""
    names = (
        _seen(at),
        func.coalesce(Device.agent_version, "unknown"),
        func.coalesce(Device.engine, "no run yet"),
    )
    found = [Counter[str]() for _ in names]
    columns = [name.label(str(number)) for number, name in enumerate(names)]
    for *keys, count in session.execute(
        select(*columns, func.count()).where(*active(tenant_id)).group_by(*columns)
    ):
        for counts, key in zip(found, keys, strict=True):
            counts[key] += count
    return found


def _groups(counts: Counter[str], least: int) -> list[Group]:
    """Return the groups of devices, largest first.

    All hidden groups appear under one name, without a count. Where counts are hidden, this name always
    appears.
    """
    told = [(key, count) for key, count in hide(counts, least).items() if count is not None]
    told.sort(key=lambda group: (-group[1], group[0]))  # by the rounded count, so the order reveals nothing
    groups = [Group(name=key, devices=count) for key, count in told]
    return [*groups, Group(name=_OTHERS, devices=None)] if least else groups


def _seen(at: datetime) -> ColumnElement[str]:
    within = [(Device.last_seen_at > at - timedelta(days=days), words) for words, days in _SEEN]
    return case(*within, (Device.last_seen_at.is_(None), "never"), else_="longer ago")


def _days(session: Session, tenant_id: str, at: datetime) -> list[RunsOfDay]:
    """Count the runs of the last 30 days by the day on which they ended."""
    first = at.date() - timedelta(days=DAYS - 1)
    begin = datetime(first.year, first.month, first.day, tzinfo=UTC)
    # Integer division is the same in SQLite and PostgreSQL, but their date functions differ.
    day = type_coerce(Run.ended_at, BigInteger) // _DAY_US
    adopted = func.sum(case((Run.outcome == Outcome.ADOPTED.value, 1), else_=0))
    query = (
        select(day, func.count(), adopted)
        .where(Run.tenant_id == tenant_id, Run.ended_at >= begin, Run.outcome.is_not(None))
        .group_by(day)
    )
    epoch = datetime(1970, 1, 1, tzinfo=UTC).date()
    found = {
        epoch + timedelta(days=int(number)): (runs, taken) for number, runs, taken in session.execute(query)
    }
    days = [first + timedelta(days=i) for i in range(DAYS)]
    return [
        RunsOfDay(day=one, runs=found.get(one, (0, 0))[0], adopted=found.get(one, (0, 0))[1]) for one in days
    ]

"""Compare two versions of a release: do devices get worse results with the newer one?

The comparison covers all devices of both versions. For the loss, it compares each device with
itself, since the texts of users differ more than versions do. Each measure has 95 % confidence, so
among many comparisons of equal versions some will show a significant difference.
"""

from collections.abc import Sequence
from typing import Final

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from permille.schemas.releases import Change, Comparison, Measure, Verdict, VersionResults
from permille.store import releases
from permille.store.errors import ConflictError, NotFoundError
from permille.store.fleet.few import LEAST
from permille.store.fleet.statistics import (
    Interval,
    median_difference,
    median_of,
    share,
    share_difference,
)
from permille.store.fleet.versions import of_version, results
from permille.store.tables import Release, Run

_MORE_IS_BETTER: Final = frozenset({Measure.ADOPTED, Measure.IMPROVEMENT})


def compare(
    session: Session,
    *,
    tenant_id: str,
    name: str,
    version: int | None = None,
    against: int | None = None,
    counted: Sequence[VersionResults] = (),
) -> Comparison:
    """Compare a version with another one.

    Args:
        version: the version to judge. The default is the newest one.
        against: the version to compare with. The default is the highest lower version that was not
            yanked.
        counted: results that the caller already has from `versions.results` with `least` 0.

    Raises:
        NotFoundError: there is no such version, or no version to compare with.
        ConflictError: the row of a version, or the report of a device on it, is damaged.
    """
    version = version or releases.latest_version(session, tenant_id=tenant_id, name=name)
    row = releases.get(session, tenant_id=tenant_id, name=name, version=version)
    before = _before(session, row) if against is None else against
    if before is None:
        raise NotFoundError(f"There is no version of {name!r} before {version} that was not yanked.")
    other = releases.get(session, tenant_id=tenant_id, name=name, version=before)
    found = {one.version: one for one in counted}
    missing = [one for one in (row, other) if one.version not in found]
    found |= {one.version: one for one in results(session, missing)}
    for one in (row, other):
        if one.version not in found:
            raise ConflictError(
                f"Version {one.version} of {name!r} cannot be compared, because its row or the report of a "
                "device is damaged. See the service's log. Compare other versions."
            )
    after_results, before_results = found[row.version], found[other.version]
    both, loss = _losses(session, row, other)
    changes = [
        *_shares(after_results, before_results),
        *_improvements(after_results, before_results),
        *loss,
    ]
    return Comparison(
        version=after_results,
        against=before_results,
        both=both,
        verdict=_verdict(after_results, before_results, changes),
        changes=changes,
    )


def _before(session: Session, row: Release) -> int | None:
    query = select(func.max(Release.version)).where(
        Release.tenant_id == row.tenant_id,
        Release.name == row.name,
        Release.version < row.version,
        Release.yanked_at.is_(None),
    )
    return session.scalar(query)


def _shares(after: VersionResults, before: VersionResults) -> list[Change]:
    n, m = after.reported or 0, before.reported or 0
    # Without reports, there is no share to compare.
    if min(n, m) == 0:
        return []
    counts = (
        (Measure.ADOPTED, after.outcomes.adopted, before.outcomes.adopted),
        (Measure.FAILED, after.outcomes.failed, before.outcomes.failed),
    )
    changes = []
    for measure, new_count, old_count in counts:
        new, old = share(new_count or 0, n), share(old_count or 0, m)
        changes.append(_change(measure, new, old, share_difference(new, old)))
    return changes


def _improvements(after: VersionResults, before: VersionResults) -> list[Change]:
    if after.improvement is None or before.improvement is None:
        return []
    new, old = (Interval(one.median, one.low, one.high) for one in (after.improvement, before.improvement))
    return [_change(Measure.IMPROVEMENT, new, old, median_difference(new, old))]


def _losses(session: Session, row: Release, other: Release) -> tuple[int, list[Change]]:
    """Return the number of devices that reported both versions, and the change of their loss."""
    after, before = (_loss_by_device(session, one) for one in (row, other))
    both = [(new, before[device_id]) for device_id, new in after.items() if device_id in before]
    # SQLite would also return a text that a person wrote there.
    pairs = [(new, old) for new, old in both if isinstance(new, float) and isinstance(old, float)]
    if not pairs:
        return len(both), []
    later, earlier = (median_of(losses) for losses in zip(*pairs, strict=True))
    difference = median_of([new - old for new, old in pairs])
    return len(both), [_change(Measure.LOSS, later, earlier, difference)]


def _loss_by_device(session: Session, row: Release) -> dict[str, float | None]:
    """Return the loss of each device on a version."""
    # The caller joins two such results in Python. For a join by device, databases choose the index of
    # versions and then need minutes.
    query = select(Run.device_id, Run.loss).where(*of_version(row))
    return dict(session.connection().execute(query).all())


def _change(measure: Measure, after: Interval, before: Interval, difference: Interval) -> Change:
    verdict = Verdict.UNSURE
    if difference.low is None or difference.high is None:
        verdict = Verdict.TOO_FEW
    elif difference.low > 0 or difference.high < 0:
        grows = difference.low > 0
        verdict = Verdict.BETTER if grows == (measure in _MORE_IS_BETTER) else Verdict.WORSE
    return Change(
        measure=measure,
        before=before.value,
        after=after.value,
        difference=difference.value,
        low=difference.low,
        high=difference.high,
        verdict=verdict,
    )


def _verdict(after: VersionResults, before: VersionResults, changes: list[Change]) -> Verdict:
    # A verdict from a few devices would be chance, and might reveal one of them.
    if min(after.reported or 0, before.reported or 0) < LEAST:
        return Verdict.TOO_FEW
    found = {change.verdict for change in changes}
    return next((one for one in (Verdict.WORSE, Verdict.BETTER) if one in found), Verdict.UNSURE)

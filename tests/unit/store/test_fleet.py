"""Tests of counts over many devices: one vote per device, correct ranks, and no counts of few devices."""

import math
import random
from datetime import UTC, datetime
from pathlib import Path

import pytest
from sqlalchemy import select

from permille.schemas.devices import Fleet
from permille.schemas.jobs import JobKind
from permille.schemas.releases import Comparison, Verdict
from permille.store import artifacts, releases
from permille.store.database import Database
from permille.store.fleet.comparison import compare
from permille.store.fleet.few import LEAST, hide
from permille.store.fleet.statistics import median_of, share, share_difference
from permille.store.fleet.summary import MOST_VERSIONS, summary
from permille.store.ids import Prefix, new_id
from permille.store.tables import Device
from tests.artifacts import add_package
from tests.fleet_site import RELEASE, VERSIONS, add_fleet, publish_versions
from tests.packages import tiny_package


@pytest.fixture
def stocked(db: Database, tenant_id: str, tmp_path: Path) -> str:
    """Return a tenant with 300 devices and their 2,000 runs on four versions."""
    package = tiny_package(tmp_path / "blobs")
    with db.write() as session:
        add_package(session, tenant_id=tenant_id, manifest=package.manifest)
        publish_versions(session, tenant_id=tenant_id, digest=package.digest)
        add_fleet(session, tenant_id=tenant_id, devices=300, runs=2000)
    return tenant_id


def compared(
    db: Database, tenant_id: str, *, version: int | None = None, against: int | None = None
) -> Comparison:
    with db.read() as session:
        return compare(session, tenant_id=tenant_id, name=RELEASE, version=version, against=against)


def test_a_version_that_makes_devices_worse_is_found_and_a_better_one_too(db: Database, stocked: str) -> None:
    worse = compared(db, stocked)
    assert (worse.version.version, worse.against.version) == (VERSIONS, VERSIONS - 1)
    assert worse.verdict is Verdict.WORSE
    assert {change.measure for change in worse.changes} == {"adopted", "failed", "improvement", "loss"}
    assert worse.both > 200
    assert compared(db, stocked, version=3, against=4).verdict is Verdict.BETTER
    assert compared(db, stocked, version=3, against=3).verdict is Verdict.UNSURE


def test_each_device_counts_once_a_version(db: Database, stocked: str) -> None:
    with db.read() as session:
        fleet = summary(session, tenant_id=stocked)
    assert fleet.devices == sum(group.devices or 0 for group in fleet.engines) == 300
    assert sum(one.devices or 0 for one in fleet.versions) == 300
    for one in fleet.versions:
        assert one.reported is not None
        assert sum(one.outcomes.model_dump().values()) == one.reported <= 300
        assert one.improvement is not None
        assert one.improvement.low is not None
        assert one.improvement.low < one.improvement.median
    assert sum(day.runs for day in fleet.days) in range(1900, 2001)  # the oldest runs are thirty days old


def test_who_may_not_see_each_device_learns_nothing_of_fewer_than_ten(db: Database, stocked: str) -> None:
    with db.read() as session:
        told = summary(session, tenant_id=stocked, least=301)
        empty = summary(session, tenant_id="tenant_of_nobody", least=LEAST)
    assert told.devices is None
    assert not told.days
    groups = (*told.seen, *told.agents, *told.engines)
    assert {(group.name, group.devices) for group in groups} == {("others", None)}, "names tell, too"
    for one in told.versions:
        assert (one.improvement, one.peak_rss_bytes, one.adopted_fraction, one.reported) == (None,) * 4
        assert set(one.outcomes.model_dump().values()) == {None}
    assert empty.devices is None


def test_two_looks_of_a_watcher_do_not_tell_what_one_device_did(db: Database, stocked: str) -> None:
    def look() -> Fleet:
        with db.read() as session:
            return summary(session, tenant_id=stocked, least=LEAST)

    before = look()
    with db.write() as session:
        device = session.scalars(select(Device).where(Device.tenant_id == stocked)).first()
        assert device is not None
        device.revoked_at = datetime(2026, 5, 4, tzinfo=UTC)
    assert (before.devices, look().devices) == (300, 300)
    for groups in (before.seen, before.agents, before.engines):
        order = [(group.devices is None, -(group.devices or 0), group.name) for group in groups]
        assert order == sorted(order), "by what is told"
    for one in before.versions:
        counts = (one.devices, one.reported, *one.outcomes.model_dump().values())
        assert all(count is None or count % LEAST == 0 for count in counts)
        assert one.improvement is not None
        assert one.improvement.median == float(f"{one.improvement.median:.2g}")


def test_a_yanked_version_is_shown_as_long_as_devices_have_it(db: Database, stocked: str) -> None:
    """It is shown even after many later versions. A version without devices and reports is not shown."""
    with db.write() as session:
        old = releases.yank(session, tenant_id=stocked, name=RELEASE, version=3, reason="bad")
        package = artifacts.get(session, tenant_id=stocked, kind=JobKind.PACKAGE, key=old.package_digest)
        last = VERSIONS + MOST_VERSIONS
        for version in range(VERSIONS + 1, last + 1):
            releases.publish(session, name=RELEASE, package=package)
            releases.set_alias(session, tenant_id=stocked, name=RELEASE, alias=f"a{version}", version=version)
        releases.publish(session, name=RELEASE, package=package)
        shown = {one.version: one for one in summary(session, tenant_id=stocked).versions}
    assert list(shown) == [*range(last, last - MOST_VERSIONS + 3, -1), 4, 3, 2]
    assert shown[3].yanked
    assert shown[3].devices
    assert shown[3].reported


@pytest.mark.parametrize("seed", range(20))
def test_hidden_groups_cannot_be_had_by_a_difference(seed: int) -> None:
    rng = random.Random(seed)
    counts = {i: rng.choice((0, 1, 3, 9, 10, 50, 400)) for i in range(rng.randint(1, 6))}
    shown = hide(counts, LEAST)
    hidden = [counts[key] for key, count in shown.items() if count is None]
    assert all(count is None or abs(count - counts[key]) <= LEAST // 2 for key, count in shown.items())
    assert all(count % LEAST == 0 for count in shown.values() if count)
    assert all(count >= LEAST for count in shown.values() if count is not None)
    assert sum(hidden) >= LEAST or not any(shown.values())


@pytest.mark.attack(22, "a change from nobody to one device, in every count of disjoint groups")
@pytest.mark.parametrize("seed", range(20))
def test_few_devices_look_like_none(seed: int) -> None:
    rng = random.Random(seed)
    large = {i: rng.choice((10, 12, 50, 400)) for i in range(rng.randint(1, 4))}
    few = {f"few {i}": 0 for i in range(rng.randint(1, 3))}
    views = [hide(large | few, LEAST)]
    for count in (1, 5, 9):
        views.append(hide(large | few | {"few 0": count}, LEAST))
    assert all(view == views[0] for view in views)


@pytest.mark.attack(22, "a watcher looks before and after the first device of a kind comes")
def test_a_watcher_does_not_see_the_first_device_of_a_kind(db: Database, stocked: str) -> None:
    def look() -> Fleet:
        with db.read() as session:
            return summary(session, tenant_id=stocked, least=LEAST)

    with db.write() as session:
        package = artifacts.get(
            session,
            tenant_id=stocked,
            kind=JobKind.PACKAGE,
            key=releases.get(session, tenant_id=stocked, name=RELEASE, version=1).package_digest,
        )
        new = releases.publish(session, name=RELEASE, package=package).version
    before = look()
    assert new not in {one.version for one in before.versions}
    with db.write() as session:
        other = {"agent_version": "9.9.9", "engine": "executorch", "version": new}
        session.add(
            Device(
                id=new_id(Prefix.DEVICE),
                tenant_id=stocked,
                public_key="k",
                name="n",
                release=RELEASE,
                alias="stable",
                created_at=datetime(2026, 5, 4, tzinfo=UTC),
                **other,
            )
        )
    assert look() == before


def test_the_interval_of_a_median_holds_it_as_often_as_it_says() -> None:
    rng = random.Random(0)
    for n in (10, 41, 300):
        held = 0
        for _ in range(2000):
            interval = median_of([rng.gauss(0, 1) for _ in range(n)])
            assert interval.low is not None
            assert interval.high is not None
            held += interval.low <= 0 <= interval.high
        assert held / 2000 > 0.94, n
    assert median_of([1.0, 2.0]).low is None


def test_shares_and_their_difference_are_wilsons_and_newcombes() -> None:
    # Expected values: Newcombe (1998), table II (a), 56/70 - 48/80, method 10.
    found = share_difference(share(56, 70), share(48, 80))
    assert found.low is not None
    assert found.high is not None
    assert math.isclose(found.low, 0.0524, abs_tol=5e-5)
    assert math.isclose(found.high, 0.3339, abs_tol=5e-5)

"""Pages of the fleet, and of releases and their comparisons."""

from dataclasses import dataclass

from fastapi import APIRouter, Response

from permille.schemas.releases import Band, VersionResults
from permille.store import releases
from permille.store.errors import NotFoundError
from permille.store.fleet.comparison import compare
from permille.store.fleet.summary import summary
from permille.store.fleet.versions import results
from permille_console.rendering import PageRoute, ViewerPage, WatcherPage
from permille_service.fleet.routes import least_for
from permille_service.parameters import OtherVersion, Paging, ReleaseName

router = APIRouter(prefix="/ui", include_in_schema=False, route_class=PageRoute)
BAND_WIDTH = 140


@dataclass(frozen=True, slots=True, kw_only=True)
class BandLine:
    """Positions for drawing a band, that is, the confidence interval of the improvement.

    All bands of a table have the same scale, and the drawing is `BAND_WIDTH` wide. `zero` is the position at
    which there is no improvement.
    """

    low: float
    high: float
    median: float
    zero: float


@router.get("/fleet")
def show_fleet(page: WatcherPage) -> Response:
    """Show the counts of all devices."""
    with page.service.database.read() as session:
        fleet = summary(session, tenant_id=page.tenant_id, least=least_for(page.operator))
    days = {
        "x": [day.day.isoformat() for day in fleet.days],
        "series": [
            {"label": "runs", "values": [day.runs for day in fleet.days]},
            {"label": "adopted", "values": [day.adopted for day in fleet.days]},
        ],
    }
    return page.render("fleet", fleet=fleet, days=days, bands=band_lines(fleet.versions))


@router.get("/releases")
def show_releases(page: ViewerPage, window: Paging) -> Response:
    """Show all versions of all releases, newest first."""
    with page.service.database.read() as session:
        found = releases.list_releases(session, tenant_id=page.tenant_id, window=window)
        versions = results(session, found.items)
    return page.render(
        "releases", versions=versions, bands=band_lines(versions), next_cursor=found.next_cursor
    )


@router.get("/releases/{name}")
def show_release(
    name: ReleaseName, page: ViewerPage, version: OtherVersion = None, against: OtherVersion = None
) -> Response:
    """Show the versions of one release, and a comparison of two of them."""
    with page.service.database.read() as session:
        found = releases.list_releases(session, tenant_id=page.tenant_id, name=name)
        if not found.items:
            raise NotFoundError(f"no release {name!r}")
        versions = results(session, found.items)
        try:
            comparison = compare(
                session,
                tenant_id=page.tenant_id,
                name=name,
                version=version,
                against=against,
                counted=versions,
            )
        except NotFoundError:
            # The first version has no earlier one to compare with. But versions in the URL must exist.
            if against is not None or version not in (None, *(one.version for one in versions)):
                raise
            comparison = None
    withdrawn = {row.package_digest for row in found.items if row.yanked_at is not None}
    return page.render(
        "release",
        name=name,
        versions=versions,
        bands=band_lines(versions),
        comparison=comparison,
        version=version,
        digests={
            row.version: row.package_digest for row in found.items if row.package_digest not in withdrawn
        },
    )


def band_lines(versions: list[VersionResults]) -> dict[tuple[str, int], BandLine]:
    """Return the positions of the bands of a table's versions. Their common scale includes 0."""
    bands = {(one.name, one.version): one.improvement for one in versions if one.improvement is not None}
    ends = [0.0, *(end for band in bands.values() for end in _ends(band))]
    low, high = min(ends), max(ends)
    scale = (BAND_WIDTH - 8) / (high - low or 1.0)

    def x_of(value: float) -> float:
        return round(4 + (value - low) * scale, 1)

    return {
        key: BandLine(
            low=x_of(_ends(band)[0]), high=x_of(_ends(band)[1]), median=x_of(band.median), zero=x_of(0.0)
        )
        for key, band in bands.items()
    }


def _ends(band: Band) -> tuple[float, float]:
    return (
        band.median if band.low is None else band.low,
        band.median if band.high is None else band.high,
    )

"""A worker's database role can close rounds."""

from tests.attacks.test_worker_role import Place, place, server, sweep
from tests.one_job import run_one
from tests.rounds.site import make_site

__all__ = ["place", "server"]


def test_rounds_advance(place: Place) -> None:
    api = place.api
    site = make_site(api, members=3, name="roled")
    for member in site.members:
        assert site.take_part(member).status_code == 202
    sweep(place, 3601)
    while run_one(place.worker):
        sweep(place)
    assert site.round(0)["state"] == "published"

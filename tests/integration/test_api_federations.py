"""Federations over the API: defined, joined, and moved on round by round to what anyone can replay."""

from permille.federation.rounds import History, decode_segment
from tests.api_service import Api
from tests.federations import make_site
from tests.unit.zo import reference


def test_three_devices_move_a_federation_on(api: Api) -> None:
    site = make_site(api, members=3)
    for number in range(3):
        answers = [site.take_part(member, seed=number) for member in site.members]
        assert [answer.status_code for answer in answers] == [202, 202, 202]
        assert site.round(number)["state"] == "closing"
        assert site.work() == 1
        found = site.round(number)
        assert (found["state"], found["invited"], found["received"], found["counted"]) == (
            "published",
            3,
            3,
            3,
        )
    federation = site.read()
    assert (federation["number"], federation["members"], federation["state"]) == (3, 3, "running")
    for member in site.members:
        site.catch_up(member)
        assert (member.history.chain, member.history.digest) == (
            federation["chain"],
            federation["state_digest"],
        )
    records = b"".join(api.get(f"{site.path}/rounds/{number}/record").content for number in range(3))
    auditor = History.begin(site.definition)
    auditor.apply(decode_segment(records, site.definition, max_bytes=10_000))
    assert auditor.chain == federation["chain"]
    chain, s = reference.audit(site.definition.to_bytes(), records)
    assert (chain, s) == (federation["chain"], auditor.s_W.tolist())

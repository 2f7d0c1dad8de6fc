"""The pages of federations."""

from tests.api_service import Api
from tests.console.test_access import browser
from tests.console.test_page_actions import signed_in
from tests.rounds.site import make_site


def test_the_pages_show_a_federation_and_its_rounds(api: Api) -> None:
    client = signed_in(api)
    assert "No federations yet" in client.get("/ui/federations").text
    site = make_site(api, members=3)
    for member in site.members:
        assert site.take_part(member).status_code == 202
    site.work()
    listed = client.get("/ui/federations", headers={"HX-Request": "true"})
    assert listed.status_code == 200
    assert f'<a href="/ui/federations/{site.id}">readers</a>' in listed.text
    shown = client.get(f"/ui/federations/{site.id}").text
    assert "<dt>Members</dt><dd>3</dd>" in shown
    assert shown.count("<tr>") == 3  # the head of the table, and two rounds
    assert 'href="/ui/federations"' in client.get("/ui/jobs").text


def test_nobody_sees_federations_without_a_token(api: Api) -> None:
    answer = browser(api).get("/ui/federations")
    assert (answer.status_code, answer.headers["location"][:11]) == (303, "/ui/sign-in")

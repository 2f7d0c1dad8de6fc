"""Federations over the API: defined, joined, and run round by round. Anyone can replay the result."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from sqlalchemy import text

from permille.schemas.access import Role
from permille.schemas.problems import ProblemType
from permille.store.tables import FederationCheckpoint
from permille.trust.repository import Repository
from permille.trust.roles import federation_path
from permille_rounds import contribution
from permille_rounds.catch_up import caught_up
from permille_rounds.definition import Definition, encode_key
from permille_rounds.rounds import History, decode_segment
from permille_rounds.schemas import CONTRIBUTION_EXAMPLES, CONTRIBUTION_MEDIA_TYPE
from permille_service.cli.main import main
from permille_service.trust import repositories
from tests.api_service import Api, running_api
from tests.packages import LENGTHS
from tests.rounds.site import SMALL, Site, make_site, request_of
from tests.unit.zo import reference


def slug(answer: Any) -> str:
    found: str = answer.json()["type"]
    return found.rpartition("/")[2]


def one_round(site: Site, seed: int = 0) -> None:
    """Let all members take part in the open round, and close it."""
    for member in site.members:
        site.take_part(member, seed=seed)
    site.work()


def records_of(site: Site) -> bytes:
    number = site.read()["number"]
    return b"".join(site.api.get(f"{site.path}/rounds/{n}/record").content for n in range(number))


def test_three_devices_move_a_federation_on(api: Api) -> None:
    site = make_site(api, members=3)
    for number in range(3):
        answers = [site.take_part(member, seed=number) for member in site.members]
        assert [answer.status_code for answer in answers] == [202, 202, 202]
        assert site.round(number)["state"] == "closing"
        assert site.work() == 1
        found = site.round(number)
        assert found["state"] == "published"
        assert (found["invited"], found["received"], found["counted"]) == (3, 3, 3)
    federation = site.read()
    assert (federation["number"], federation["members"], federation["state"]) == (3, 3, "running")
    for member in site.members:
        site.catch_up(member)
        assert member.history.chain == federation["chain"]
        assert member.history.digest == federation["state_digest"]
    records = records_of(site)
    chain, s = reference.audit(site.definition.to_bytes(), records)
    assert chain == federation["chain"]
    assert s == member.history.s_W.tolist()


def test_a_damaged_round_or_federation_does_not_hide_the_others(api: Api) -> None:
    site = make_site(api, members=3)
    for seed in range(2):
        one_round(site, seed)
    with api.service.database.write() as session:
        session.execute(text("UPDATE rounds SET state = 'foo' WHERE number = 0"))
    assert [one["number"] for one in api.get(f"{site.path}/rounds").json()["items"]] == [2, 1]
    with api.service.database.write() as session:
        session.execute(text("UPDATE federations SET target = 'foo', state = 'foo'"))
    assert api.get("/v1/device/federations", site.members[0].secret).json() == []
    assert api.get("/v1/federations").json()["items"] == []


def test_a_definition_is_made_of_the_package_and_listed_when_started(api: Api) -> None:
    package = api.package()
    api.publish(package)
    site = make_site(api, start=False, estimator="spsa", steps=2, rounds=5)
    log = site.definition.log
    assert (log.package_digest, log.mask_digest) == (package.digest, package.mask_digest)
    assert (log.queries, log.total_steps, log.seed) == (4, 10, 0)
    listed = api.get("/v1/trust/metadata/timestamp.json")
    assert site.api.post(f"{site.path}/start").status_code == 200
    assert api.get("/v1/trust/metadata/timestamp.json").content != listed.content
    repository = repository_of(api)
    target = repository.target(federation_path(site.definition.digest))
    assert target is not None
    assert target.hashes["sha256"] == site.definition.digest.removeprefix("sha256:")
    assert api.post(f"{site.path}/finish").json()["state"] == "finished"
    assert repository_of(api).target(federation_path(site.definition.digest)) is None


def repository_of(api: Api) -> Repository:
    return repositories.read(api.service, api.tenant_id)


def test_a_teams_key_that_is_elsewhere_lists_a_federation_there(api: Api, tmp_path: Path) -> None:
    site = make_site(api, start=False)
    assert main(["trust", "key", str(tmp_path / "team.pem"), "--json"]) == 0
    key = load_pem_private_key((tmp_path / "team.pem").read_bytes(), password=None)
    assert isinstance(key, Ed25519PrivateKey)
    role = {"role": "releases", "public_keys": [encode_key(key.public_key())]}
    for draft in api.post("/v1/trust/rotations", {"roles": [role]}).json()["drafts"]:
        sign_and_send(api, tmp_path, draft)
    answer = api.post(f"{site.path}/start")
    assert (answer.status_code, slug(answer)) == (409, "conflict")
    assert site.read()["state"] == "draft"
    definition = tmp_path / "readers.json"
    definition.write_bytes(api.get(f"{site.path}/definition").content)
    [draft] = api.post("/v1/trust/renewals", {"roles": ["releases"]}).json()["drafts"]
    sign_and_send(api, tmp_path, draft, "--federation", str(definition))
    assert api.post(f"{site.path}/start").json()["state"] == "running"
    # A federation can be finished whether or not it is listed.
    assert api.post(f"{site.path}/finish").json()["state"] == "finished"


def sign_and_send(api: Api, folder: Path, draft: dict[str, str], *change: str) -> None:
    """Sign a draft outside of the service, and send it."""
    version = json.loads(draft["metadata"])["signed"]["version"]
    file = folder / f"{version}.{draft['role']}.json"
    file.write_text(draft["metadata"])
    assert main(["trust", "sign", str(file), "--key", str(folder / "team.pem"), *change]) == 0
    headers = api.auth() | {"Content-Type": "application/json"}
    answer = api.client.put(f"/v1/trust/metadata/{file.name}", content=file.read_bytes(), headers=headers)
    assert answer.status_code == 200, answer.text


def test_the_gradient_needs_no_rate(api: Api) -> None:
    site = make_site(api, start=False, method="gradient", learning_rate=None, epsilon=None)
    assert site.definition.log.learning_rate > 0


def test_zeroth_order_takes_the_lengths_of_the_package(api: Api) -> None:
    log = make_site(api, start=False, learning_rate=None, epsilon=None).definition.log
    assert log.epsilon * log.k**0.5 == pytest.approx(LENGTHS.perturbation)
    assert log.learning_rate * (log.k / log.queries) ** 0.5 == pytest.approx(LENGTHS.step)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"minimum": 4}, ProblemType.CONFLICT),
        ({"steps": 60_000, "queries": 4, "rounds": 1}, ProblemType.CONFLICT),
        ({"rule": "trimmed"}, ProblemType.CONFLICT),
        ({"queries": 1}, ProblemType.CONFLICT),
        ({"learning_rate": 1e9}, ProblemType.INVALID),
        ({"estimator": "split", "queries": 4}, ProblemType.CONFLICT),
        ({"release": "nobodys"}, ProblemType.NOT_FOUND),
        ({"version": 9}, ProblemType.NOT_FOUND),
        ({"name": "readers"}, ProblemType.CONFLICT),
    ],
)
def test_what_cannot_work_is_refused(api: Api, changes: dict[str, Any], problem: ProblemType) -> None:
    make_site(api, start=False)
    answer = api.post("/v1/federations", request_of(SMALL | {"name": "other"} | changes))
    assert (answer.status_code, slug(answer)) == (problem.status, problem.value), answer.text
    assert len(list(api.service.settings.keys_dir.rglob("rounds/*/*.key"))) == 1, "it left no key"


@pytest.mark.attack(13, "an operator defines a federation whose sums expose single devices, by mistake")
def test_sums_over_few_devices_need_a_flag_of_their_own(api: Api) -> None:
    api.publish(api.package())
    asked = SMALL | {"target": 20, "few_devices": False}
    for minimum in (1, 2, 9):
        answer = api.post("/v1/federations", request_of(asked | {"minimum": minimum}))
        assert (answer.status_code, slug(answer)) == (409, "conflict")
        assert "--few-devices" in answer.json()["detail"]
    assert api.post("/v1/federations", request_of(asked | {"minimum": 10})).status_code == 201
    few = asked | {"name": "few", "minimum": 9, "few_devices": True}
    assert api.post("/v1/federations", request_of(few)).status_code == 201


def test_a_yanked_release_gets_no_federation(api: Api) -> None:
    api.publish(api.package())
    api.post("/v1/releases/tiny/versions/1/yank", {"reason": "wrong"})
    assert api.post("/v1/federations", request_of(SMALL)).status_code == 409


def test_creation_with_a_key_makes_one_federation(api: Api) -> None:
    api.publish(api.package())
    first, second = (api.post("/v1/federations", request_of(SMALL), key="once") for _ in range(2))
    assert (first.status_code, first.json()) == (201, second.json())
    assert len(api.get("/v1/federations").json()["items"]) == 1


def test_every_answer_to_a_contribution(api: Api) -> None:
    site = make_site(api, members=3)
    member, other, third = site.members
    invitation = site.invite(member).json()
    good = site.contribution(member, invitation)
    stranger = api.device()

    def answered(data: bytes, number: int = 0) -> tuple[int, str]:
        answer = site.send(member, number, data)
        return answer.status_code, "" if answer.status_code < 300 else slug(answer)

    assert site.send(member, 0, good, **{"Content-Type": "text/plain"}).status_code == 415
    assert answered(b"") == (422, "package-refused")
    assert answered(good[:-1] + bytes([good[-1] ^ 1])) == (422, "package-refused")
    wrong_start = site.contribution(member, invitation | {"start_digest": "sha256:" + "1" * 64})
    assert answered(wrong_start) == (422, "package-refused")
    wrong_round = site.contribution(member, invitation | {"round": 1})
    assert answered(wrong_round) == (422, "package-refused")
    assert answered(site.contribution(other, invitation)) == (422, "package-refused")
    assert site.round(0)["refused"] == {"round-content": 1, "round-signature": 2, "round-binding": 2}
    assert answered(good, number=1) == (404, "not-found")
    # this device was never invited
    assert site.send(other, 0, site.contribution(other, invitation)).status_code == 404
    assert answered(good) == (202, "")
    assert answered(good) == (200, "")
    assert answered(site.contribution(member, invitation, seed=9)) == (409, "contribution-conflict")
    headers = api.auth(stranger.token()) | {"Content-Type": CONTRIBUTION_MEDIA_TYPE}
    path = f"{site.path}/rounds/0/contribution"
    assert api.client.put(path, content=good, headers=headers).status_code == 404
    for one in (other, third):
        assert site.take_part(one).status_code == 202
    assert answered(good) == (200, "")  # The round is closing. Accepted contributions stay accepted.
    assert answered(site.contribution(member, invitation, seed=9)) == (409, "round-closed")
    site.work()
    assert answered(good) == (200, "")
    assert site.round(0)["counted"] == 3
    one_round(site, seed=1)
    assert answered(good) == (409, "round-closed")
    assert site.read()["number"] == 2


def test_who_is_too_late_is_refused_and_waited_for_by_nobody(api: Api) -> None:
    site = make_site(api, members=3)
    prompt, prompter, late = site.members
    invitation = site.invite(late).json()
    for member in (prompt, prompter):
        assert site.take_part(member).status_code == 202
    assert site.work() == 0
    site.pass_deadline()
    answer = site.send(late, 0, site.contribution(late, invitation))
    assert (answer.status_code, slug(answer)) == (409, "round-closed")
    assert site.work() == 1
    assert (site.round(0)["state"], site.round(0)["counted"], site.round(0)["received"]) == (
        "published",
        2,
        2,
    )


def test_a_round_of_too_few_is_void_and_its_number_is_used_up(api: Api) -> None:
    site = make_site(api, members=3)
    member = site.members[0]
    site.take_part(member)
    site.pass_deadline()
    found, before = site.round(0), History.begin(site.definition)
    assert (found["state"], found["reason"]) == ("void", "1 contributions came, fewer than 2")
    assert (found["invited"], found["received"], found["counted"]) == (1, 1, 0)
    assert site.read()["state_digest"] == before.digest
    one_round(site)
    site.catch_up(member)
    assert member.history.number == 2
    assert member.history.chain == reference.audit(site.definition.to_bytes(), records_of(site))[0]


def test_a_round_that_nobody_was_there_for_goes_on(api: Api) -> None:
    site = make_site(api, members=3)
    site.pass_deadline()
    assert site.round(0)["state"] == "open"
    one_round(site)
    assert site.round(0)["state"] == "published"


def test_a_round_that_leaves_the_exact_range_is_void_with_its_reason(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = make_site(api, members=3)
    monkeypatch.setattr("permille_rounds.rounds.STATE_LIMIT", 1000)
    for member in site.members:
        invitation = site.invite(member).json()
        site.send(member, 0, site.contribution(member, invitation))
    assert site.work() == 1
    found = site.round(0)
    assert found["state"] == "void"
    assert found["reason"].startswith("round-limit")
    assert site.round(1)["state"] == "open"


def test_invitations_are_drawn_once(api: Api) -> None:
    site = make_site(api, members=20, target=8)
    answers = [site.invite(member) for member in site.members]
    assert [answer.status_code for answer in answers] == [
        site.invite(member).status_code for member in site.members
    ]
    invited = [answer.json() for answer in answers if answer.status_code == 201]
    assert 0 < len(invited) < 20
    assert site.round(0)["invited"] == len(invited)


def test_a_device_that_leaves_or_is_revoked_is_not_counted(api: Api) -> None:
    site = make_site(api, members=5, target=4)
    for member in site.members[:3]:
        assert site.take_part(member).status_code == 202
    left, revoked, gone, *rest = site.members
    assert api.client.delete(f"{site.path}/membership", headers=api.auth(left.secret)).status_code == 204
    assert site.invite(left).status_code == 404
    assert api.post(f"/v1/devices/{revoked.device.id}/revoke").status_code == 200
    assert api.client.delete("/v1/device", headers=api.auth(gone.secret)).status_code == 204
    assert (site.round(0)["received"], site.read()["members"]) == (0, 2)
    for member in rest:
        assert site.take_part(member).status_code == 202
    site.pass_deadline()
    site.work()
    assert site.round(0)["counted"] == 2
    answer = api.client.put(f"{site.path}/membership", headers=api.auth(left.secret))
    assert (answer.status_code, site.read()["members"]) == (204, 3)


def test_what_was_sent_can_be_taken_back_while_the_round_is_open(api: Api) -> None:
    site = make_site(api, members=3)
    member = site.members[0]
    site.take_part(member)
    headers = api.auth(member.secret)
    assert api.client.delete(f"{site.path}/rounds/0/contribution", headers=headers).status_code == 204
    assert site.round(0)["received"] == 0
    assert site.take_part(member, seed=5).status_code == 202
    for other in site.members[1:]:
        site.take_part(other)
    assert api.client.delete(f"{site.path}/rounds/0/contribution", headers=headers).status_code == 204
    site.work()
    assert site.round(0)["counted"] == 3  # the round was closing already


def test_pause_start_and_finish(api: Api) -> None:
    site = make_site(api, members=3)
    member, *others = site.members
    invitation = site.invite(member).json()
    assert api.post(f"{site.path}/pause").json()["state"] == "paused"
    assert site.invite(others[0]).status_code == 204
    assert site.send(member, 0, site.contribution(member, invitation)).status_code == 202
    assert api.post(f"{site.path}/start").json()["state"] == "running"
    for other in others:
        assert site.take_part(other).status_code == 202
    assert api.post(f"{site.path}/pause").status_code == 200
    site.work()
    assert site.round(0)["state"] == "published"
    # no round opens while the federation is paused
    assert api.get(f"{site.path}/rounds/1").status_code == 404
    api.post(f"{site.path}/start")
    for one in site.members[:2]:
        site.take_part(one)
    assert api.post(f"{site.path}/finish").json()["state"] == "finished"
    assert site.work() == 1
    assert (site.round(1)["state"], site.round(1)["counted"]) == ("published", 2)
    assert api.post(f"{site.path}/finish").status_code == 200
    assert api.post(f"{site.path}/start").status_code == 409
    assert api.post(f"{site.path}/pause").status_code == 409
    assert site.invite(member).status_code == 204
    assert site.read()["number"] == 2
    offered = api.get("/v1/device/federations", member.secret).json()
    assert [(one["state"], one["member"]) for one in offered] == [("finished", True)]
    assert api.get("/v1/device/federations", api.device().token()).json() == []


def test_a_federation_ends_after_its_last_round(api: Api) -> None:
    site = make_site(api, members=3, rounds=2)
    for seed in range(2):
        one_round(site, seed)
    assert (site.read()["state"], site.read()["number"]) == ("finished", 2)
    assert site.invite(site.members[0]).status_code == 204


def test_a_returning_device_gets_rounds_or_a_checkpoint_whichever_is_smaller(api: Api) -> None:
    site = make_site(api, members=3, rounds=40)
    early, late = site.members[:2]
    for seed in range(9):
        one_round(site, seed)
    site.catch_up(early)
    assert early.history.number == 9

    def size(after: int, until: int | None = None) -> int:
        query = f"?after={after}" + ("" if until is None else f"&until={until}")
        return len(api.get(f"{site.path}/history{query}", late.secret).content)

    records = [len(api.get(f"{site.path}/rounds/{n}/record").content) for n in range(9)]
    least = 8 + 4 + 4 + 180
    assert size(9) == least
    assert size(8) == least + records[8]
    with api.service.database.read() as session:
        kept = {row.number: len(row.state) for row in session.query(FederationCheckpoint)}
    assert set(kept) == {1, 2, 4, 8, 9}
    assert size(0) == min(least + sum(records), least + 180 + kept[9])
    for until in range(10):
        answer = api.get(f"{site.path}/history?after=0&until={until}", late.secret)
        found = caught_up(History.begin(site.definition), answer.content, max_bytes=1 << 20)
        assert found.number == until
    assert api.get(f"{site.path}/history?after=10").status_code == 404
    assert api.get(f"{site.path}/history?after=3&until=2").status_code == 404


def test_a_state_is_adopted_where_its_gain_is_sure_or_for_a_reason(api: Api) -> None:
    site = make_site(api, members=3)
    assert api.post(f"{site.path}/adoptions", {}).status_code == 409
    for seed in range(2):
        one_round(site, seed)
    answer = api.post(f"{site.path}/adoptions", {})
    assert (answer.status_code, slug(answer)) == (409, "conflict")
    assert "at least 30 devices" in answer.json()["detail"]
    answer = api.post(f"{site.path}/adoptions", {"reason": "a pilot of three"})
    assert answer.status_code == 201, answer.text
    assert (answer.json()["round"], answer.json()["sure"], answer.json()["devices"]) == (1, False, 3)
    assert site.read()["adopted_round"] == 1
    offered = api.get("/v1/device/federations", site.members[0].secret).json()
    assert offered[0]["adopted_round"] == 1
    newest = api.post(f"{site.path}/adoptions", {"round": 2, "reason": "the newest"}).json()
    assert newest["state_digest"] == site.read()["state_digest"]
    assert api.post(f"{site.path}/adoptions", {"round": 3, "reason": "none"}).status_code == 404
    noted = api.get("/v1/audit?limit=200").json()
    assert [one["request"]["reason"] for one in noted if one["action"] == "create_adoption"] == [
        "a pilot of three",
        "the newest",
    ]


def test_the_bytes_of_a_definition_and_of_rounds_are_public_to_the_release(api: Api) -> None:
    site = make_site(api, members=3)
    one_round(site)
    follower, other = api.device().token(), api.device(release="others").token()
    for path in ("definition", "history", "rounds/0/record"):
        assert api.get(f"{site.path}/{path}", follower).content == api.get(f"{site.path}/{path}").content
        assert api.get(f"{site.path}/{path}", other).status_code == 404
    assert api.get(f"{site.path}/rounds/1/record").status_code == 404
    data = api.get(f"{site.path}/definition").content
    assert Definition.from_bytes(data) == site.definition
    assert json.loads(data)["round_key"] == site.definition.round_key


def test_a_draft_is_unknown_to_devices(api: Api) -> None:
    site = make_site(api, start=False)
    secret = api.device().token()
    assert api.get("/v1/device/federations", secret).json() == []
    assert api.get(f"{site.path}/definition", secret).status_code == 404
    assert api.client.put(f"{site.path}/membership", headers=api.auth(secret)).status_code == 404


def test_what_is_refused_too_often_is_counted_no_more(tmp_path: Path) -> None:
    with running_api(tmp_path, sign_ins_per_minute=1) as api:
        site = make_site(api, members=1, target=1, minimum=1)
        [member] = site.members
        invitation = site.invite(member).json()
        codes = [site.send(member, 0, b"forged").status_code for _ in range(20)]
        assert set(codes) == {422, 429}
        assert site.round(0)["refused"] == {"round-content": codes.count(422)}
        assert site.send(member, 0, site.contribution(member, invitation)).status_code == 202


def test_a_device_that_joins_too_often_waits_and_leaves_all_the_same(tmp_path: Path) -> None:
    with running_api(tmp_path, sign_ins_per_minute=1) as api:
        site = make_site(api, members=1)
        path, caller = f"{site.path}/membership", api.auth(site.members[0].secret)
        codes = []
        for _ in range(20):
            assert api.client.delete(path, headers=caller).status_code == 204
            codes.append(api.client.put(path, headers=caller).status_code)
        assert codes.count(429) > 10
        assert api.client.delete(path, headers=caller).status_code == 204
        assert site.read()["members"] == 0


def test_lists_of_rounds_are_pages(api: Api) -> None:
    site = make_site(api, members=3)
    for seed in range(3):
        one_round(site, seed)
    first = api.get(f"{site.path}/rounds?limit=3").json()
    assert [one["number"] for one in first["items"]] == [3, 2, 1]
    rest = api.get(f"{site.path}/rounds?limit=3&cursor={first['next_cursor']}").json()
    assert ([one["number"] for one in rest["items"]], rest["next_cursor"]) == ([0], None)
    refused = api.get(f"{site.path}/rounds?cursor=x")
    assert [one["location"] for one in refused.json()["errors"]] == ["query.cursor"]  # as documented
    unheard_of = f"{site.path}/rounds/{2**31}"  # too large for an integer column of PostgreSQL
    device = api.auth(site.members[0].device.token())
    for answer in (api.get(unheard_of), api.client.delete(f"{unheard_of}/contribution", headers=device)):
        assert [one["location"] for one in answer.json()["errors"]] == ["path.number"]


def test_an_auditor_needs_a_viewers_token_only(api: Api) -> None:
    site = make_site(api, members=3)
    one_round(site)
    viewer = api.operator(Role.VIEWER)
    data = api.get(f"{site.path}/rounds/0/record", viewer).content
    auditor = History.begin(site.definition)
    auditor.apply(decode_segment(data, site.definition, max_bytes=10_000))
    assert auditor.chain == api.get(site.path, viewer).json()["chain"]
    assert api.post(f"{site.path}/pause", None, viewer).status_code == 403


def test_the_example_of_a_contribution_is_one_in_base64() -> None:
    for examples in CONTRIBUTION_EXAMPLES.values():
        for example in examples.values():
            assert base64.b64decode(example, validate=True).startswith(contribution.MAGIC)


def test_heads_are_signed_by_the_key_of_the_definition(api: Api) -> None:
    site = make_site(api, members=3)
    keys = list((api.service.settings.keys_dir / "rounds" / api.tenant_id).iterdir())
    assert [path.stat().st_mode & 0o777 for path in keys] == [0o600]
    private = Ed25519PrivateKey.from_private_bytes(keys[0].read_bytes())
    assert private.public_key() == site.definition.key
    keys[0].unlink()
    assert api.get(f"{site.path}/history").status_code == 503

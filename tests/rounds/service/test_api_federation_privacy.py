"""Federations with privacy over the API: epsilon, noise, charges, keepers."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from sqlalchemy import select, update

from permille.store import tables
from permille_rounds.contribution import decode_contribution
from permille_rounds.keeper.main import init, public_text
from permille_rounds.masked import encode_masked
from permille_rounds.privacy.seals import SEAL_BYTES, seal_context, seal_seed
from permille_rounds.private_rounds import vector_of
from permille_rounds.rounds import decode_segment
from permille_rounds.store import rounds
from tests.api_service import Api
from tests.one_job import run_one
from tests.rounds.keeper.keepers import running
from tests.rounds.site import SMALL, Member, Site, make_site, request_of

PRIVATE: dict[str, Any] = {"clip": 2000, "privacy": {"dp_epsilon": 30.0, "participations": 2}}
KEPT = 34


def charges(site: Site) -> list[tuple[int, str]]:
    """Return the round and the state of every charge."""
    with site.api.service.database.read() as session:
        query = select(tables.PrivacyCharge.number, tables.PrivacyCharge.state)
        return sorted((number, state) for number, state in session.execute(query))


def run_round(site: Site, members: list[Member], number: int) -> dict[str, Any]:
    """Let these members take part, and let the worker close the round."""
    for member in members:
        assert site.take_part(member, seed=number).status_code == 202
    assert site.work() == 1
    return site.round(number)


def test_rounds_are_noised_and_charged_until_all_is_spent(api: Api) -> None:
    site = make_site(api, members=3, **PRIVATE)
    privacy = site.definition.privacy
    assert privacy is not None
    assert privacy.dp_epsilon(2) <= 30 < privacy.dp_epsilon(3)
    found = run_round(site, site.members, 0)
    assert (found["state"], found["counted"]) == ("published", 3)
    record = api.get(f"{site.path}/rounds/0/record").content
    (made,) = decode_segment(record, site.definition, max_bytes=1000)
    assert made.weight_K.tolist() == [3, 3, 3]
    assert charges(site) == [(0, "spent")] * 3
    shown = api.get(f"{site.path}/privacy").json()
    assert (shown["mode"], shown["participations"], shown["clip"]) == ("central", 2, 2000)
    assert shown["spent"] == [{"rounds": 1, "devices": 3, "dp_epsilon": pytest.approx(privacy.dp_epsilon(1))}]
    run_round(site, site.members, 1)
    for member in site.members:
        site.catch_up(member)
        assert site.invite(member).status_code == 204
    assert api.get(f"{site.path}/privacy").json()["spent"][0]["rounds"] == 2
    site.pass_deadline()
    found = site.read()
    assert (found["number"], found["state"]) == (2, "paused"), "nobody is left to be invited"


def test_who_has_spent_all_takes_nobodys_chance_to_be_drawn(api: Api) -> None:
    privacy = {"dp_epsilon": 30.0, "participations": 1}
    site = make_site(api, members=20, target=20, clip=2000, privacy=privacy)
    *spent, one, two, three = site.members
    assert {site.invite(member).status_code for member in site.members} == {201}
    site.pass_deadline()
    with api.service.database.write() as session:
        federation = session.scalars(select(tables.Federation)).one()
        # Among twenty devices, one in five would be drawn. Among the three with budget left, all are drawn.
        federation.target = 3
        same = {"federation_id": federation.id, "tenant_id": federation.tenant_id, "number": 0}
        for member in spent:
            session.add(tables.PrivacyCharge(**same, device_id=member.device.id, state="spent"))
    for member in site.members:
        site.catch_up(member)
    assert [site.invite(member).status_code for member in (one, two, three)] == [201] * 3
    assert {site.invite(member).status_code for member in spent} == {204}


def test_the_same_integers_make_other_rounds_each_time_noise_is_drawn(api: Api) -> None:
    made = []
    for name in ("first", "second"):
        site = make_site(api, members=3, name=name, **PRIVATE)
        for index, member in enumerate(site.members):
            invitation = site.invite(member).json()
            c_TQ = np.full((3, 4), 10 * (index + 1), dtype=np.int64)
            site.send(member, 0, site.contribution(member, invitation, c_TQ=c_TQ, gain=5))
        site.work()
        record = api.get(f"{site.path}/rounds/0/record").content
        made.append(decode_segment(record, site.definition, max_bytes=1000)[0].u_KJ)
        gain = site.round(0)["mean_gain"]
        assert gain != pytest.approx(0.25 * 5 / 200)
    assert (made[0] != made[1]).any()


def test_what_a_round_of_too_few_charged_is_released_and_may_be_charged_again(api: Api) -> None:
    site = make_site(api, members=3, **PRIVATE)
    site.take_part(site.members[0])
    assert charges(site) == [(0, "reserved")]
    site.pass_deadline()
    assert site.round(0)["state"] == "void"
    assert charges(site) == [(0, "released")]
    run_round(site, site.members, 1)
    run_round(site, site.members, 2)
    assert charges(site) == [(0, "released")] + [(1, "spent")] * 3 + [(2, "spent")] * 3


def test_a_device_that_takes_its_part_back_is_charged_once_it_sends_again(api: Api) -> None:
    site = make_site(api, members=3, **PRIVATE)
    one = site.members[0]
    invitation = site.invite(one).json()
    data = site.contribution(one, invitation)
    site.send(one, 0, data)
    path = f"{site.path}/rounds/0/contribution"
    assert api.client.delete(path, headers=api.auth(one.secret)).status_code == 204
    assert charges(site) == [(0, "released")]
    assert site.send(one, 0, data).status_code == 202
    assert site.send(one, 0, data).status_code == 200
    assert charges(site) == [(0, "reserved")]


def test_a_round_that_was_summed_and_is_void_stays_charged(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    site = make_site(api, members=3, **PRIVATE)
    monkeypatch.setattr("permille_rounds.rounds.STATE_LIMIT", 1)
    assert run_round(site, site.members, 0)["state"] == "void"
    assert charges(site) == [(0, "spent")] * 3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"clip": None}, "Privacy needs a clip"),
        ({"rule": "trimmed", "trim_percent": 10}, "Privacy needs the rule mean"),
        ({"privacy": {"dp_epsilon": 1.0, "participations": 10}}, "Use a target of"),
        ({"rounds": 1}, "participations must be"),
        # The largest noise does not reach this epsilon, whatever the number of devices.
        (
            {"privacy": {"dp_epsilon": 0.0005, "participations": 10}, "target": 65536},
            "No noise gives a dp_epsilon",
        ),
        # A sufficient target would exceed the limit of the field, so the message suggests another epsilon.
        (
            {
                "privacy": {"dp_epsilon": 0.01, "participations": 10},
                "queries": 1000,
                "estimator": "spsa",
                "target": 100,
            },
            "noise of 1071.01 times the clip. Use dp_epsilon",
        ),
        ({"privacy": PRIVATE["privacy"] | {"keeper_url": "https://k.example.org"}}, "together"),
        (
            {"privacy": PRIVATE["privacy"] | {"keeper_url": "http://k.example.org", "keeper_key": "A" * 43}},
            "https",
        ),
        (
            {"privacy": PRIVATE["privacy"] | {"keeper_url": "https://k.example.org", "keeper_key": "A" * 43}},
            "minimum must be an integer from 32",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused_with_those_that_would(
    api: Api, changes: dict[str, Any], words: str
) -> None:
    api.publish(api.package())
    answer = api.post("/v1/federations", request_of(SMALL | PRIVATE | changes))
    assert answer.status_code == 409
    assert words in answer.json()["detail"]


def test_the_numbers_that_would_work_do(api: Api) -> None:
    api.publish(api.package())
    asked = SMALL | PRIVATE | {"privacy": {"dp_epsilon": 4.0, "participations": 10}}
    detail = api.post("/v1/federations", request_of(asked)).json()["detail"]
    target = int(detail.partition("a target of ")[2].split()[0])
    dp_epsilon = float(detail.partition("dp_epsilon ")[2].split()[0].rstrip(",."))
    assert api.post("/v1/federations", request_of(asked | {"target": target})).status_code == 201
    again = asked | {"name": "weaker", "privacy": {"dp_epsilon": dp_epsilon, "participations": 10}}
    assert api.post("/v1/federations", request_of(again)).status_code == 201


def test_a_federation_without_privacy_says_so(api: Api) -> None:
    site = make_site(api)
    answer = api.get(f"{site.path}/privacy")
    assert answer.status_code == 404
    assert "gives no privacy guarantee" in answer.json()["detail"]


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    home = tmp_path / "keeper"
    init(home)
    with running(home) as (port, _):
        yield home, port


def kept_site(api: Api, home: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> Site:
    """Make a federation with this keeper. The worker knows the keeper's token."""
    key = X25519PrivateKey.from_private_bytes((home / "keeper.key").read_bytes())
    privacy = PRIVATE["privacy"] | {
        "keeper_key": public_text(key),
        "keeper_url": f"http://127.0.0.1:{port}",
    }
    monkeypatch.setenv("PERMILLE_KEEPER_TOKEN", (home / "keeper.token").read_text())
    site = make_site(api, clip=2000, target=KEPT, minimum=32, privacy=privacy)
    site.join(KEPT)
    return site


def masked_by(site: Site, member: Member, invitation: dict[str, Any], plain: bytes) -> bytes:
    """Return a member's contribution under a mask, signed."""
    vector_V = vector_of(decode_contribution(plain, site.definition, member.device.key.public_key()))
    place = (invitation["round"], invitation["start_digest"])
    return encode_masked(site.definition, *place, vector_V, member.device.key)


def send_masked(site: Site, members: Sequence[Member] | None = None) -> None:
    """Send the masked contributions of these or all members to the open round."""
    for member in members or site.members:
        site.catch_up(member)
        invitation = site.invite(member).json()
        plain = site.contribution(member, invitation)
        assert site.send(member, invitation["round"], plain).status_code == 422
        data = masked_by(site, member, invitation, plain)
        assert site.send(member, invitation["round"], data).status_code == 202


def send_sealed(site: Site, member: Member, seal: Callable[[bytes], bytes]) -> None:
    """Send a contribution whose seal is the result of `seal` for its context, signed by the device."""
    site.catch_up(member)
    invitation = site.invite(member).json()
    honest = masked_by(site, member, invitation, site.contribution(member, invitation))
    key = member.device.key
    context = seal_context(site.definition.digest, invitation["round"], key.public_key().public_bytes_raw())
    made = seal(context)
    body = honest[:76] + made + key.sign(context + made) + honest[220:-64]
    assert site.send(member, invitation["round"], body + key.sign(body)).status_code == 202


def keepers_key(site: Site) -> X25519PublicKey:
    privacy = site.definition.privacy
    assert privacy is not None
    assert privacy.keeper is not None
    return X25519PublicKey.from_public_bytes(privacy.keeper.public_bytes)


def random_seal(_: bytes) -> bytes:
    return os.urandom(SEAL_BYTES)


def strangers_seal(context: bytes) -> bytes:
    return seal_seed(bytes(32), X25519PrivateKey.generate().public_key(), context)


@pytest.mark.attack(20, "seals that no keeper can open, to void a round and pause its federation")
def test_a_round_goes_on_without_the_seals_that_do_not_open(
    api: Api, keeper: tuple[Path, int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    site = kept_site(api, *keeper, monkeypatch)
    for member, seal in zip(site.members, (random_seal, strangers_seal), strict=False):
        send_sealed(site, member, seal)
    send_masked(site, site.members[2:])
    assert site.work() == 1
    found = site.round(0)
    assert (found["state"], found["received"], found["counted"]) == ("published", 32, 32)
    assert found["dropped"] == {one.device.id: "round-seal" for one in site.members[:2]}
    assert site.read()["state"] == "running"
    assert f"dropped {site.members[0].device.id}: round-seal" in caplog.text
    assert charges(site) == [(0, "spent")] * KEPT
    site.catch_up(site.members[5])
    assert site.members[5].history.s_W.any()


@pytest.mark.attack(20, "so many seals that do not open that too few devices are left")
def test_a_round_of_too_few_opened_seals_waits_for_others_or_releases_the_charges(
    api: Api, keeper: tuple[Path, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    site = kept_site(api, *keeper, monkeypatch)
    seals = (
        lambda _: bytes(SEAL_BYTES),  # a point of small order
        lambda context: seal_seed(bytes(32), keepers_key(site), context[:-1] + b"x"),
        random_seal,
    )
    for member, seal in zip(site.members, seals, strict=False):
        send_sealed(site, member, seal)
    send_masked(site, site.members[3:])
    assert site.work() == 1
    found = site.round(0)
    assert (found["state"], found["received"], found["job_id"]) == ("open", 31, None)
    assert [*found["dropped"].values()] == ["round-seal"] * 3
    late = site.join(3)
    send_masked(site, late)
    assert site.work() == 1
    found = site.round(0)
    assert (found["state"], found["counted"]) == ("published", 34)
    for member in site.members[:3]:
        send_sealed(site, member, random_seal)
    drawn = [one for one in site.members[3:] if site.invite(one).status_code == 201][:31]
    send_masked(site, drawn)
    assert site.work() == 1
    site.pass_deadline()
    found = site.round(1)
    assert (found["state"], found["counted"]) == ("void", 0)
    assert "31 contributions came" in found["reason"]
    assert [state for number, state in charges(site) if number == 1] == ["released"] * 34
    assert site.read()["state"] == "running"


@pytest.mark.attack(20, "a mask that is not the sealed one spoils a round")
def test_a_false_mask_voids_its_round_and_pauses_nothing(
    api: Api, keeper: tuple[Path, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    site = kept_site(api, *keeper, monkeypatch)
    send_sealed(site, site.members[0], lambda context: seal_seed(bytes(32), keepers_key(site), context))
    send_masked(site, site.members[1:])
    assert site.work() == 1
    found = site.round(0)
    assert (found["state"], found["dropped"]) == ("void", {})
    assert "The keeper or a device lies" in found["reason"]
    assert site.read()["state"] == "running"
    assert site.round(1)["state"] == "open"


@pytest.mark.attack(20, "stored bytes that cannot be read any more, in rounds with and without privacy")
@pytest.mark.parametrize("privacy", [{}, PRIVATE])
def test_a_contribution_that_is_damaged_is_left_out(api: Api, privacy: dict[str, Any]) -> None:
    site = make_site(api, members=3, **privacy)
    for member in site.members:
        assert site.take_part(member).status_code == 202
    with api.service.database.write() as session:
        own = tables.Participation.device_id == site.members[0].device.id
        session.execute(update(tables.Participation).where(own).values(data=b"damaged"))
    assert site.work() == 1
    found = site.round(0)
    assert (found["state"], found["counted"]) == ("published", 2)
    assert found["dropped"] == {site.members[0].device.id: "round-content"}


def test_a_finished_federation_does_not_wait_for_others(api: Api) -> None:
    site = make_site(api, members=3)
    for member in site.members[:2]:
        assert site.take_part(member).status_code == 202
    assert api.post(f"{site.path}/finish").status_code == 200
    with api.service.database.write() as session:
        session.execute(update(tables.Participation).values(data=b"damaged"))
    assert site.work() == 1
    assert (site.round(0)["state"], site.round(0)["received"]) == ("void", 0)
    assert site.read()["state"] == "finished"


def test_a_keepers_rounds_move_on_and_the_service_holds_no_integer(
    api: Api, keeper: tuple[Path, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    site = kept_site(api, *keeper, monkeypatch)
    send_masked(site)
    assert site.work() == 1
    found = site.round(0)
    assert (found["state"], found["counted"], found["refused"]) == (
        "published",
        KEPT,
        {"round-content": KEPT},
    )
    assert charges(site) == [(0, "spent")] * KEPT
    assert abs(found["mean_gain"]) < 5
    site.catch_up(site.members[0])
    assert site.members[0].history.s_W.any()


@pytest.mark.slow
def test_a_round_waits_for_its_keeper_and_is_void_when_that_stays_away(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "keeper"
    init(home)
    with running(home) as (port, _):
        site = kept_site(api, home, port, monkeypatch)
        send_masked(site)
    assert run_one(api)
    assert site.round(0)["state"] == "closing"
    assert _again(api) == "queued"
    with running(home, port):
        assert site.work() == 1
    assert site.round(0)["state"] == "published"
    send_masked(site)
    with api.service.database.write() as session:
        session.execute(
            update(tables.Job).where(tables.Job.state == "queued").values(attempt=tables.Job.max_attempts - 1)
        )
    assert run_one(api)
    rounds.sweep(api.service.database)
    found = site.round(1)
    assert found["state"] == "void"
    assert "does not answer" in found["reason"]
    assert charges(site) == [(0, "spent")] * KEPT + [(1, "spent")] * KEPT
    assert site.round(2)["state"] == "open"


def _again(api: Api) -> str:
    """End the pause of the queued job. Return its state."""
    with api.service.database.write() as session:
        job = session.scalars(select(tables.Job).where(tables.Job.kind == "round")).one()
        job.available_at = job.created_at
        return job.state

"""Tests of the repository's rules. python-tuf's client follows every change without a new bootstrap."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from securesystemslib.signer import CryptoSigner
from tuf.api.exceptions import ExpiredMetadataError, RepositoryError
from tuf.api.metadata import Metadata, TargetFile, Targets

from permille.choices import Method
from permille.errors import InputError, OperatorError
from permille.trust.metadata import Draft, Holders, KeyElsewhereError, list_version, new_signer
from permille.trust.repository import Repository
from permille.trust.roles import Training, aliases_of, parse_target_path, target_path, training_of
from tests.trust_client import TufClient

NOW = datetime.now(UTC).replace(microsecond=0)
MANIFEST = b'{"format":"permille-package"}'
ONE, TWO = target_path("tiny", 1), target_path("tiny", 2)


@pytest.fixture
def repository() -> Repository:
    return Repository.create(now=NOW)


@pytest.fixture
def client(tmp_path: Path, repository: Repository) -> TufClient:
    made = TufClient(tmp_path, repository)
    made.publish(repository)
    return made


def holders(*signers: CryptoSigner, threshold: int = 1) -> Holders:
    return Holders(keys=tuple(signer.public_key for signer in signers), threshold=threshold)


def held(repository: Repository, count: int = 1) -> list[CryptoSigner]:
    """Return new keys, with which the repository can sign."""
    made = [new_signer() for _ in range(count)]
    repository.signers.update({signer.public_key.keyid: signer for signer in made})
    return made


def signed(draft: Draft, *signers: CryptoSigner) -> bytes:
    metadata: Metadata[Targets] = Metadata.from_bytes(draft.data)
    for signer in signers:
        metadata.sign(signer, append=True)
    return metadata.to_bytes()


def forget_unused_keys(repository: Repository) -> None:
    repository.signers = {key: one for key, one in repository.signers.items() if key in repository.key_ids}


def test_a_published_version_is_found_with_its_hash_and_aliases(
    repository: Repository, client: TufClient
) -> None:
    assert client.look(ONE) is None
    repository.publish("tiny", 1, MANIFEST, aliases=["stable"])
    client.publish(repository)
    found = client.look(ONE)
    assert found is not None
    found.verify_length_and_hashes(MANIFEST)
    assert aliases_of(found) == {"stable"}


def test_what_a_release_asks_of_training_is_signed_with_it(repository: Repository, client: TufClient) -> None:
    asked = Training(method=Method.ZEROTH_ORDER, steps=200, first_layer=15)
    repository.publish("tiny", 1, MANIFEST, aliases=["stable"], training=asked)
    repository.publish("tiny", 2, MANIFEST)
    repository.move_alias("tiny", "stable", 2)
    client.publish(repository)
    found = [client.look(path) for path in (ONE, TWO)]
    assert [training_of(target) for target in found if target] == [asked, Training()]


@pytest.mark.parametrize(
    "fields",
    [[], "gradient", {"method": "sketch"}, {"steps": 0}, {"steps": True}, {"first_layer": -1}, {"rate": 1}],
)
def test_training_that_no_device_can_follow_is_refused(fields: object) -> None:
    target = TargetFile.from_data(ONE, MANIFEST)
    target.unrecognized_fields["custom"] = {"aliases": [], "training": fields}
    with pytest.raises(InputError, match="expected"):
        training_of(target)


def test_an_alias_is_on_one_version_at_a_time(repository: Repository, client: TufClient) -> None:
    repository.publish("tiny", 1, MANIFEST, aliases=["stable"])
    repository.publish("other", 1, MANIFEST, aliases=["stable"])
    repository.publish("tiny", 2, MANIFEST, aliases=["canary"])
    repository.move_alias("tiny", "stable", 2)
    client.publish(repository)
    found = [client.look(path) for path in (ONE, TWO, target_path("other", 1))]
    assert [sorted(aliases_of(target)) for target in found if target] == [
        [],
        ["canary", "stable"],
        ["stable"],
    ]


def test_a_withdrawn_version_is_gone_and_withdrawing_twice_changes_nothing(
    repository: Repository, client: TufClient
) -> None:
    repository.publish("tiny", 1, MANIFEST, aliases=["stable"])
    repository.withdraw("tiny", 1)
    client.publish(repository)
    assert client.look(ONE) is None
    repository.withdraw("tiny", 1)
    assert not repository.changed


def test_what_is_past_half_its_life_is_signed_again_and_nothing_else(repository: Repository) -> None:
    repository.changed.clear()
    repository.now = NOW + timedelta(hours=11)
    assert repository.renew() == []
    assert list(repository.changed) == []
    for passed, files in (
        (timedelta(hours=13), ["timestamp.json"]),
        (timedelta(days=4), ["2.snapshot.json", "timestamp.json"]),
        (timedelta(days=50), ["2.releases.json", "2.rollouts.json", "3.snapshot.json", "timestamp.json"]),
        (
            timedelta(days=200),
            ["2.root.json", "2.targets.json", "3.releases.json", "3.rollouts.json", "4.snapshot.json"],
        ),
    ):
        repository.changed.clear()
        repository.now = NOW + passed
        repository.renew()
        assert list(repository.changed)[: len(files)] == files


@pytest.mark.attack(9, "metadata signed under a clock nine years ahead, to hold devices at it")
def test_what_was_signed_under_a_clock_that_was_ahead_is_signed_again(
    repository: Repository, client: TufClient
) -> None:
    ahead = timedelta(days=9 * 365)
    repository.now = NOW + ahead
    repository.renew()
    assert all(state.expires_at > NOW + ahead for state in repository.states())
    repository.now = NOW
    repository.renew()
    assert all(state.expires_at <= NOW + timedelta(days=365) for state in repository.states())
    client.publish(repository)
    repository.changed.clear()
    repository.renew()
    assert not repository.changed
    repository.publish("tiny", 1, MANIFEST, aliases=["stable"])
    client.publish(repository)
    assert client.look(ONE) is not None


def test_an_old_timestamp_is_refused_after_a_day(tmp_path: Path) -> None:
    frozen = Repository.create(now=NOW - timedelta(days=1, minutes=1))
    client = TufClient(tmp_path, frozen)
    client.publish(frozen)
    with pytest.raises(ExpiredMetadataError):
        client.look(ONE)


@pytest.mark.parametrize("roles", [("snapshot", "timestamp"), ("targets",), ("releases",), ("root",)])
def test_each_key_rotates_under_a_client_that_does_not_bootstrap_again(
    repository: Repository, client: TufClient, roles: tuple[str, ...]
) -> None:
    repository.publish("tiny", 1, MANIFEST, aliases=["stable"])
    client.publish(repository)
    assert client.look(ONE) is not None
    before = repository.key_ids
    [fresh] = held(repository)
    assert repository.rotate({role: holders(fresh) for role in roles}) == []
    forget_unused_keys(repository)
    assert len(before - repository.key_ids) == 1
    repository.publish("tiny", 2, MANIFEST)
    client.publish(repository)
    assert client.look(ONE) is not None
    assert client.look(TWO) is not None


def test_root_and_targets_go_to_keys_elsewhere(repository: Repository, client: TufClient) -> None:
    repository.publish("tiny", 1, MANIFEST, aliases=["stable"])
    one, two, team = new_signer(), new_signer(), new_signer()
    drafts = repository.rotate({"root": holders(one, two, threshold=2), "targets": holders(team)})
    assert [draft.role for draft in drafts] == ["targets", "root"]
    repository.accept("targets", signed(drafts[0], team))
    client.publish(repository)
    assert client.look(ONE) is not None, "between the two steps clients go on"
    with pytest.raises(InputError, match="signed"):
        Repository.open(repository.newest, repository.signers, NOW).accept("root", signed(drafts[1], one))
    repository.accept("root", signed(drafts[1], one, two))
    forget_unused_keys(repository)
    client.publish(repository)
    assert client.look(ONE) is not None
    here = {state.role: state.signed_here for state in repository.states()}
    assert here == {
        "root": False,
        "targets": False,
        "snapshot": True,
        "timestamp": True,
        "releases": True,
        "rollouts": True,
    }
    repository.publish("tiny", 2, MANIFEST)
    client.publish(repository)
    assert client.look(TWO) is not None, "the team goes on publishing"


def test_with_the_root_elsewhere_a_lost_team_key_is_replaced(
    repository: Repository, client: TufClient
) -> None:
    one, team = new_signer(), new_signer()
    drafts = repository.rotate({"root": holders(one), "targets": holders(team)})
    for draft in drafts:
        repository.accept(draft.role, signed(draft, one, team))
    forget_unused_keys(repository)
    lost = repository.targets("targets").get_delegated_role("releases").keyids[0]
    del repository.signers[lost]
    with pytest.raises(KeyElsewhereError):
        repository.publish("tiny", 1, MANIFEST)
    [fresh] = held(repository)
    [draft] = repository.rotate({"releases": holders(fresh)})
    repository.accept(draft.role, signed(draft, team))
    repository.publish("tiny", 1, MANIFEST)
    client.publish(repository)
    assert client.look(ONE) is not None


def test_the_teams_key_elsewhere_signs_versions_and_may_choose_among_them_without(
    repository: Repository, client: TufClient
) -> None:
    team = new_signer()
    repository.publish("tiny", 1, MANIFEST, aliases=["stable", "canary"])
    [releases] = repository.rotate({"releases": holders(team)})[:1]
    repository.accept("releases", signed(releases, team))
    [_, targets] = repository.rotate({"releases": holders(team)})
    repository.accept("targets", signed(targets))
    forget_unused_keys(repository)
    repository.move_alias("tiny", "stable", 1)
    with pytest.raises(KeyElsewhereError):
        repository.move_alias("tiny", "beta", 1)
    with pytest.raises(KeyElsewhereError):
        repository.withdraw("tiny", 1)
    [draft] = repository.renew(["releases"])
    metadata: Metadata[Targets] = Metadata.from_bytes(draft.data)
    del metadata.signed.targets[ONE]
    metadata.sign(team)
    repository.accept("releases", metadata.to_bytes())
    client.publish(repository)
    assert client.look(ONE) is None


def test_a_threshold_of_two_is_not_met_by_one_key_twice() -> None:
    one = new_signer()
    with pytest.raises(InputError, match="named twice"):
        holders(one, one, threshold=2)
    with pytest.raises(InputError, match="threshold"):
        holders(one, threshold=2)


def test_what_comes_from_elsewhere_is_checked(repository: Repository) -> None:
    team = new_signer()
    draft = repository.renew(["targets"])
    assert draft == []
    releases: Metadata[Targets] = Metadata.from_bytes(repository.newest["releases"])
    releases.signed.version += 1

    def offered(change: str, **fields: object) -> bytes:
        altered: Metadata[Targets] = Metadata.from_bytes(releases.to_bytes())
        for name, value in fields.items():
            setattr(altered.signed, name, value)
        for key_id in repository.targets("targets").get_delegated_role("releases").keyids:
            altered.sign(team if change == "signed" else repository.signers[key_id])
        return altered.to_bytes()

    wrong = [
        ("signed", offered("signed")),
        ("releases is 2, not", offered("version", version=releases.signed.version + 1)),
        ("releases is 2, not", offered("jump", version=2**53 - 1)),
        ("expire", offered("late", expires=NOW + timedelta(days=1000))),
        ("expire", offered("early", expires=NOW - timedelta(days=1))),
        ("TUF metadata", b"{}"),
        ("TUF metadata", b"[" * 100_000),
        ("TUF metadata", repository.newest["root"]),
    ]
    for message, data in wrong:
        with pytest.raises(InputError, match=message):
            repository.accept("releases", data)
    for role in ("snapshot", "timestamp", "federations", ""):
        with pytest.raises(InputError, match="Only root, targets or a role"):
            repository.accept(role, offered("none"))
    repository.accept("releases", offered("none"))


def test_a_version_that_is_listed_never_becomes_another_package(repository: Repository) -> None:
    repository.publish("tiny", 1, MANIFEST)
    key_id = repository.targets("targets").get_delegated_role("releases").keyids[0]
    changed: Metadata[Targets] = Metadata.from_bytes(repository.newest["releases"])
    changed.signed.version += 1
    changed.signed.targets[ONE].hashes = {"sha256": "0" * 64}
    changed.sign(repository.signers[key_id])
    with pytest.raises(InputError, match="signed before with other content"):
        repository.accept("releases", changed.to_bytes())


def test_a_database_that_went_back_is_believed_again_after_one_rotation(
    repository: Repository, client: TufClient
) -> None:
    repository.publish("tiny", 1, MANIFEST)
    client.publish(repository)
    backup = dict(repository.newest)
    for version in (2, 3, 4):
        repository.publish("tiny", version, MANIFEST)
    client.publish(repository)
    assert client.look(target_path("tiny", 4)) is not None
    restored = Repository.open(backup, repository.signers, NOW)
    client.publish(restored)
    with pytest.raises(RepositoryError):
        client.look(ONE)
    [fresh] = held(restored)
    restored.rotate({role: holders(fresh) for role in ("snapshot", "timestamp")})
    client.publish(restored)
    assert client.look(ONE) is not None
    assert client.look(target_path("tiny", 4)) is None


def test_all_keys_of_the_service_are_lost_and_the_offline_ones_replace_them(
    repository: Repository, client: TufClient
) -> None:
    repository.publish("tiny", 1, MANIFEST)
    one, two = new_signer(), new_signer()
    for draft in repository.rotate({"root": holders(one), "targets": holders(two)}):
        repository.accept(draft.role, signed(draft, one, two))
    client.publish(repository)
    assert client.look(ONE) is not None
    after = Repository.open(repository.newest, {}, NOW)
    [online, team, own] = held(after, 3)
    [draft] = after.rotate({role: holders(online) for role in ("snapshot", "timestamp")})
    assert draft.role == "root"
    after.accept("root", signed(draft, one))
    [draft] = after.rotate({"releases": holders(team), "rollouts": holders(own)})
    assert draft.role == "targets"
    after.accept("targets", signed(draft, two))
    after.publish("tiny", 2, MANIFEST)
    after.list_rollout("tiny", "stable", {"rollout": "rollout_1"})
    client.publish(after)
    assert client.look(TWO) is not None


@pytest.mark.attack(2, "an operator publishes until the list is larger than devices read")
def test_a_list_does_not_outgrow_its_readers(repository: Repository) -> None:
    targets = repository.targets("releases")
    for version in range(1, 4000):
        list_version(targets, ("tiny", version), MANIFEST, [])
    with pytest.raises(InputError, match="withdraw versions"):
        repository._edit("releases", lambda edited: edited.targets.update(targets.targets))


@pytest.mark.parametrize("role", ["targets", "releases", "rollouts", "snapshot", "timestamp"])
def test_bytes_that_somebody_changed_are_not_signed_over(repository: Repository, role: str) -> None:
    releases = repository.newest["releases"].replace(b'"targets":{}', b'"targets": {}')
    Repository.open({**repository.newest, "releases": releases}, repository.signers, NOW)
    foreign = Repository.create(now=NOW)
    foreign.publish("tiny", 1, MANIFEST, aliases=["stable"])
    with pytest.raises(OperatorError, match=role):
        Repository.open({**repository.newest, role: foreign.newest[role]}, repository.signers, NOW)


def test_a_jump_by_a_thief_of_the_online_key_ends_with_a_rotation(
    repository: Repository, client: TufClient
) -> None:
    repository.publish("tiny", 1, MANIFEST)
    client.publish(repository)
    client.look(ONE)
    stolen = Repository.open(repository.newest, repository.signers, NOW)
    for role in ("snapshot", "timestamp"):
        metadata = Metadata.from_bytes(stolen.newest[role])
        metadata.signed.version = 2**53 - 1 if role == "timestamp" else 2**53 - 2
        metadata.sign(stolen.signers[stolen.root().roles[role].keyids[0]])
        stolen.newest[role] = metadata.to_bytes()
    stolen._finish([])
    client.publish(stolen)
    client.look(ONE)
    client.publish(repository)
    with pytest.raises(RepositoryError):
        client.look(ONE)
    [fresh] = held(repository)
    repository.rotate({role: holders(fresh) for role in ("snapshot", "timestamp")})
    client.publish(repository)
    assert client.look(ONE) is not None


@pytest.mark.parametrize(
    "path",
    [
        "releases/tiny/0.json",
        "releases/tiny/01.json",
        "releases/tiny/9007199254740992.json",
        "releases/../tiny/1.json",
        "releases/Tiny/1.json",
        "releases/tiny/1.json\n",
        "federations/tiny/1.json",
    ],
)
def test_other_paths_are_no_release(path: str) -> None:
    with pytest.raises(InputError):
        parse_target_path(path)
    assert parse_target_path("releases/tiny/9007199254740991.json") == ("tiny", 2**53 - 1)

"""Tests of trust metadata, stored by compare-and-set: the slower writer repeats its change on new state."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
from sqlalchemy.orm import Session

from permille.store import trust
from permille.store.database import Database, now
from permille.store.errors import ChangedError, NotFoundError
from permille.trust.metadata import new_signer, root_digest
from permille.trust.repository import KEYS_AT_START, Repository
from permille.trust.roles import TIMESTAMP

SIGNERS = [new_signer() for _ in range(KEYS_AT_START)]
BY_ID = {signer.public_key.keyid: signer for signer in SIGNERS}
MANIFEST = b"{}"


def opened(session: Session, tenant_id: str) -> tuple[Repository, int]:
    """Return the repository, or a new one, and the version of its timestamp."""
    found = trust.newest(session, tenant_id=tenant_id)
    if not found:
        return Repository.create(now=now(session), signers=SIGNERS), 0
    repository = Repository.open(found, BY_ID, now(session))
    return repository, repository.version(TIMESTAMP)


def publish(db: Database, tenant_id: str, version: int) -> None:
    def work(session: Session) -> None:
        repository, seen = opened(session, tenant_id)
        repository.publish("tiny", version, MANIFEST, aliases=["stable"])
        trust.keep(session, tenant_id=tenant_id, repository=repository, seen=seen)

    db.transact(work)


def test_a_change_is_kept_file_by_file_and_by_tenant(
    db: Database, tenant_id: str, other_tenant_id: str
) -> None:
    publish(db, tenant_id, 1)
    with db.read() as session:
        newest = trust.newest(session, tenant_id=tenant_id)
        for file in ("1.root.json", "timestamp.json"):
            data, *_ = trust.read_file(db, tenant_id=tenant_id, file=file)
            assert data == newest[file.split(".")[-2]]
        assert trust.newest(session, tenant_id=other_tenant_id) == {}
        for file, owner in (("1.root.json", other_tenant_id), ("9.root.json", tenant_id), ("", tenant_id)):
            with pytest.raises(NotFoundError):
                trust.read_file(db, tenant_id=owner, file=file)
        with pytest.raises(NotFoundError):
            trust.newest_root(session, tenant_id=other_tenant_id)


def test_an_invitations_digest_finds_its_root_of_this_tenant_alone(
    db: Database, tenant_id: str, other_tenant_id: str
) -> None:
    publish(db, tenant_id, 1)
    with db.read() as session:
        root = trust.newest_root(session, tenant_id=tenant_id)
        digest = root_digest(root)
        assert trust.root_by_digest(session, tenant_id=tenant_id, digest=digest) == root
        assert trust.root_by_digest(session, tenant_id=other_tenant_id, digest=digest) is None
        assert trust.root_by_digest(session, tenant_id=tenant_id, digest="0" * 32) is None
        assert trust.root_by_digest(session, tenant_id=tenant_id, digest="") is None


@pytest.mark.attack(2, "two publishers at one moment: one overwrites what the other signed")
def test_the_slower_of_two_changes_is_refused_whole(db: Database, tenant_id: str) -> None:
    publish(db, tenant_id, 1)
    with db.read() as session:
        slow, seen = opened(session, tenant_id)
    publish(db, tenant_id, 2)
    slow.publish("tiny", 3, MANIFEST)
    with pytest.raises(ChangedError), db.write() as session:
        trust.keep(session, tenant_id=tenant_id, repository=slow, seen=seen)
    with db.read() as session:
        found, _ = opened(session, tenant_id)
    assert set(found.listed()) == {("tiny", 1), ("tiny", 2)}


@pytest.mark.attack(2, "two publishers at one moment: one overwrites what the other signed")
def test_publishers_at_one_moment_lose_nothing(db: Database, tenant_id: str) -> None:
    versions = range(1, 7)
    start = Barrier(len(versions))

    def run(version: int) -> None:
        start.wait()
        publish(db, tenant_id, version)

    with ThreadPoolExecutor(len(versions)) as pool:
        list(pool.map(run, versions))
    with db.read() as session:
        found, _ = opened(session, tenant_id)
    assert set(found.listed()) == {("tiny", version) for version in versions}
    assert sum("stable" in listed.aliases for listed in found.listed().values()) == 1


def test_old_versions_are_dropped_but_no_root(db: Database, tenant_id: str) -> None:
    for version in range(1, trust.KEPT_VERSIONS + 5):
        publish(db, tenant_id, version)
    trust.read_file(db, tenant_id=tenant_id, file="1.root.json")
    trust.read_file(db, tenant_id=tenant_id, file="6.releases.json")
    with pytest.raises(NotFoundError):
        trust.read_file(db, tenant_id=tenant_id, file="1.releases.json")

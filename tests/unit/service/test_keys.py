"""Tests of private keys: created once, private, and refused otherwise."""

from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from securesystemslib.signer import CryptoSigner

from permille.errors import OperatorError
from permille_service.keys import Seal, TrustKeys


def add_key(keys: TrustKeys, tenant_id: str) -> CryptoSigner:
    key = Ed25519PrivateKey.generate()
    keys.keep(tenant_id, key)
    return CryptoSigner(key)


def test_keys_are_kept_by_tenant_and_only_dropped_ones_go(tmp_path: Path) -> None:
    keys = TrustKeys(tmp_path)
    one, two = add_key(keys, "tenant_a"), add_key(keys, "tenant_a")
    other = add_key(keys, "tenant_b")
    payload = b"metadata"
    assert keys.signers("tenant_a")[one.public_key.keyid].sign(payload) == one.sign(payload)
    assert keys.signers("tenant_b").keys() == {other.public_key.keyid}
    assert keys.signers("tenant_c") == {}
    keys.drop("tenant_a", [one.public_key.keyid, "none"])
    assert keys.signers("tenant_a").keys() == {two.public_key.keyid}
    assert {path.stat().st_mode & 0o777 for path in tmp_path.rglob("*.key")} == {0o600}
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "trust").rglob("tenant_*")} == {0o700}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.chmod(0o644), "0644"),
        (lambda path: path.chmod(0o604), "0604"),
        (lambda path: path.write_bytes(b"short"), "instead of 32"),
        (lambda path: path.write_bytes(bytes(32)), "holds the key"),
    ],
)
def test_a_key_file_that_is_not_as_it_was_made_is_refused(
    tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    keys = TrustKeys(tmp_path)
    add_key(keys, "tenant_a")
    [path] = tmp_path.rglob("*.key")
    damage(path)
    with pytest.raises(OperatorError, match=message):
        keys.signers("tenant_a")


def test_a_key_that_its_group_can_read_is_taken_back(tmp_path: Path) -> None:
    keys = TrustKeys(tmp_path)
    made = add_key(keys, "tenant_a")
    [path] = tmp_path.rglob("*.key")
    path.chmod(0o660)
    assert list(keys.signers("tenant_a")) == [made.public_key.keyid]
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_group_that_cannot_be_taken_from_a_key_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = TrustKeys(tmp_path)
    add_key(keys, "tenant_a")
    [path] = tmp_path.rglob("*.key")
    path.chmod(0o640)

    def refuse(_path: Path, _mode: int) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "chmod", refuse)
    with pytest.raises(OperatorError, match=r"The group of .* can read it"):
        keys.signers("tenant_a")


def test_seal_opens_with_its_key_and_context_only(tmp_path: Path) -> None:
    seal = Seal(tmp_path / "a")
    sealed = seal.close(b"secret", "tenant 1")
    assert b"secret" not in sealed
    assert Seal(tmp_path / "a").open(sealed, "tenant 1") == b"secret"
    for other, context in ((seal, "tenant 2"), (Seal(tmp_path / "b"), "tenant 1")):
        with pytest.raises(InvalidTag):
            other.open(sealed, context)

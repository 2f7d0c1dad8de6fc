"""Private keys: made once, private, refused when they are not."""

from pathlib import Path

import pytest
from cryptography.exceptions import InvalidTag

from permille.errors import OperatorError
from permille_service.keys import Seal, signing_key


def test_key_is_made_once_and_kept(tmp_path: Path) -> None:
    first = signing_key(tmp_path / "keys").private_bytes_raw()
    assert signing_key(tmp_path / "keys").private_bytes_raw() == first
    assert signing_key(tmp_path / "other").private_bytes_raw() != first
    assert sorted(path.name for path in (tmp_path / "keys").iterdir()) == ["release-signing.key"]


def test_key_that_others_may_read_is_refused(tmp_path: Path) -> None:
    signing_key(tmp_path)
    (tmp_path / "release-signing.key").chmod(0o644)
    with pytest.raises(OperatorError, match="0644"):
        signing_key(tmp_path)


def test_key_of_another_size_is_refused(tmp_path: Path) -> None:
    signing_key(tmp_path)
    (tmp_path / "release-signing.key").write_bytes(b"short")
    with pytest.raises(OperatorError, match="expected 32 bytes"):
        signing_key(tmp_path)


def test_seal_opens_with_its_key_and_context_only(tmp_path: Path) -> None:
    seal = Seal(tmp_path / "a")
    sealed = seal.close(b"secret", "tenant 1")
    assert b"secret" not in sealed
    assert Seal(tmp_path / "a").open(sealed, "tenant 1") == b"secret"
    for other, context in ((seal, "tenant 2"), (Seal(tmp_path / "b"), "tenant 1")):
        with pytest.raises(InvalidTag):
            other.open(sealed, context)

"""Releases that a device must not believe, at least one for each code of FORMAT 5."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from permille.errors import PackageError
from permille.package.signing import (
    Release,
    encode_base64url,
    key_id_of,
    public_bytes,
    sign_release,
    signed_release_from_json,
    verify_release,
)

PINNED = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
FOREIGN = Ed25519PrivateKey.from_private_bytes(bytes(32))
KEYS = {key_id_of(public_bytes(PINNED)): public_bytes(PINNED)}
DIGEST, OTHER = "sha256:" + "1" * 64, "sha256:" + "2" * 64
NOW, VERSION = 1_800_000_000, 7

Attack = Callable[[], Mapping[str, object]]
ATTACKS: list[tuple[str, Attack]] = []


def attack(code: str) -> Callable[[Attack], Attack]:
    """Register an attack: it returns what a server answers."""

    def register(function: Attack) -> Attack:
        ATTACKS.append((code, function))
        return function

    return register


def answer(key: Ed25519PrivateKey = PINNED, **fields: Any) -> dict[str, Any]:
    """An honest answer with a signature over these fields."""
    honest: dict[str, Any] = {
        "name": "tiny",
        "version": VERSION,
        "manifest_digest": DIGEST,
        "expires_at": NOW + 60,
    }
    release = Release(**honest | fields)
    signed = sign_release(key, release)
    return {
        **{name: getattr(release, name) for name in honest},
        "key_id": signed.key_id,
        "signature": encode_base64url(signed.signature),
        "size_bytes": 12345,
        "yanked": False,
    }


def believe(fields: Mapping[str, object]) -> Release:
    """What a device does with an answer, having seen version 7 of this release."""
    signed = signed_release_from_json(fields)
    return verify_release(signed, KEYS, NOW, VERSION, name="tiny", last_digest=DIGEST)


def test_an_honest_answer_is_believed() -> None:
    assert believe(answer()).manifest_digest == DIGEST
    assert believe(answer(version=8, manifest_digest=OTHER)).version == 8


@attack("release-malformed")
def no_signature_field() -> Mapping[str, object]:
    fields = answer()
    del fields["signature"]
    return fields


@attack("release-malformed")
def version_is_text() -> Mapping[str, object]:
    return answer() | {"version": "8"}


@attack("release-malformed")
def version_is_a_boolean() -> Mapping[str, object]:
    return answer() | {"version": True}


@attack("release-malformed")
def version_zero() -> Mapping[str, object]:
    return answer() | {"version": 0}


@attack("release-malformed")
def name_is_a_path() -> Mapping[str, object]:
    return answer() | {"name": "../tiny"}


@attack("release-malformed")
def digest_is_a_path() -> Mapping[str, object]:
    return answer() | {"manifest_digest": "sha256:../x"}


@attack("release-malformed")
def signature_is_no_base64url() -> Mapping[str, object]:
    return answer() | {"signature": "§" * 86}


@attack("release-malformed")
def signature_in_another_spelling() -> Mapping[str, object]:
    return answer() | {"signature": f"{answer()['signature']}=="}


@attack("release-key")
def signed_by_a_stranger() -> Mapping[str, object]:
    return answer(FOREIGN)


@attack("release-key")
def unsigned() -> Mapping[str, object]:
    return answer() | {"key_id": "", "signature": ""}


@attack("release-signature")
def signed_by_a_stranger_in_the_name_of_the_pinned_key() -> Mapping[str, object]:
    return answer(FOREIGN) | {"key_id": next(iter(KEYS))}


@attack("release-signature")
def empty_signature() -> Mapping[str, object]:
    return answer() | {"signature": ""}


@attack("release-signature")
def another_manifest_under_the_signature() -> Mapping[str, object]:
    return answer() | {"manifest_digest": OTHER}


@attack("release-signature")
def expiry_put_off() -> Mapping[str, object]:
    return answer(expires_at=NOW - 1) | {"expires_at": NOW + 10**6}


@attack("release-name")
def another_release() -> Mapping[str, object]:
    return answer(name="other")


@attack("release-expired")
def expired_in_this_second() -> Mapping[str, object]:
    return answer(expires_at=NOW)


@attack("release-rollback")
def older_version() -> Mapping[str, object]:
    return answer(version=6)


@attack("release-changed")
def same_version_with_another_manifest() -> Mapping[str, object]:
    return answer(manifest_digest=OTHER)


@pytest.mark.parametrize(("code", "build"), ATTACKS, ids=[build.__name__ for _, build in ATTACKS])
def test_device_refuses(code: str, build: Attack) -> None:
    with pytest.raises(PackageError) as refused:
        believe(build())
    assert refused.value.code == code


def test_a_pinned_key_under_a_wrong_id_is_no_key() -> None:
    wrong = {key_id_of(public_bytes(FOREIGN)): public_bytes(PINNED)}
    with pytest.raises(PackageError) as refused:
        verify_release(signed_release_from_json(answer(FOREIGN)), wrong, NOW, None)
    assert refused.value.code == "release-key"

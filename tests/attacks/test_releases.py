"""Releases that a device must not believe, at least one for each code of FORMAT 5."""

from collections.abc import Mapping
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


Answer = Mapping[str, object]
ATTACKS: list[tuple[str, Answer]] = [
    ("release-malformed", {key: value for key, value in answer().items() if key != "signature"}),
    ("release-malformed", answer() | {"version": "8"}),
    ("release-malformed", answer() | {"version": True}),
    ("release-malformed", answer() | {"version": 0}),
    ("release-malformed", answer() | {"name": "../tiny"}),
    ("release-malformed", answer() | {"manifest_digest": "sha256:../x"}),
    ("release-malformed", answer() | {"signature": "§" * 86}),
    ("release-malformed", answer() | {"signature": f"{answer()['signature']}=="}),
    ("release-key", answer(FOREIGN)),
    ("release-key", answer() | {"key_id": "", "signature": ""}),
    ("release-signature", answer(FOREIGN) | {"key_id": next(iter(KEYS))}),
    ("release-signature", answer() | {"signature": ""}),
    ("release-signature", answer() | {"manifest_digest": OTHER}),
    ("release-signature", answer(expires_at=NOW - 1) | {"expires_at": NOW + 10**6}),
    ("release-name", answer(name="other")),
    ("release-expired", answer(expires_at=NOW)),
    ("release-rollback", answer(version=6)),
    ("release-changed", answer(manifest_digest=OTHER)),
]


@pytest.mark.parametrize(("code", "fields"), ATTACKS)
def test_device_refuses(code: str, fields: Answer) -> None:
    with pytest.raises(PackageError, match=f"^{code}:"):
        believe(fields)


def test_a_pinned_key_under_a_wrong_id_is_no_key() -> None:
    wrong = {key_id_of(public_bytes(FOREIGN)): public_bytes(PINNED)}
    with pytest.raises(PackageError, match=r"^release-key:"):
        verify_release(signed_release_from_json(answer(FOREIGN)), wrong, NOW, None)

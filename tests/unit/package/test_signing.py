"""Signatures are plain Ed25519 over the bytes that FORMAT names, and do not depend on anything else."""

import base64

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from permille.package.signing import (
    Release,
    decode_base64url,
    encode_base64url,
    generate_key,
    key_id_of,
    public_bytes,
    sign_release,
    verify_release,
)

RELEASE = Release(name="tiny", version=3, manifest_digest="sha256:" + "a" * 64, expires_at=1_900_000_000)


def test_signed_bytes_are_those_of_format() -> None:
    assert RELEASE.signed_bytes() == (
        b'permille-release-1\0{"expires_at":1900000000,"manifest_digest":"sha256:' + b"a" * 64 + b'",'
        b'"name":"tiny","version":3}'
    )


def test_a_signature_verifies_and_is_a_function_of_key_and_release() -> None:
    key = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
    signed = sign_release(key, RELEASE)
    assert signed == sign_release(key, RELEASE) and len(signed.signature) == 64
    key.public_key().verify(signed.signature, RELEASE.signed_bytes())
    assert verify_release(signed, {signed.key_id: public_bytes(key)}, 1_800_000_000, 2) == RELEASE
    # RFC 8032's key of these 32 bytes, hashed.
    assert signed.key_id == "56475aa75463474c0285df5dbf2bcab7"


def test_the_first_release_and_the_same_one_again_are_fine() -> None:
    key = generate_key()
    signed = sign_release(key, RELEASE)
    keys = {key_id_of(public_bytes(key)): public_bytes(key)}
    for last_version, last_digest in ((None, None), (3, RELEASE.manifest_digest), (2, "sha256:" + "b" * 64)):
        believed = verify_release(signed, keys, 0, last_version, name="tiny", last_digest=last_digest)
        assert believed == RELEASE


def test_old_and_new_key_may_be_pinned_together() -> None:
    old, new = generate_key(), generate_key()
    pinned = {key_id_of(public_bytes(key)): public_bytes(key) for key in (old, new)}
    for key in (old, new):
        assert verify_release(sign_release(key, RELEASE), pinned, 0, None) == RELEASE


@given(st.binary(max_size=100))
def test_base64url_is_the_standard_one_without_padding(data: bytes) -> None:
    text = encode_base64url(data)
    assert text == base64.urlsafe_b64encode(data).decode().rstrip("=")
    assert decode_base64url(text) == data

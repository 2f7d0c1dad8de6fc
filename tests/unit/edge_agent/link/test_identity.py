"""Tests of the device's key: created on the device, private, and used to sign nonces only."""

import base64
import stat

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from permille.errors import OperatorError
from permille_agent.link.api import encode_bytes, load_identity, load_or_create_identity
from permille_agent.state.home import Home

DEVICE_ID = "0b9e4a52-8a3f-4c0e-9d5b-2f6a1c7e8d90"


def test_the_key_is_made_once_and_private(home: Home) -> None:
    assert load_identity(home) is None
    first = load_or_create_identity(home)
    assert stat.S_IMODE(home.identity_key.stat().st_mode) == 0o600
    assert load_or_create_identity(home).public_key == first.public_key
    assert home.identity_key.read_text().splitlines()[1] not in repr(first) + str(vars(first))


def test_a_signed_nonce_holds_for_its_device_alone(home: Home) -> None:
    identity = load_or_create_identity(home)
    signature = base64.urlsafe_b64decode(identity.sign_nonce(DEVICE_ID, "nonce") + "==")
    key = Ed25519PublicKey.from_public_bytes(base64.urlsafe_b64decode(identity.public_key + "=="))
    message = b"permille-device-token-1\0" + DEVICE_ID.encode() + b"\0nonce"
    key.verify(signature, message)  # raises if the signature is wrong
    with pytest.raises(InvalidSignature):
        key.verify(signature, message.replace(DEVICE_ID.encode(), b"dev_of_somebody_else"))


def test_a_key_that_others_can_read_is_refused(home: Home) -> None:
    load_or_create_identity(home)
    home.identity_key.chmod(0o644)
    with pytest.raises(OperatorError, match="chmod 600"):
        load_identity(home)


def test_another_kind_of_key_or_a_part_of_one_is_refused(home: Home) -> None:
    key = generate_private_key(SECP256R1())
    other = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    load_or_create_identity(home)
    for data in (other, home.identity_key.read_bytes()[:60]):
        home.identity_key.write_bytes(data)
        with pytest.raises(OperatorError, match="holds no Ed25519 private key"):
            load_identity(home)


@pytest.mark.parametrize("size", [0, 1, 2, 31, 32, 64])
def test_base64url_has_no_padding_and_comes_back(size: int) -> None:
    data = bytes(range(191, 191 + size % 64)) + bytes(size - size % 64)
    assert "=" not in encode_bytes(data)
    assert base64.urlsafe_b64decode(encode_bytes(data) + "==") == data

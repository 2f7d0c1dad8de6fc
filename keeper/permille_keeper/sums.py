"""Answer one question: check it, lift the masks of all its devices, add the noise that they were promised."""

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from permille.errors import PackageError
from permille.federation.masked import Opening, decode_opening, encode_answer, vector_size
from permille.federation.private_rounds import draw_round_noise
from permille.privacy.masks import mask_of, open_seed, seal_context
from permille_keeper.memory import Memory


def answer(data: bytes, key: X25519PrivateKey, memory: Memory) -> bytes:
    """The bytes that answer a question, durable.

    What devices were promised stands in the definition to which each of them bound its seal: a question with
    another definition opens no seal.

    Raises:
        PackageError: the question is malformed, of another keeper, of too few devices, or forged.
        SecondSetError: a device of it was in another set of the round.
    """
    opening = decode_opening(data)
    privacy = opening.definition.privacy
    if privacy is None or privacy.keeper is None:
        raise PackageError("round-content", "The federation has no keeper")
    if privacy.keeper.public_bytes != key.public_key().public_bytes_raw():
        raise PackageError(
            "round-binding", f"The federation names another keeper, with the key {privacy.keeper.key}"
        )
    return memory.answer_once(opening, lambda: _sum(opening, key))


def _sum(opening: Opening, key: X25519PrivateKey) -> bytes:
    total_V = np.zeros(vector_size(opening.definition), dtype=np.uint32)
    digest = opening.definition.digest
    for device_key, seal, _ in opening.entries:
        seed = open_seed(seal, key, seal_context(digest, opening.round_number, device_key))
        total_V += mask_of(seed, len(total_V))
    noise_V = draw_round_noise(opening.definition)
    return encode_answer(opening, total_V - noise_V.astype(np.uint32))

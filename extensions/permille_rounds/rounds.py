"""Rounds: the rule that combines the integers of many devices, and the history (FORMAT 13.3, 13.4).

A round adds up the integers of its devices, so order, machine and threads do not matter. The sum is
divided by the number (or weight) of the devices, and rounded half to even. If a device's vector is
longer than the clip, it is scaled down to the clip before the sum, and rounded toward zero. The rounded
quotients are published, so anyone can replay the history like a log.

Shapes: M = devices, K = steps of a round, J = directions of a step of the history, W = masked
weights, T = steps that a device did, Q = a device's queries.
"""

import hashlib
import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from numpy.typing import NDArray

from permille.digests import digest_bytes
from permille.errors import InputError, PackageError
from permille.zo.lattice import MAX_COEFFICIENT, STATE_LIMIT, state_digest
from permille.zo.records import weight_of_rows
from permille.zo.replay import replay
from permille.zo.varints import MAX_BYTES, decode_varints, encode_varints, unzigzag, zigzag
from permille_rounds.contribution import SIGNATURE_BYTES, Contribution
from permille_rounds.definition import MAX_DEVICES, MAX_WEIGHT, Definition, Rule, check_signature
from permille_rounds.masked import Masked

HEAD_MAGIC = b"PMLHED1\n"

_DOMAIN = b"permille-round-1\0"
# FORMAT 13.4: magic, definition, rounds done, reach, chain, state digest.
_HEAD = struct.Struct("<8s32sIQ32s32s")
HEAD_BYTES = _HEAD.size + SIGNATURE_BYTES
# FORMAT 13.3: round, payload size.
_SIZES = struct.Struct("<II")
_MOST_WEIGHT = MAX_DEVICES * MAX_WEIGHT


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Round:
    """The published record of a round. A void round has no weight and does not change the state.

    Attributes:
        weight_K: int64 [K], for each step the sum of the weights of the devices that did it.
        u_KJ: int64 [K, J], the history's coefficients.
    """

    number: int
    weight_K: NDArray[np.int64]
    u_KJ: NDArray[np.int64]

    def to_bytes(self) -> bytes:
        """Return the canonical bytes (FORMAT 13.3)."""
        numbers = np.concatenate([self.weight_K.astype(np.uint64), zigzag(self.u_KJ.reshape(-1))])
        payload = encode_varints(numbers)
        return _SIZES.pack(self.number, len(payload)) + payload


def void_round(definition: Definition, number: int) -> Round:
    """Return a round without devices. It does not change the state, but uses up its number."""
    shape = (definition.steps, definition.log.queries)
    return Round(number=number, weight_K=np.zeros(shape[0], np.int64), u_KJ=np.zeros(shape, np.int64))


def chain_after(chain: str, record: bytes, state_digest: str) -> str:
    """Return the digest of a history after one more round (FORMAT 13.4).

    Args:
        chain: the digest of the history before this round.
        record: the bytes of the round.
        state_digest: the digest of the state after the round.
    """
    chained = hashlib.sha256(_DOMAIN + chain.encode() + record + state_digest.encode())
    return f"sha256:{chained.hexdigest()}"


def combine(definition: Definition, number: int, contributions: Sequence[Contribution]) -> Round:
    """Compute a round from its devices' integers by the definition's rule. A round without devices is void.

    Raises:
        InputError: the contributions belong to another federation, round or start, there are too
            many (FORMAT 13.3), or the federation has privacy, so that its sums need noise.
        PackageError: `round-limit`: a coefficient exceeds the range of a log.
    """
    if definition.privacy is not None and contributions:
        raise InputError("The sums of this federation need noise, so `combine` cannot make its rounds.")
    check_together(definition, number, contributions)
    shape = (definition.steps, definition.log.queries)
    if definition.rule is Rule.TRIMMED:
        sum_KJ, divisor_K, weight_K = _trimmed(definition, contributions)
    else:
        sum_KJ, weight_K = np.zeros(shape, dtype=np.int64), np.zeros(definition.steps, dtype=np.int64)
        for each in contributions:
            c_TQ = clipped(each.c_TQ, definition.clip)
            # A device may stop early. It counts only for the steps that it did.
            sum_KJ[: len(c_TQ)] += each.weight * c_TQ
            weight_K[: len(c_TQ)] += each.weight
        divisor_K = weight_K
    return divided(definition, number, sum_KJ, divisor_K, weight_K)


def divided(
    definition: Definition,
    number: int,
    sum_KJ: NDArray[np.int64],
    divisor_K: NDArray[np.int64],
    weight_K: NDArray[np.int64],
) -> Round:
    """Make a round from a sum: `u = 2**(guard_bits + rate_shift) * sum / divisor`, rounded half to even.

    The coefficients of steps that no device did are 0 (FORMAT 13.3).

    Raises:
        PackageError: `round-limit`: a coefficient exceeds the range of a log.
    """
    # A negative shift would lose bits, so it multiplies the divisor instead.
    shift = definition.guard_bits + definition.rate_shift
    u_KJ = _divide_half_even(sum_KJ << max(shift, 0), np.maximum(divisor_K, 1)[:, None] << max(-shift, 0))
    if max(int(u_KJ.max()), -int(u_KJ.min())) > MAX_COEFFICIENT:
        raise PackageError("round-limit", f"expected coefficients within {MAX_COEFFICIENT}, got larger ones")
    return Round(number=number, weight_K=weight_K, u_KJ=u_KJ)


def clipped(c_TQ: NDArray[np.int64], clip: int | None) -> NDArray[np.int64]:
    """Return a device's vector, shortened in integers so that `sum c'**2 <= clip**2` holds exactly.

    A vector within the clip does not change. A longer vector is multiplied by
    `clip / (isqrt(sum c**2) + 1)` and rounded toward zero.

    Example:
        >>> clipped(np.array([[300, 400]]), 100)
        array([[59, 79]])
        >>> clipped(np.array([[30, 40]]), 100)
        array([[30, 40]])
    """
    squares = int((c_TQ * c_TQ).sum())
    if clip is None or squares <= clip * clip:
        return c_TQ
    # `isqrt` rounds down, so add 1. Otherwise the shortened vector could exceed the clip.
    norm = math.isqrt(squares) + 1
    shortened_TQ: NDArray[np.int64] = np.sign(c_TQ) * (np.abs(c_TQ) * clip // norm)
    return shortened_TQ


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The head of a federation's history (FORMAT 13.4).

    Attributes:
        number: the number of finished rounds.
        reach: no integer of the state is larger than this, by absolute value (FORMAT 7.3).
        chain: the digest of all rounds so far.
    """

    definition_digest: str
    number: int
    reach: int
    chain: str
    state_digest: str

    def signed(self, key: Ed25519PrivateKey) -> bytes:
        """Return the canonical bytes of the head, with the signature of the federation's private key."""
        digests = (digest_bytes(self.chain), digest_bytes(self.state_digest))
        named = digest_bytes(self.definition_digest)
        data = _HEAD.pack(HEAD_MAGIC, named, self.number, self.reach, *digests)
        return data + key.sign(data)

    @classmethod
    def read(cls, data: bytes, definition: Definition) -> "Head":
        """Parse and verify a head of this federation.

        Raises:
            PackageError: `round-content`, `round-signature`, or `round-chain` for another
                federation.
        """
        if len(data) != HEAD_BYTES or not data.startswith(HEAD_MAGIC):
            raise PackageError("round-content", f"expected a head, got {len(data)} bytes")
        check_signature(definition.key, data[_HEAD.size :], data[: _HEAD.size], "the federation")
        _, named, number, reach, chain, state = _HEAD.unpack_from(data)
        if named != digest_bytes(definition.digest):
            raise PackageError(
                "round-chain", f"The head belongs to federation {named.hex()}, not to {definition.digest}."
            )
        return cls(
            definition_digest=definition.digest,
            number=number,
            reach=reach,
            chain=f"sha256:{chain.hex()}",
            state_digest=f"sha256:{state.hex()}",
        )


@dataclass(slots=True)
class History:
    """The pooled state of a federation, and the chain of digests that identifies its history.

    Attributes:
        s_W: int64 [W], in the unit of the definition's log.
        chain: the digest of all rounds so far. Before the first round it is the definition's
            digest.
        reach: no integer of the state is larger than this, by absolute value (FORMAT 7.3).

    Example:

        history = History.begin(definition)
        history.apply(decode_segment(data, definition, max_bytes=len(data)))
        history.check_head(head)
    """

    definition: Definition
    s_W: NDArray[np.int64]
    chain: str
    number: int = 0
    reach: int = 0

    @classmethod
    def begin(cls, definition: Definition) -> "History":
        """Return the history before the first round. Its state is zero: the package's own weights."""
        zero = np.zeros(definition.log.k, dtype=np.int64)
        return cls(definition=definition, s_W=zero, chain=definition.digest)

    def apply(self, rounds: Iterable[Round]) -> None:
        """Apply the next rounds. A refused round changes nothing, but the rounds before it stay applied.

        Raises:
            PackageError: `round-content` for a wrong number or shape, or `round-limit`.
        """
        for each in rounds:
            self._check_next(each)
            # FORMAT 7.3: check before the sum, so that no order of additions can overflow.
            reach = self.reach + weight_of_rows(each.u_KJ)
            if reach > STATE_LIMIT:
                raise PackageError("round-limit", f"expected sum |u| within 2**53, got {reach}")
            # Directions depend on the step's number in the whole history.
            start = each.number * self.definition.steps
            # Make a new array, because copies of a history share the old one (`catch_up`).
            self.s_W = self.s_W + replay(self.definition.log, each.u_KJ, start=start)
            self.reach, self.number = reach, each.number + 1
            self.chain = chain_after(self.chain, each.to_bytes(), self.digest)

    @property
    def digest(self) -> str:
        """The digest of the pooled state (FORMAT 10)."""
        log = self.definition.log
        return state_digest(self.s_W, mask_digest=log.mask_digest, step_unit_exponent=log.step_unit_exponent)

    @property
    def head(self) -> Head:
        """The head of this history."""
        return Head(
            definition_digest=self.definition.digest,
            number=self.number,
            reach=self.reach,
            chain=self.chain,
            state_digest=self.digest,
        )

    def check_head(self, data: bytes) -> None:
        """Check that a signed head belongs to exactly this history.

        Raises:
            PackageError: as for `Head.read`, or `round-chain` for another history.
        """
        if Head.read(data, self.definition) != self.head:
            raise PackageError(
                "round-chain",
                f"The head is that of another history, not of this one: {self.number} rounds with chain "
                f"{self.chain}.",
            )

    @classmethod
    def resume(cls, definition: Definition, s_W: NDArray[np.int64], head: bytes) -> "History":
        """Return the history at a checkpoint: a packed state (FORMAT 11) and the head that names it.

        Raises:
            PackageError: as for `check_head`.
        """
        named = Head.read(head, definition)
        history = cls.begin(definition)
        history.s_W, history.number, history.reach = s_W, named.number, named.reach
        history.chain = named.chain
        history.check_head(head)
        return history

    def _check_next(self, each: Round) -> None:
        rules = self.definition
        shape = (rules.steps, rules.log.queries)
        if each.number != self.number or each.number >= rules.rounds or each.u_KJ.shape != shape:
            raise PackageError(
                "round-content",
                f"expected round {self.number} of {rules.rounds} with {shape} coefficients, "
                f"got {each.number} with {each.u_KJ.shape}",
            )


def decode_segment(data: bytes, definition: Definition, *, max_bytes: int) -> list[Round]:
    """Parse the consecutive rounds that a returning device has missed. Only `check_head` verifies them.

    Raises:
        PackageError: `round-limit` or `round-content` (FORMAT 13.3).
    """
    if len(data) > max_bytes:
        raise PackageError("round-limit", f"expected at most {max_bytes} bytes, got {len(data)}")
    values = definition.steps * (1 + definition.log.queries)
    rounds = []
    position = 0
    while position < len(data):
        if len(data) - position < _SIZES.size:
            raise PackageError("round-content", f"expected a round, got {len(data) - position} bytes")
        number, size = _SIZES.unpack_from(data, position)
        position += _SIZES.size
        # An integer takes 1 to 5 bytes, so this bounds memory before parsing.
        if not values <= size <= min(values * MAX_BYTES, len(data) - position):
            raise PackageError("round-content", f"expected {values} integers, got {size} bytes")
        rounds.append(_decode_round(data[position : position + size], number, definition))
        position += size
    return rounds


def _decode_round(payload: bytes, number: int, definition: Definition) -> Round:
    try:
        numbers = decode_varints(payload)
    except PackageError as exc:
        raise PackageError("round-content", str(exc)) from exc
    steps, queries = definition.steps, definition.log.queries
    if len(numbers) != steps * (1 + queries):
        raise PackageError("round-content", f"expected {steps * (1 + queries)} integers, got {len(numbers)}")
    weight_K = numbers[:steps].astype(np.int64)
    u_KJ = unzigzag(numbers[steps:]).reshape(steps, queries)
    if int(weight_K.max()) > _MOST_WEIGHT or int(np.abs(u_KJ).max()) > MAX_COEFFICIENT:
        raise PackageError(
            "round-content", "expected weights and coefficients of FORMAT 13.3, got larger ones"
        )
    # A device does its steps in order, so a later step never has more weight than an earlier one.
    if u_KJ[weight_K == 0].any() or (np.diff(weight_K) > 0).any():
        raise PackageError(
            "round-content", "Weights must not rise, and a step without devices must not move the state."
        )
    return Round(number=number, weight_K=weight_K, u_KJ=u_KJ)


def check_together(
    definition: Definition, number: int, contributions: Sequence[Contribution | Masked]
) -> None:
    """Check that contributions belong to the same federation, round and start. Raises InputError."""
    if len(contributions) > MAX_DEVICES:
        raise InputError(f"A round has at most {MAX_DEVICES} devices, not {len(contributions)}.")
    for each in contributions:
        if each.definition.digest != definition.digest or each.round_number != number:
            raise InputError(
                f"A contribution belongs to round {each.round_number} of {each.definition.digest}, "
                f"not to round {number} of {definition.digest}."
            )
    starts = {each.start_digest for each in contributions}
    if len(starts) > 1:
        raise InputError(f"The contributions start from different states: {', '.join(sorted(starts))}.")


def _trimmed(
    definition: Definition, contributions: Sequence[Contribution]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return the sums without the extremes, and the numbers of devices.

    Returns:
        The sums [K, J], the number of devices in the sum of each step [K], and the number of all devices
        that did the step [K].
    """
    shape = (definition.steps, definition.log.queries)
    sum_KJ, divisor_K = np.zeros(shape, dtype=np.int64), np.zeros(definition.steps, dtype=np.int64)
    all_K = np.zeros(definition.steps, dtype=np.int64)
    vectors = [clipped(each.c_TQ, definition.clip) for each in contributions]
    for step in range(definition.steps):
        rows = [c_TQ[step] for c_TQ in vectors if len(c_TQ) > step]
        # No device skips a step, so later steps have no rows, either.
        if not rows:
            break
        c_MJ = np.sort(np.stack(rows), axis=0)
        # At least one value must remain, also at 50 percent.
        cut = min(len(rows) * definition.trim_percent // 100, (len(rows) - 1) // 2)
        sum_KJ[step] = c_MJ[cut : len(rows) - cut].sum(axis=0)
        divisor_K[step], all_K[step] = len(rows) - 2 * cut, len(rows)
    return sum_KJ, divisor_K, all_K


def _divide_half_even(numerator: NDArray[np.int64], denominator: NDArray[np.int64]) -> NDArray[np.int64]:
    # `divmod` rounds down, so the remainder is never negative, not even for a negative numerator.
    quotient, rest = np.divmod(numerator, denominator)
    quotient += (2 * rest > denominator) | ((2 * rest == denominator) & (quotient % 2 == 1))
    return np.asarray(quotient, dtype=np.int64)

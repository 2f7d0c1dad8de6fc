"""The pooled state of a federation on this device, as it was signed: kept, loaded, brought up to date.

What is kept is a checkpoint and its head (FORMAT 13.5), so each loading checks the federation's signature,
chain and digest. A file that fails is discarded and the checkpoint fetched again. What a service sends must
go on from what is held: another history is refused by name, never taken in its place.
"""

from collections.abc import Callable

from permille.errors import PackageError
from permille.federation.catch_up import PooledCheckpoint, caught_up, encode_catch_up, pack_state
from permille.federation.definition import Definition
from permille.federation.rounds import HEAD_BYTES, History
from permille.files import write_atomic
from permille_agent.federation.membership import Membership

_ROUNDS_BYTES = 64 << 20
_WEIGHT_BYTES = 8

# Asks the service for what follows a round, in at most so many bytes.
Fetch = Callable[[int, int], bytes]


def max_bytes(definition: Definition) -> int:
    """Return the limit of the bytes of a catch-up, which has a state and rounds."""
    return _ROUNDS_BYTES + _WEIGHT_BYTES * definition.log.k


def load_history(membership: Membership, definition: Definition) -> History:
    """Read where this device stands; the beginning where nothing is kept.

    Raises:
        PackageError: the file is damaged.
    """
    begin = History.begin(definition)
    try:
        data = membership.history.read_bytes()
    except FileNotFoundError:
        return begin
    return caught_up(begin, data, max_bytes=len(data))


def update_history(membership: Membership, definition: Definition, offered: int, fetch: Fetch) -> History:
    """Follow the federation to where it is now; durable on return.

    Args:
        offered: how many rounds the service says are done; where these are here, nothing is fetched.

    Raises:
        PackageError: `round-chain`: the service has another history, or an older one, than this device;
            another code where what it sent breaks a rule. What is held stays.
    """
    try:
        held = load_history(membership, definition)
    except PackageError:  # damaged on the disk: what is signed comes again
        held = History.begin(definition)
    if offered < held.number:
        raise PackageError(
            "round-chain",
            f"The service has {offered} rounds, fewer than the {held.number} that this device has seen",
        )
    if offered == held.number:
        return held
    limit = max_bytes(definition)
    data = fetch(held.number, limit)
    found = caught_up(held, data, max_bytes=limit)
    if found.number != held.number:
        checkpoint = PooledCheckpoint(state=pack_state(definition, found.s_W), head=data[-HEAD_BYTES:])
        kept = encode_catch_up(checkpoint, [], checkpoint.head)
        write_atomic(membership.history, kept, mode=0o600)
    return found

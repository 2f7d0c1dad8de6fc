"""Memberships of this device in federations, and the files of each.

Below `federations/<digits of the definition's digest>/`:

    joined.json          the user's choice, and how often it was taken back
    definition.json      the signed definition (FORMAT 13.1)
    history.bin          the pooled state, its chain and the signed head that names both (FORMAT 13.5)
    standing.json        what the service said last, and what became of the device's parts
    adopted.*            the state that trainings begin from (`adopted.py`)
    rounds/<n>/          the device's part of a round (`part.py`)

Nothing that a service sends joins: only `join` does, which the user calls. A contribution is made under one
number of withdrawals and is not sent under another, so a choice counts at once, whatever is under way.

Of the history a checkpoint and its head are kept (FORMAT 13.5), so each loading checks the federation's
signature, chain and digest. A file that fails is discarded and the checkpoint fetched again. What a service
sends must go on from what is held: another history is refused by name, never taken in its place.
"""

import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from filelock import FileLock

from permille.digests import digest_of
from permille.errors import InputError, OperatorError, PackageError
from permille.federation.catch_up import PooledCheckpoint, caught_up, encode_catch_up, pack_state
from permille.federation.definition import MAX_BYTES, Definition
from permille.federation.rounds import HEAD_BYTES, History
from permille.files import fsync_folder, write_atomic
from permille_agent.state.home import Home, overwrite_record, read_record, write_record

_ROUNDS_BYTES = 64 << 20
_WEIGHT_BYTES = 8

# Asks the service for what follows a round, in at most so many bytes.
Fetch = Callable[[int, int], bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """Contents of `joined.json`.

    Attributes:
        federation_id: by which the service knows it.
        joined: what the user chose last.
        withdrawals: one more with every time that the user left.
        told: whether the service knows of it.
    """

    federation_id: str
    name: str
    joined: bool = True
    withdrawals: int = 0
    told: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Contents of `standing.json`: the results of the exchange with the service.

    Attributes:
        number: rounds done, as far as this device has followed.
        sent: contributions that the service took.
        last_round: the device's last part.
        last: what became of it: sent, late, refused or failed.
        waiting_for: why the device takes no part now.
    """

    number: int = 0
    sent: int = 0
    last_round: int | None = None
    last: str = ""
    adopted_round: int | None = None
    waiting_for: str = ""


@dataclass(frozen=True, slots=True)
class Membership:
    """The folder of a federation. Make it with `memberships`, `named` or `join`."""

    path: Path

    @property
    def digest(self) -> str:
        """Digest of the definition: the federation's name."""
        return f"sha256:{self.path.name}"

    @property
    def history(self) -> Path:
        """Return the folder of the pooled state and its head."""
        return self.path / "history.bin"

    def choice(self) -> Joined:
        """Read the user's choice; without a readable one there is none to join.

        Raises:
            OperatorError: the file is gone or damaged.
        """
        found = read_record(self.path / "joined.json", Joined)
        if found is None:
            raise OperatorError(f"{self.path} has no joined.json. Leave the federation and join again.")
        return found

    def definition(self) -> Definition:
        """Read the definition that was signed.

        Raises:
            PackageError: `round-definition`: the file is damaged or gone.
        """
        try:
            with (self.path / "definition.json").open("rb") as file:
                data = file.read(MAX_BYTES + 1)
        except OSError as exc:
            raise PackageError("round-definition", f"{self.path} holds no definition: {exc}") from exc
        return read_definition(data, self.digest)

    def standing(self) -> Standing:
        """Read what the exchange has led to."""
        return read_record(self.path / "standing.json", Standing) or Standing()

    def note(self, standing: Standing) -> None:
        """Write it, where it changed."""
        if standing != self.standing():
            write_record(self.path / "standing.json", standing)

    def end(self, number: int, outcome: str) -> None:
        """Note what became of the device's part of a round; it has no other part of it."""
        standing = self.standing()
        sent = standing.sent + (outcome == "sent")
        self.note(replace(standing, last_round=number, last=outcome[:500], sent=sent))

    def has_ended(self, number: int) -> bool:
        """Return whether the device's part of a round is over."""
        standing = self.standing()
        return standing.last_round is not None and standing.last_round >= number

    def agrees(self, withdrawals: int) -> bool:
        """Return whether the user is still a member and has not withdrawn since this count."""
        choice = self.choice()
        return choice.joined and choice.withdrawals == withdrawals

    def choose(self, change: Callable[[Joined], Joined]) -> Joined:
        """Change the user's choice durably, safe against concurrent changes."""
        with FileLock(self.path / "joined.lock", timeout=10.0, mode=0o600):
            chosen = change(self.choice())
            overwrite_record(self.path / "joined.json", chosen)
        return chosen


def memberships(home: Home) -> list[Membership]:
    """List all federations that this device joined or left, by digest."""
    return [Membership(path.parent) for path in sorted(home.federations.glob("*/joined.json"))]


def named(home: Home, name: str) -> Membership:
    """Find the one federation that a user names, by its name or how its digest begins.

    Raises:
        InputError: there is none, or more than one.
    """
    found = [each for each in memberships(home) if _is_named(each, name)]
    if not name or len(found) != 1:
        raise InputError(
            f"This device has joined {len(found)} federations named {name!r:.60}. See `federations status`."
        )
    return found[0]


def read_definition(data: bytes, digest: str) -> Definition:
    """Read a definition of this digest.

    Raises:
        PackageError: `round-definition`: no definition, or another.
    """
    if (got := digest_of(data)) != digest:
        raise PackageError("round-definition", f"expected the definition {digest}, got {got}")
    return Definition.from_bytes(data)


def join(home: Home, definition: Definition, *, federation_id: str, name: str) -> Membership:
    """Make this device a member by the user's choice; durable on return. The service is told later."""
    membership = Membership(home.federations / definition.digest.removeprefix("sha256:"))
    membership.path.mkdir(parents=True, exist_ok=True, mode=0o700)
    fsync_folder(home.federations)
    chosen = Joined(federation_id=federation_id, name=name)
    with FileLock(membership.path / "joined.lock", timeout=10.0, mode=0o600):
        write_atomic(membership.path / "definition.json", definition.to_bytes(), mode=0o600)
        try:
            known = read_record(membership.path / "joined.json", Joined)
        except OperatorError:
            known = None
        # Else a number that nothing was agreed under
        withdrawals = secrets.randbits(48) if known is None else known.withdrawals
        write_record(membership.path / "joined.json", replace(chosen, withdrawals=withdrawals))
    return membership


def leave(membership: Membership) -> None:
    """Take the choice back, durably, and erase all but that; the service is told later."""
    take_back(membership)
    _erase_left(membership)


def take_back(membership: Membership) -> None:
    """Take the choice back: nothing is sent from now on."""
    membership.choose(
        lambda known: replace(known, joined=False, told=False, withdrawals=known.withdrawals + 1)
    )


def drop_left(membership: Membership, choice: Joined) -> None:
    """Erase the rest of a federation that the user left, once the service knows; nothing where the user has
    joined again meanwhile."""
    with FileLock(membership.path / "joined.lock", timeout=10.0, mode=0o600):
        if membership.choice() == choice:
            _erase_left(membership)
            (membership.path / "joined.json").unlink()
    if not (membership.path / "joined.json").exists():
        shutil.rmtree(membership.path, ignore_errors=True)


def _erase_left(membership: Membership) -> None:
    for path in membership.path.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)  # a part that ends just now writes there
        elif path.name not in ("joined.json", "joined.lock"):
            path.unlink(missing_ok=True)


def _is_named(membership: Membership, name: str) -> bool:
    try:
        known = membership.choice().name
    except OperatorError:  # damaged; its folder still has a name
        known = ""
    return name == known or membership.path.name.startswith(name.removeprefix("sha256:"))


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

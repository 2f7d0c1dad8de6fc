"""Memberships of this device in federations, and the files of each.

Below `federations/<digits of the definition's digest>/`:

    joined.json          the user's choice, and the number of withdrawals
    definition.json      the signed definition (FORMAT 13.1)
    history.bin          checkpoint of the history: pooled state, chain and signed head (FORMAT 13.5)
    standing.json        results of the last exchange with the service
    adopted.*            the state that trainings start from (`training/adopted.py`)
    rounds/<n>/          the device's work for one round, called its part (`part.py`)

Consent:

- Only the user's `join` makes the device a member. No message of a service does.
- A contribution is sent only if the number of withdrawals is still the same as at the invitation. So leaving
  takes effect at once.

History:

- Each load of the history checks its signature, chain and digest. A damaged checkpoint is fetched again.
- A service must continue the history that the device knows. A different or older history is refused.
"""

import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from filelock import FileLock

from permille.digests import digest_of
from permille.errors import InputError, OperatorError, PackageError
from permille.files import fsync_folder, write_atomic
from permille_agent.state.home import Home, overwrite_record, read_record, write_record
from permille_rounds.catch_up import PooledCheckpoint, caught_up, encode_catch_up, pack_state
from permille_rounds.definition import MAX_BYTES, Definition
from permille_rounds.rounds import HEAD_BYTES, History

# Limits of a catch-up, the service's answer with a state and the rounds after it.
_ROUNDS_BYTES = 64 << 20  # for all rounds
_WEIGHT_BYTES = 8  # for one weight of the state

# Takes the number of a round and a limit of bytes. Returns the history after that round.
Fetch = Callable[[int, int], bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """Contents of `joined.json`.

    Attributes:
        federation_id: id of the federation at the service.
        name: name of the federation.
        joined: whether the user is a member.
        withdrawals: number of times that the user has left.
        told: whether the service knows the user's choice.
    """

    federation_id: str
    name: str
    joined: bool = True
    withdrawals: int = 0
    told: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundsProgress:
    """Contents of `standing.json`: the results of the exchange with the service.

    Attributes:
        number: number of finished rounds that this device has followed.
        sent: number of contributions that the service accepted.
        last_round: last round that this device has worked on.
        last: result of that work: sent, not sent, late, refused or failed.
        adopted_round: round whose state trainings start from.
        waiting_for: why the device cannot take part now.
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
        """Digest of the definition."""
        return f"sha256:{self.path.name}"

    @property
    def history(self) -> Path:
        """File of the checkpoint."""
        return self.path / "history.bin"

    def choice(self) -> Joined:
        """Read the user's choice.

        Raises:
            OperatorError: the file is missing or damaged, which counts as no consent.
        """
        found = read_record(self.path / "joined.json", Joined)
        if found is None:
            raise OperatorError(
                f"{self.path} has no joined.json. Run `permille-agent federations join` again."
            )
        return found

    def definition(self) -> Definition:
        """Read the signed definition.

        Raises:
            PackageError: the file is missing or damaged (`round-definition`).
        """
        try:
            with (self.path / "definition.json").open("rb") as file:
                # One byte more than allowed, so that a longer file is refused instead of cut.
                data = file.read(MAX_BYTES + 1)
        except OSError as exc:
            raise PackageError("round-definition", f"{self.path} holds no definition: {exc}") from exc
        return read_definition(data, self.digest)

    def standing(self) -> RoundsProgress:
        """Read `standing.json`."""
        return read_record(self.path / "standing.json", RoundsProgress) or RoundsProgress()

    def note(self, standing: RoundsProgress) -> None:
        """Write `standing.json` if it changed."""
        if standing != self.standing():
            write_record(self.path / "standing.json", standing)

    def end(self, number: int, outcome: str) -> None:
        """Store the result of this device's work for a round. The device does not take part in it again."""
        standing = self.standing()
        sent = standing.sent + (outcome == "sent")
        self.note(replace(standing, last_round=number, last=outcome[:500], sent=sent))

    def has_ended(self, number: int) -> bool:
        """Return whether this device is done with a round."""
        standing = self.standing()
        # Round numbers only rise, so a result of a later round ends all earlier ones.
        return standing.last_round is not None and standing.last_round >= number

    def document(self) -> dict[str, object]:
        """Return the state of the federation for `status`."""
        choice, standing = self.choice(), self.standing()
        return {
            "name": choice.name,
            "definition": self.digest,
            "joined": choice.joined,
            "rounds_done": standing.number,
            "sent": standing.sent,
            "last_round": standing.last_round,
            "last": standing.last,
            "adopted_round": standing.adopted_round,
            "waiting_for": standing.waiting_for if choice.joined else "the service to learn that you left",
        }

    def agrees(self, withdrawals: int) -> bool:
        """Return whether the user is a member, and has not left since this count of withdrawals."""
        choice = self.choice()
        return choice.joined and choice.withdrawals == withdrawals

    def choose(self, change: Callable[[Joined], Joined]) -> Joined:
        """Change the user's choice durably, under its own lock."""
        # A training may hold the writers' lock for hours, but leaving must take effect at once.
        with FileLock(self.path / "joined.lock", timeout=10.0, mode=0o600):
            chosen = change(self.choice())
            # Overwrite in place if the disk is full, because the user must always be able to leave.
            overwrite_record(self.path / "joined.json", chosen)
        return chosen


def memberships(home: Home) -> list[Membership]:
    """Return the joined federations. A federation that was left stays in the list until the service knows."""
    return [Membership(path.parent) for path in sorted(home.federations.glob("*/joined.json"))]


def named(home: Home, name: str) -> Membership:
    """Return the joined federation with this name, or the one whose digest begins with `name`.

    Raises:
        InputError: the name fits no federation or several.
    """
    found = [each for each in memberships(home) if _is_named(each, name)]
    if not name.removeprefix("sha256:") or len(found) != 1:
        raise InputError(
            f"This device has joined {len(found)} federations named {name!r:.60}. Run `permille-agent "
            "federations status` to see them."
        )
    return found[0]


def read_definition(data: bytes, digest: str) -> Definition:
    """Parse a definition after a check of its digest.

    Raises:
        PackageError: the digest differs, or the definition is malformed (`round-definition`).
    """
    if (got := digest_of(data)) != digest:
        raise PackageError("round-definition", f"expected the definition {digest}, got {got}")
    return Definition.from_bytes(data)


def join(home: Home, definition: Definition, *, federation_id: str, name: str) -> Membership:
    """Make this device a member durably, by the user's choice. The caller tells the service."""
    membership = Membership(home.federations / definition.digest.removeprefix("sha256:"))
    membership.path.mkdir(parents=True, exist_ok=True, mode=0o700)
    fsync_folder(home.federations)
    chosen = Joined(federation_id=federation_id, name=name)
    with FileLock(membership.path / "joined.lock", timeout=10.0, mode=0o600):
        # Write the definition first, because `memberships` finds a federation as soon as it has a choice.
        write_atomic(membership.path / "definition.json", definition.to_bytes(), mode=0o600)
        try:
            known = read_record(membership.path / "joined.json", Joined)
        except OperatorError:
            known = None
        # If the count cannot be read, a random one differs from the count at any earlier consent.
        withdrawals = secrets.randbits(48) if known is None else known.withdrawals
        write_record(membership.path / "joined.json", replace(chosen, withdrawals=withdrawals))
    return membership


def leave(membership: Membership) -> None:
    """Leave durably, and erase all files except the choice. The caller tells the service."""
    # Withdraw consent first, so that nothing is sent after a kill in between.
    take_back(membership)
    _erase_left(membership)


def take_back(membership: Membership) -> None:
    """Withdraw consent, so that nothing more is sent."""
    membership.choose(
        lambda known: replace(known, joined=False, told=False, withdrawals=known.withdrawals + 1)
    )


def drop_left(membership: Membership, choice: Joined) -> None:
    """Erase the choice after the service knows of it, unless the user has joined again since."""
    with FileLock(membership.path / "joined.lock", timeout=10.0, mode=0o600):
        if membership.choice() == choice:
            _erase_left(membership)
            (membership.path / "joined.json").unlink()
    # Delete the folder only after the lock is released, because the lock's file is in the folder.
    if not (membership.path / "joined.json").exists():
        shutil.rmtree(membership.path, ignore_errors=True)


def _erase_left(membership: Membership) -> None:
    for path in membership.path.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)  # a training may still write to it
        # The choice stays until the service knows it. Another process may hold its lock.
        elif path.name not in ("joined.json", "joined.lock"):
            path.unlink(missing_ok=True)


def _is_named(membership: Membership, name: str) -> bool:
    try:
        known = membership.choice().name
    except OperatorError:  # a damaged choice can still be named by its digest
        known = ""
    return name == known or membership.path.name.startswith(name.removeprefix("sha256:"))


def max_bytes(definition: Definition) -> int:
    """Return the largest size of a catch-up, which has a state and the rounds after it."""
    return _ROUNDS_BYTES + _WEIGHT_BYTES * definition.log.k


def load_history(membership: Membership, definition: Definition) -> History:
    """Return the history on this disk, or its beginning if there is no file.

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
    """Update the history to the newest round, durably.

    Args:
        membership: the federation on this device.
        definition: its definition.
        offered: number of finished rounds at the service. If this device has all of them, nothing is fetched.
        fetch: fetches the history after a round.

    Raises:
        PackageError: the service has a different or older history (`round-chain`), or the history breaks a
            rule. The known history is kept.
    """
    try:
        held = load_history(membership, definition)
    except PackageError:  # damaged on this disk, so the signed history is fetched again
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
        # FORMAT 13.5: the bytes end with the signed head. It proves the state, so the rounds are not stored.
        checkpoint = PooledCheckpoint(state=pack_state(definition, found.s_W), head=data[-HEAD_BYTES:])
        kept = encode_catch_up(checkpoint, [], checkpoint.head)
        write_atomic(membership.history, kept, mode=0o600)
    return found

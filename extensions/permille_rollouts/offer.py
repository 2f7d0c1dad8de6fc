"""The signed record of a rollout, from which a device decides by itself whether it takes part.

The record is the `custom` field of a TUF target (FORMAT 14), which is signed. So nobody between service and
device can open a wave, or move a device to another wave. Nobody can hide a halt for longer than the lifetime
of TUF's timestamp.
"""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

from permille.errors import InputError
from permille_rollouts.windows import Window

# The number of places (see `place_of`). A wave of 1 % has 100 places.
PARTS: Final = 10_000
# A group that is chosen by device id or by tag has at most this many members, because the record lists a
# digest of each member.
MAX_MEMBERS: Final = 2000
# The largest integer that all JSON readers represent exactly (RFC 8259, section 6).
_MOST: Final = 2**53 - 1
_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
_NUMBERS: Final = re.compile(r"[0-9]{1,5}(\.[0-9]{1,5}){2}", re.ASCII)


class RolloutState(StrEnum):
    """State of a rollout.

    - draft: no wave is open yet.
    - running: waves are open.
    - paused: it may continue. Devices that have the version keep it.
    - stopped: it cannot continue. Devices that have the version keep it.
    - done: all devices take the version.
    - reverted: all devices take a new version, which has the package of the version before the rollout.
    """

    DRAFT = "draft"
    RUNNING = "running"
    PAUSED = "paused"
    STOPPED = "stopped"
    DONE = "done"
    REVERTED = "reverted"


class ReportCode(StrEnum):
    """Result of a version on a device. The service sets SILENT if no report came in time."""

    OK = "ok"
    REFUSED = "refused"
    INTEGRITY = "integrity"
    CRASH = "crash"
    INSTALL = "install"
    SILENT = "silent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts about a device, by which groups select devices.

    Attributes:
        engine: the engine of the newest run; None before the first run.
        tags: the tags that the device's owner has set. The service also knows tags that operators set.
    """

    agent_version: str
    engine: str | None
    memory_bytes: int | None
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The devices of a group. A device must meet all conditions that are given.

    Attributes:
        agent_version: the lowest version of the agent.
        engines: one of these engines must have computed the device's newest run. If empty, every engine fits.
        memory_bytes: the least memory.
        members: digests of the devices in the group (`member_digest`); None for any device.
    """

    agent_version: str | None = None
    engines: tuple[str, ...] = ()
    memory_bytes: int = 0
    members: tuple[str, ...] | None = None

    def fits(self, facts: Facts) -> bool:
        """Return whether the facts of a device meet all conditions except membership.

        Example:
            >>> laptop = Facts(agent_version="1.4.0", engine="torch", memory_bytes=16 << 30)
            >>> Choice(agent_version="1.10.0").fits(laptop), Choice(memory_bytes=8 << 30).fits(laptop)
            (False, True)
        """
        if self.agent_version is not None and numbers(facts.agent_version) < numbers(self.agent_version):
            return False
        if self.engines and facts.engine not in self.engines:
            return False
        # Unknown memory counts as 0, so that it meets no condition above 0.
        return (facts.memory_bytes or 0) >= self.memory_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A rollout in the form that is signed.

    Attributes:
        rollout: the id of the rollout.
        version: the version that devices in an open wave install.
        places: a device may take the version if its place (`place_of`) is below this number.
        window: the times at which devices may begin to install; None for any time.
    """

    rollout: str
    version: int
    state: RolloutState
    places: int
    choice: Choice
    window: Window | None

    @classmethod
    def parse(cls, document: object) -> "Offer":
        """Parse a record. Raises InputError for anything else."""
        try:
            fields: dict[str, Any] = dict(document)  # type: ignore[call-overload]
            choice = dict(fields.pop("choice"))
            members, engines = choice.pop("members"), choice.pop("engines")
            if not isinstance(engines, list) or not isinstance(members, list | None):
                raise ValueError("engines or members are no list")
            read = Choice(
                members=None if members is None else tuple(members), engines=tuple(engines), **choice
            )
            window = fields.pop("window")
            offer = cls(
                state=RolloutState(fields.pop("state")),
                choice=read,
                window=None if window is None else Window(**window),
                **fields,
            )
            whole = (offer.version, offer.places, read.memory_bytes)
            # `type`, not `isinstance`: True must not pass for an integer.
            if not all(type(number) is int and 0 <= number <= _MOST for number in whole):
                raise ValueError("a number out of range")
            if offer.version < 1 or offer.places > PARTS or len(members or ()) > MAX_MEMBERS:
                raise ValueError("version, places or members out of range")
            texts = (offer.rollout, read.agent_version or "", *engines, *(read.members or ()))
            # The device sends its token to a path of the service that contains the rollout's id. So this id
            # must not lead to another path.
            if not all(isinstance(text, str) for text in texts) or not _ID.fullmatch(offer.rollout):
                raise ValueError("a text in another form")
        except (AttributeError, KeyError, TypeError, ValueError, InputError) as exc:
            raise InputError(f"This is not the record of a rollout: {exc}"[:300]) from exc
        return offer

    def to_document(self) -> dict[str, Any]:
        """Return the record as JSON values."""
        document = asdict(self)
        document["choice"]["engines"] = list(self.choice.engines)
        if self.choice.members is not None:
            document["choice"]["members"] = list(self.choice.members)
        return document

    def may_begin(self, at: datetime) -> bool:
        """Return whether a device may begin to install at this moment."""
        return self.window is None or self.window.is_open(at)

    def is_for(self, device_id: str, facts: Facts) -> bool:
        """Return whether a device takes the version now: its wave is open, and it is in the group."""
        if self.state is not RolloutState.RUNNING or place_of(self.rollout, device_id) >= self.places:
            return False
        members = self.choice.members
        return self.choice.fits(facts) and (
            members is None or member_digest(self.rollout, device_id) in members
        )


def place_of(rollout_id: str, device_id: str) -> int:
    """Return a device's place in a rollout, from 0 to 9,999. The lower the place, the earlier is its wave.

    The place is a hash, so no row stores it. A device has a different place in each rollout, so no device is
    always first.

    Example:
        >>> place_of("rollout_1", "dev_1") == place_of("rollout_1", "dev_1")
        True
    """
    # The hash has 64 bits, so the remainder is nearly uniform: its bias is below 1e-15.
    return int.from_bytes(_hash("wave", rollout_id, device_id)[:8], "big") % PARTS


def member_digest(rollout_id: str, device_id: str) -> str:
    """Return the digest that stands for a device in a record, so that the record does not show its id."""
    # 64 bits suffice to tell 2,000 members apart. The hash includes the rollout's id, so a device has a
    # different digest in each rollout.
    return _hash("member", rollout_id, device_id)[:8].hex()


def members_of(rollout_id: str, device_ids: Iterable[str]) -> tuple[str, ...]:
    """Return the members of a group for a record, sorted. Raises InputError if they are too many."""
    members = tuple(sorted(member_digest(rollout_id, one) for one in device_ids))
    if len(members) > MAX_MEMBERS:
        raise InputError(
            f"A group by device id or tag has at most {MAX_MEMBERS} devices, this one has {len(members)}. "
            "Use a rule by agent version, engine or memory, or tag fewer devices."
        )
    return members


def numbers(version: str) -> tuple[int, ...]:
    """Return the three numbers of a version for comparisons, or zeros for any other text.

    Example:
        >>> numbers("1.10.0") > numbers("1.9.2"), numbers("unknown")
        (True, (0, 0, 0))
    """
    return tuple(map(int, version.split("."))) if _NUMBERS.fullmatch(version) else (0, 0, 0)


def _hash(what: str, rollout_id: str, device_id: str) -> bytes:
    return hashlib.sha256(f"permille-rollout-1\0{what}\0{rollout_id}\0{device_id}".encode()).digest()

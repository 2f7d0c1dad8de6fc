"""A single pass over the rounds of this device, for scripts and programs that embed the agent.

    took = take_part(home, [Path("notes")])

The daemon does the same in pieces: `exchange` at each poll, `train_part` in a child when its policy allows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from permille.errors import InputError, PackageError
from permille_agent.federation.exchange import Exchanged, exchange, fetch_definition, find_offer
from permille_agent.federation.membership import Membership, join
from permille_agent.federation.part import train_part, waiting_part
from permille_agent.link.enrolment import Connect, connect, open_api, require_enrolment
from permille_agent.state.home import Home
from permille_agent.state.lock import hold_lock, hold_rounds_lock
from permille_agent.training.options import RunContext


@dataclass(frozen=True, slots=True, kw_only=True)
class TookPart:
    """Result of a pass: invitations accepted, parts trained, contributions that the service took."""

    invited: int
    trained: int
    sent: int


def take_part(
    home: Home,
    data_paths: Sequence[Path],
    context: RunContext = RunContext(),
    *,
    connection: Connect = connect,
) -> TookPart:
    """Follow all federations of this device, train the parts that it is invited to, and send them.

    Raises:
        RetryableError, OperatorError: the service cannot be reached or refuses this device; another process
            trains, or exchanges rounds.
    """
    api, (_, identity) = open_api(home, connection=connection), require_enrolment(home)
    with api.connection, hold_rounds_lock(home):
        first = exchange(home, api, now=datetime.now(UTC), has_text=bool(data_paths))
        trained = 0
        while (part := waiting_part(home, datetime.now(UTC))) is not None:
            try:
                with hold_lock(home, "federations run"):
                    if not train_part(home, part, data_paths, identity, context):
                        break
                trained += 1
            except (InputError, PackageError) as exc:
                part.membership.end(int(part.path.name), f"failed: {exc}")
        second = exchange(home, api, now=datetime.now(UTC), has_text=True) if trained else Exchanged()
    invited, sent = first.invited + second.invited, first.sent + second.sent
    return TookPart(invited=invited, trained=trained, sent=sent)


def join_federation(home: Home, name: str, *, connection: Connect = connect) -> Membership:
    """Join a running federation by its name, without asking; the command asks before it does the same.

    Raises:
        InputError: no such federation is offered to this device.
        PackageError: its definition is not signed.
    """
    api, (enrolment, _) = open_api(home, connection=connection), require_enrolment(home)
    with api.connection:
        offer = find_offer(api.federations(), name)
        definition = fetch_definition(home, api, enrolment, offer)
        membership = join(home, definition, federation_id=offer.id, name=offer.name)
        api.join_federation(offer.id)
    return membership

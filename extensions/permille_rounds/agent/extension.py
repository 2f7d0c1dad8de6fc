"""The part of rounds for the agent."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

from permille.errors import OperatorError, PermilleError
from permille_agent.link.api import DeviceApi
from permille_agent.link.enrolment import require_enrolment
from permille_agent.link.extension import AgentExtension, Assignment, Line
from permille_agent.state.home import Home
from permille_agent.state.lock import LockedError, hold_lock
from permille_agent.training.options import RunContext
from permille_rounds.agent.exchange import TookPart, exchange, join_federation, take_part, tell_service
from permille_rounds.agent.membership import memberships, take_back
from permille_rounds.agent.part import find_part, train_part, waiting_part

log = logging.getLogger("permille.agent")


@dataclass(frozen=True, slots=True)
class Rounds:
    """Trainings for rounds, and the user's choices to take part in them."""

    def exchange(self, home: Home, api: DeviceApi, *, now: datetime, has_text: bool) -> None:
        """Fetch news of the rounds, send finished contributions, and ask for invitations."""
        try:
            with hold_lock(home, "federations", of=home.rounds_lock):
                done = exchange(home, api, now=now, has_text=has_text)
        except LockedError as exc:
            log.info("rounds wait: %s", exc)
            return
        if done.sent or done.invited:
            log.info("rounds: %d contributions sent, %d invitations", done.sent, done.invited)

    def waiting(self, home: Home, *, now: datetime) -> Assignment | None:
        """Return the training for the next round, or None."""
        part = waiting_part(home, now)
        if part is None:
            return None
        number, federation = part.path.name, part.membership.path.name
        return Assignment(
            name=f"round {number} of {federation[:12]}",
            order=f"{federation}/{number}",
            # Leaving the federation erases this folder.
            is_wanted=part.path.is_dir,
            fail=lambda error: part.membership.end(int(number), f"failed: {error}"),
        )

    def train(self, home: Home, order: str, data_paths: Sequence[Path], context: RunContext) -> bool:
        """Train for a round, and write the contribution. Return False if this can be resumed."""
        federation, _, number = order.partition("/")
        _, identity = require_enrolment(home)
        return train_part(home, find_part(home, federation, int(number)), data_paths, identity, context)

    def withdraw(self, home: Home) -> Mapping[Path, bool]:
        """Leave all federations. A damaged choice is no consent, so its file need not stay."""
        files = {}
        for membership in memberships(home):
            file = membership.path / "joined.json"
            files[file] = False
            with suppress(OperatorError):
                take_back(membership)
                files[file] = True
        return files

    def tell_service(self, home: Home) -> bool:
        """Tell the service which federations were left. Return False if a later exchange must do it."""
        return tell_service(home)


def status(home: Home) -> Line:
    """Return the line about the federations of this device."""
    found, damaged = list[dict[str, object]](), list[str]()
    for membership in memberships(home):
        try:
            found.append(membership.document())
        except PermilleError as exc:
            damaged.append(str(exc))
    return Line(words="\n".join(map(_words, found)), document=found, damaged=damaged)


def sent(home: Home) -> str:
    """Describe the contributions to rounds, by federation."""
    found = []
    for membership in memberships(home):
        with suppress(OperatorError):
            name, standing = membership.choice().name, membership.standing()
            found.append(
                f"contributions of integers to {name}: {standing.sent} (finished rounds: {standing.number})"
            )
    return "; ".join(found)


def _words(federation: dict[str, object]) -> str:
    words = (
        f"{federation['name']}: after round {federation['rounds_done']}, "
        f"{federation['sent']} contributions sent"
    )
    if federation["last"]:
        words = f"{words}, the last one (round {federation['last_round']}) {federation['last']}"
    return f"{words}; waits: {federation['waiting_for']}" if federation["waiting_for"] else words


_ROUNDS: Final = Rounds()
EXTENSION: Final = AgentExtension(
    name="federations",
    title="rounds",
    status=status,
    assignments=_ROUNDS,
    choices=_ROUNDS,
    sent=sent,
    embedded={"TookPart": TookPart, "join_federation": join_federation, "take_part": take_part},
)

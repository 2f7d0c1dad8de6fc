"""Exchange of rounds between this device and its service.

The daemon calls `exchange` at each poll. When its policy allows, it trains for the open round in a child
process. `take_part` does both, for scripts and for programs that embed the agent. For example:

    took = take_part(home, [Path("notes")])

An exchange has these steps for each federation:

1. Tell the service if the user left.
2. Fetch the new history.
3. Send a finished contribution.
4. Ask for an invitation to the open round.

An exchange does not need the writers' lock, so it does not wait for a training. Each step is durable or can
be repeated, so after a kill the next exchange sends the same bytes.

In this folder, a part is the device's work for one round (`part.py`). It begins with an
invitation and ends with a contribution.
"""

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from permille.digests import digest_of
from permille.errors import InputError, OperatorError, PackageError, PermilleError
from permille.package.blobs import BlobFolder
from permille.package.reader import Package
from permille.plain_text import echo
from permille.trust.roles import federation_path
from permille_agent.link.api import DeviceApi
from permille_agent.link.client import AccessRefusedError, RequestRefusedError
from permille_agent.link.enrolment import Connect, Enrolment, connect, open_api, require_enrolment
from permille_agent.link.trust import TrustedReleases
from permille_agent.state.choices import read_references
from permille_agent.state.home import Home
from permille_agent.state.lock import hold_lock
from permille_agent.state.models import installed_release
from permille_agent.training.adopted import AdoptedRound, keep_adopted, kept_round
from permille_agent.training.options import RunContext
from permille_rounds.agent.calls import FederationsApi
from permille_rounds.agent.ledger import charge, is_used_up
from permille_rounds.agent.membership import (
    Membership,
    drop_left,
    join,
    max_bytes,
    memberships,
    read_definition,
    update_history,
)
from permille_rounds.agent.part import Invited, RoundPart, begin_part, parts, train_part, waiting_part
from permille_rounds.catch_up import caught_up, pack_state
from permille_rounds.definition import Definition
from permille_rounds.rounds import History
from permille_rounds.schemas import FederationOffer, FederationState

log = logging.getLogger("permille.agent")


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanged:
    """Result of an exchange: number of accepted contributions and invitations."""

    sent: int = 0
    invited: int = 0


def find_offer(offers: Sequence[FederationOffer], name: str) -> FederationOffer:
    """Return the offered federation with this name, or the one whose digest begins with `name`.

    Raises:
        InputError: the name fits no federation or several.
    """
    digits = name.removeprefix("sha256:")
    found = [each for each in offers if name == each.name or _hex(each).startswith(digits)]
    if not digits or len(found) != 1:
        if not offers:
            raise InputError("The service offers this device no federations.")
        # Several federations may have one name, so the message also gives the beginning of each digest.
        known = ", ".join(sorted(f"{each.name} ({_hex(each)[:12]})" for each in offers))
        raise InputError(
            f"{len(found)} offered federations fit {name!r:.60}. Give one of these names, or the beginning "
            f"of a digest: {known}."
        )
    return found[0]


def _hex(offer: FederationOffer) -> str:
    return offer.definition_digest.removeprefix("sha256:")


def fetch_definition(home: Home, api: DeviceApi, enrolment: Enrolment, offer: FederationOffer) -> Definition:
    """Fetch the definition of an offer, and check that its digest is signed.

    Raises:
        PackageError: the digest is not signed (`release-unlisted`), the signed metadata is refused
            (`trust-*`), or the definition is malformed (`round-definition`).
    """
    trusted = TrustedReleases(home.trust, enrolment.root.encode(), api.signed_file)
    digest = offer.definition_digest
    if trusted.find(federation_path(digest)) is None:
        raise PackageError(
            "release-unlisted",
            f"The federation {digest} is not signed: it has ended, or never existed",
        )
    return read_definition(FederationsApi(api).definition(offer.id), digest)


def exchange(home: Home, api: DeviceApi, *, now: datetime, has_text: bool) -> Exchanged:
    """Exchange with the service for all federations. The caller holds the rounds' lock.

    An error of one federation is stored in its `standing.json` and does not stop the others.

    Args:
        home: the home folder.
        api: the service.
        now: time of this device's clock, for the deadlines of invitations.
        has_text: whether there is text to train on. Without text, the device asks for no invitation.

    Raises:
        RetryableError, OperatorError: the service cannot be reached or refuses this device.
    """
    known = memberships(home)
    # A device that is in no federation makes no request about federations.
    if not known:
        return Exchanged()
    # Find offers by digest. The list is not signed, so a name in it proves nothing.
    offers = {offer.definition_digest: offer for offer in FederationsApi(api).offers()}
    done = Exchanged()
    for membership in known:
        try:
            one = _Exchange(home, api, membership, now=now, has_text=has_text)
        except OperatorError as exc:
            # A choice that cannot be read is no consent, so nothing is sent.
            log.warning("federation %s: %s", membership.path.name[:12], exc)
            continue
        try:
            found = one.run(offers.get(membership.digest))
            done = Exchanged(sent=done.sent + found.sent, invited=done.invited + found.invited)
        except AccessRefusedError:
            raise
        except (InputError, PackageError, OperatorError) as exc:
            log.warning("federation %s: %s", membership.path.name[:12], exc)
            with suppress(OperatorError):  # `standing.json` itself is damaged
                membership.note(replace(membership.standing(), waiting_for=str(exc)[:500]))
    return done


class _Exchange:
    """Exchange for one federation."""

    def __init__(
        self, home: Home, api: DeviceApi, membership: Membership, *, now: datetime, has_text: bool
    ) -> None:
        self._now = now
        self._has_text = has_text
        self._home = home
        self._api = FederationsApi(api)
        self._membership = membership
        self._choice = membership.choice()

    def run(self, offer: FederationOffer | None) -> Exchanged:
        if not self._choice.joined:
            self._tell_leaving()
            return Exchanged()
        definition = self._membership.definition()
        package = self._package(definition)
        if package is None:
            return self._wait("another package is installed, and the federation needs its own")
        if offer is None:
            return self._wait("the service no longer offers this federation")
        # The user joined here, but the service does not know it, for example because the request failed.
        if not offer.member:
            self._api.join(self._choice.federation_id)
        if not (offer.member and self._choice.told):
            # If the user leaves during this exchange, `told` stays False, and the next exchange tells the
            # service.
            self._membership.choose(lambda now: replace(now, told=now.joined))
        # The history comes first, because it shows which of the device's contributions are too late.
        history = update_history(self._membership, definition, offer.number, partial(self._fetch, None))
        self._adopt(offer, history, definition)
        sent = self._send(history.number)
        # Only the last reason that applies is stored. With a later reason, more text would not help.
        waiting = "" if self._has_text else "there is no text, so run `permille-agent data add`"
        if is_used_up(self._home, definition):
            waiting = "this device has used all the rounds that its privacy promise allows"
        if offer.state is not FederationState.RUNNING:
            waiting = f"the federation is {offer.state.value}"
        self._note(number=history.number, waiting_for=waiting)
        return Exchanged(sent=sent, invited=0 if waiting else self._accept(history))

    def _wait(self, reason: str) -> Exchanged:
        self._note(waiting_for=reason)
        return Exchanged()

    def _note(self, **changes: Any) -> None:
        self._membership.note(replace(self._membership.standing(), **changes))

    def _tell_leaving(self) -> None:
        try:
            self._api.leave(self._choice.federation_id)
        except RequestRefusedError as exc:
            # With these statuses, the service has nothing left to forget.
            if exc.status not in (404, 410):
                raise
        drop_left(self._membership, self._choice)

    def _package(self, definition: Definition) -> Package | None:
        release = installed_release(self._home)
        if release is None or release.manifest_digest != definition.log.package_digest:
            return None
        return Package.open(BlobFolder(self._home.blobs), release.manifest_digest)

    def _fetch(self, until: int | None, after: int, limit_bytes: int) -> bytes:
        federation_id = self._choice.federation_id
        return self._api.history(federation_id, after=after, until=until, limit_bytes=limit_bytes)

    def _adopt(self, offer: FederationOffer, history: History, definition: Definition) -> None:
        """Store the state of the adopted round as the start of later trainings."""
        wanted = offer.adopted_round
        if wanted is None or wanted == kept_round(self._membership.path):
            return
        # An operator may adopt an older round. The device keeps only the newest state, so fetch this one.
        if history.number != wanted:
            limit = max_bytes(definition)
            begin = History.begin(definition)
            history = caught_up(begin, self._fetch(wanted, 0, limit), max_bytes=limit)
        if history.number != wanted:
            raise PackageError(
                "round-chain", f"The service sent the state after {history.number} rounds instead of {wanted}"
            )
        package = definition.log.package_digest
        adopted = AdoptedRound(round=wanted, package=package, state_digest=history.digest)
        keep_adopted(self._membership.path, adopted, pack_state(definition, history.s_W))
        self._note(adopted_round=wanted)

    def _send(self, number: int) -> int:
        """Send finished contributions, and erase the files of rounds that are over."""
        sent = 0
        for part in parts(self._membership):
            invited = part.invited()
            # The user may have left and joined again. Consent from before that does not count.
            if invited is None or not self._membership.agrees(invited.withdrawals):
                part.erase()
                continue
            ended = self._membership.has_ended(invited.number)
            if invited.number < number:
                if not ended:
                    self._membership.end(invited.number, "late")
                part.erase()
            elif not ended and part.contribution.exists():
                sent += self._send_one(part, invited.number)
        return sent

    def _send_one(self, part: RoundPart, number: int) -> int:
        outcome, data = "sent", part.contribution.read_bytes()
        try:
            definition, name = self._membership.definition(), self._choice.name
            # Charge the round before its first byte leaves, so that no kill leaves a sent round uncharged.
            charge(self._home, definition, name=name, number=number, digest=digest_of(data))
            self._api.contribute(self._choice.federation_id, number, data)
        except RequestRefusedError as exc:
            outcome = "late" if exc.problem == "round-closed" else f"refused: {exc}"
        except InputError as exc:
            outcome = f"not sent: {exc}"
        self._membership.end(number, outcome)
        return int(outcome == "sent")

    def _accept(self, history: History) -> int:
        """Ask for an invitation to the open round, unless this device already had one."""
        if self._membership.has_ended(history.number) or parts(self._membership):
            return 0
        invitation = self._api.invitation(self._choice.federation_id)
        if invitation is None:
            return 0
        found = (invitation.round, invitation.start_digest)
        if found != (history.number, history.digest):
            return 0  # the round was closed meanwhile, so the next exchange fetches its result
        begin_part(
            self._membership,
            Invited(
                number=invitation.round,
                # The service sends a duration, so its clock and this device's need not agree.
                deadline=self._now + timedelta(seconds=invitation.seconds_left),
                start_digest=invitation.start_digest,
                withdrawals=self._choice.withdrawals,
            ),
        )
        return 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TookPart:
    """Result of `take_part`: number of accepted invitations, trained parts and accepted contributions."""

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
    """Take part in the open rounds of all federations of this device. For example:

        took = take_part(home, [Path("notes")])

    Raises:
        RetryableError, OperatorError: the service cannot be reached or refuses this device, or another
            process trains or exchanges rounds.
    """
    _, identity = require_enrolment(home)
    with (
        open_api(home, connection=connection) as api,
        hold_lock(home, "federations", of=home.rounds_lock),
    ):
        first = exchange(home, api, now=datetime.now(UTC), has_text=bool(data_paths))
        trained = 0
        while (part := waiting_part(home, datetime.now(UTC))) is not None:
            # The loop ends, because `waiting_part` skips parts that have a contribution or a result.
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
    """Join a federation without asking the user. The caller has the user's consent.

    For example, `join_federation(home, "readers")`.

    Raises:
        InputError: no such federation is offered to this device.
        PackageError: its definition is not signed.
    """
    enrolment, _ = require_enrolment(home)
    with open_api(home, connection=connection) as api:
        offer = find_offer(FederationsApi(api).offers(), name)
        definition = fetch_definition(home, api, enrolment, offer)
        # Store the choice first. If the request fails, the next exchange repeats it.
        membership = join(home, definition, federation_id=offer.id, name=offer.name)
        FederationsApi(api).join(offer.id)
    return membership


def tell_service(home: Home) -> bool:
    """Tell the service that federations were left. Return False if a later exchange must do it."""
    try:
        # If another process holds the lock for longer, a later exchange tells the service.
        with open_api(home) as api, hold_lock(home, "federations", wait_s=2.0, of=home.rounds_lock):
            exchange(home, api, now=datetime.now(UTC), has_text=bool(read_references(home)))
    except PermilleError as exc:
        # The user has left in any case, so the command has not failed.
        echo(
            "The service does not know yet that you left. The next `permille-agent run` tells it. "
            f"Cause: {exc}",
            err=True,
        )
        return False
    return True

"""Calls of the service's API for rounds."""

from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import RootModel

from permille_agent.link.api import DeviceApi, Identity, parse_answer
from permille_rounds.contribution import Contribution, encode_contribution
from permille_rounds.definition import MAX_BYTES
from permille_rounds.masked import encode_masked
from permille_rounds.private_rounds import vector_of
from permille_rounds.schemas import CONTRIBUTION_MEDIA_TYPE, FederationOffer, RoundInvitation


class _Offers(RootModel[list[FederationOffer]]):
    """List of federations in an answer."""


@dataclass(frozen=True, slots=True)
class FederationsApi:
    """The part of the service's API for federations. For example, `FederationsApi(api).offers()`."""

    api: DeviceApi

    def offers(self) -> list[FederationOffer]:
        """List the federations that this device may join or has joined. The answer is not signed."""
        return parse_answer(_Offers, self.api.call("GET", "/v1/device/federations")).root

    def definition(self, federation_id: str) -> bytes:
        """Fetch the bytes of a definition. The caller checks them against the signed digest."""
        return self.api.call("GET", f"/v1/federations/{federation_id}/definition", limit_bytes=MAX_BYTES)

    def join(self, federation_id: str) -> None:
        """Tell the service that the user joined. Repeating the call has no effect."""
        self.api.call("PUT", f"/v1/federations/{federation_id}/membership")

    def leave(self, federation_id: str) -> None:
        """Tell the service that the user left. This drops the device's contribution to the open round."""
        self.api.call("DELETE", f"/v1/federations/{federation_id}/membership")

    def history(self, federation_id: str, *, after: int, until: int | None, limit_bytes: int) -> bytes:
        """Fetch the history after round `after`, up to `until` or the newest. The caller verifies it."""
        query = f"?after={after}" + ("" if until is None else f"&until={until}")
        path = f"/v1/federations/{federation_id}/history{query}"
        return self.api.call("GET", path, limit_bytes=limit_bytes)

    def invitation(self, federation_id: str) -> RoundInvitation | None:
        """Ask for an invitation to the open round. Return None if there is none for this device."""
        answer = self.api.call("POST", f"/v1/federations/{federation_id}/invitations")
        return parse_answer(RoundInvitation, answer) if answer else None

    def contribute(self, federation_id: str, number: int, contribution: bytes) -> None:
        """Send a contribution to a round. The caller must have the user's consent.

        Repeating the call has no effect.
        """
        headers = {"content-type": CONTRIBUTION_MEDIA_TYPE}
        path = f"/v1/federations/{federation_id}/rounds/{number}/contribution"
        self.api.call("PUT", path, body=contribution, headers=headers)


def signed_contribution(identity: Identity, contribution: Contribution) -> bytes:
    """Return the signed bytes of a contribution to a round.

    If the federation has a keeper (a second server), the integers are masked, so that neither the service nor
    the keeper alone can read them. Each call draws a new mask.
    """

    def encode(key: Ed25519PrivateKey) -> bytes:
        rules = contribution.definition
        if rules.privacy is None or rules.privacy.keeper is None:
            return encode_contribution(contribution, key)
        place = (rules, contribution.round_number, contribution.start_digest)
        return encode_masked(*place, vector_of(contribution), key)

    return identity.sign(encode)

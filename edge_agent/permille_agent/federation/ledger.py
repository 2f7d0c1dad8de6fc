"""The device's own account of privacy: which rounds its integers went into, kept when all else is forgotten.

A contribution is charged before its first byte leaves, by its digest; what has left is never refunded. So a
retry of the same bytes costs nothing, and other bytes for a round are not sent, also after leaving, joining
again or `forget`. The service has a ledger of its own; this one is the owner's.
"""

from dataclasses import dataclass, field, replace

from permille.errors import InputError, OperatorError
from permille.federation.definition import Definition
from permille.privacy.zcdp import dp_epsilon_of, rho_of
from permille_agent.state.home import Home, read_record, write_record


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Privacy cost of a federation, with all inputs of its epsilon.

    Attributes:
        rounds: digests of what was sent, by number of the round.
    """

    name: str
    noise_hundredths: int
    participations: int
    delta_exponent: int
    rounds: dict[str, str]

    def dp_epsilon(self, rounds: int) -> float:
        """Return the cost of this many rounds."""
        if not rounds:
            return 0.0
        return dp_epsilon_of(rho_of(self.noise_hundredths / 100, rounds), 10.0**-self.delta_exponent)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Contents of `ledger.json`: accounts by the digest of the federation's definition."""

    accounts: dict[str, Account] = field(default_factory=dict)


def read_ledger(home: Home) -> Ledger:
    """Read the ledger; nothing was sent yet where there is none.

    Raises:
        InputError: it is damaged: this device takes part in no round with privacy until it is whole.
    """
    try:
        return read_record(home.ledger, Ledger) or Ledger()
    except OperatorError as exc:
        raise InputError(f"Cannot read what this device has spent: {exc}") from exc


def is_used_up(home: Home, definition: Definition) -> bool:
    """Return whether the device has taken part as often as allowed. Raises InputError."""
    if definition.privacy is None:
        return False
    account = read_ledger(home).accounts.get(definition.digest)
    return account is not None and len(account.rounds) >= definition.privacy.participations


def charge(home: Home, definition: Definition, *, name: str, number: int, digest: str) -> None:
    """Charge a contribution durably. Charging it again costs nothing.

    Args:
        digest: of the bytes that are about to leave.

    Raises:
        InputError: other bytes have left for this round, or all rounds are used up, or the ledger is damaged.
        OperatorError: the ledger cannot be written.
    """
    if definition.privacy is None:
        return
    ledger = read_ledger(home)
    account = ledger.accounts.get(definition.digest) or Account(
        name=name,
        noise_hundredths=definition.privacy.noise_hundredths,
        participations=definition.privacy.participations,
        delta_exponent=definition.privacy.delta_exponent,
        rounds={},
    )
    charged = account.rounds.get(str(number))
    if charged == digest:
        return
    if charged is not None:
        raise InputError(f"Another contribution to round {number} has left this device already.")
    if len(account.rounds) >= account.participations:
        raise InputError(f"All {account.participations} rounds that this device agreed to are used up.")
    account = replace(account, rounds={**account.rounds, str(number): digest})
    write_record(home.ledger, Ledger(accounts={**ledger.accounts, definition.digest: account}))

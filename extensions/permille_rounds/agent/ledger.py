"""The device's privacy ledger: the rounds to which it has contributed. `forget` keeps the ledger.

- A contribution is charged by its digest before its first byte is sent, and never refunded.
- Sending the same bytes again costs nothing.
- Other bytes for the same round are refused, even if the user has left and joined again.

The service has its own ledger. The ledger of the device does not depend on it.
"""

from dataclasses import dataclass, field, replace

from permille.errors import InputError, OperatorError
from permille_agent.state.home import Home, read_record, write_record
from permille_rounds.definition import Definition
from permille_rounds.privacy.zcdp import dp_epsilon_of, rho_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Rounds of one federation to which this device has contributed, and the parameters of their privacy.

    Attributes:
        name: name of the federation.
        noise_hundredths: noise multiplier z of a round, in hundredths.
        participations: largest number of rounds that this device agreed to.
        delta_exponent: delta is 10 to the power of minus this number.
        rounds: digests of the contributions, by number of the round.
    """

    name: str
    noise_hundredths: int
    participations: int
    delta_exponent: int
    rounds: dict[str, str]

    def dp_epsilon(self, rounds: int) -> float:
        """Return the privacy cost of a number of rounds, as epsilon.

        Example:
            >>> account = Account(
            ...     name="a", noise_hundredths=100, participations=10, delta_exponent=6, rounds={}
            ... )
            >>> account.dp_epsilon(0)
            0.0
        """
        if not rounds:
            return 0.0
        # FORMAT 13.6: n rounds of one device are n / (2 z^2)-zCDP, with the noise multiplier z.
        return dp_epsilon_of(rho_of(self.noise_hundredths / 100, rounds), 10.0**-self.delta_exponent)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Contents of `ledger.json`: accounts by the digest of the federation's definition."""

    accounts: dict[str, Account] = field(default_factory=dict)


def read_ledger(home: Home) -> Ledger:
    """Read the ledger. It is empty if there is no file.

    Raises:
        InputError: the file is damaged. The device then takes part in no round that promises privacy.
    """
    try:
        return read_record(home.ledger, Ledger) or Ledger()
    except OperatorError as exc:
        raise InputError(f"Cannot read the privacy ledger: {exc}") from exc


def is_used_up(home: Home, definition: Definition) -> bool:
    """Return whether all promised participations are used. Raises InputError if the ledger is damaged."""
    if definition.privacy is None:
        return False
    account = read_ledger(home).accounts.get(definition.digest)
    return account is not None and len(account.rounds) >= definition.privacy.participations


def charge(home: Home, definition: Definition, *, name: str, number: int, digest: str) -> None:
    """Charge a contribution durably. Charging the same contribution again costs nothing.

    Args:
        home: the home folder.
        definition: definition of the federation.
        name: name of the federation.
        number: number of the round.
        digest: digest of the bytes to send.

    Raises:
        InputError: other bytes were sent to this round, all rounds are used, or the ledger is damaged.
        OperatorError: the ledger cannot be written.
    """
    # Without noise there is no epsilon to count.
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
    # The key is a text, because JSON has no other keys.
    charged = account.rounds.get(str(number))
    if charged == digest:
        return
    # The epsilon counts one contribution per round, so a second one is never sent.
    if charged is not None:
        raise InputError(f"Another contribution to round {number} has left this device already.")
    if len(account.rounds) >= account.participations:
        raise InputError(f"All {account.participations} rounds that this device agreed to are used up.")
    account = replace(account, rounds={**account.rounds, str(number): digest})
    write_record(home.ledger, Ledger(accounts={**ledger.accounts, definition.digest: account}))

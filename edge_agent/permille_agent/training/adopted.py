"""State of the round that a federation's operator has adopted.

Trainings start from this state instead of the base. The device also judges whether the state itself is better
than the model in use. The files are in the folder of the federation.
"""

from dataclasses import dataclass
from pathlib import Path

from permille.errors import OperatorError
from permille.files import write_atomic
from permille.package.reader import Package
from permille.zo.packed_state import PackedState, read_state
from permille_agent.state.home import Home, read_record, write_record

_STATE = "adopted.state"
_RECORD = "adopted.json"
START = "round-"
"""Prefix of `AdoptedRound.start`. Names of runs are hexadecimal, so no run has this prefix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdoptedRound:
    """Contents of `adopted.json`: the round, the package and the digest of the adopted state."""

    round: int
    package: str
    state_digest: str

    @property
    def start(self) -> str:
        """Name of this start in the records of runs."""
        return START + self.state_digest.removeprefix("sha256:")


def adopted_round(home: Home, package_digest: str) -> AdoptedRound | None:
    """Return the round that a training on a package starts from, or None.

    If several federations use the package, this is the round that was adopted last.
    """
    found = _adopted(home, package_digest)
    return None if found is None else found[1]


def adopted_state(home: Home, package: Package, start: str) -> PackedState:
    """Return the state that `start` names.

    Raises:
        OperatorError: another round was adopted since, or the user left.
        PackageError: the file is damaged.
    """
    found = _adopted(home, package.digest)
    if found is not None and found[1].start == start:
        state = read_state(package, (found[0] / _STATE).read_bytes())
        if state.digest == found[1].state_digest:
            return state
    raise OperatorError("The federation has moved on from the state that this run began from. Train again.")


def keep_adopted(folder: Path, adopted: AdoptedRound, state: bytes) -> None:
    """Store a packed state (FORMAT 11) durably as the start of later trainings."""
    write_atomic(folder / _STATE, state, mode=0o600)
    # The record comes last. Until it is written, each exchange tries again to store the state.
    write_record(folder / _RECORD, adopted)


def kept_round(folder: Path) -> int | None:
    """Return the number of the adopted round in a federation's folder, or None."""
    known = _kept(folder / _RECORD)
    return None if known is None else known.round


def _kept(path: Path) -> AdoptedRound | None:
    try:
        return read_record(path, AdoptedRound)
    except OperatorError:  # one damaged record must not stop others, and the next exchange writes it again
        return None


def _adopted(home: Home, package_digest: str) -> tuple[Path, AdoptedRound] | None:
    newest: tuple[int, Path, AdoptedRound] | None = None
    for path in home.federations.glob(f"*/{_RECORD}"):
        record = _kept(path)
        if record is not None and record.package == package_digest:
            found = (path.stat().st_mtime_ns, path.parent, record)
            # Two records may have the same time. Then the path decides, because `glob` has no fixed order.
            newest = found if newest is None or found[:2] > newest[:2] else newest
    return None if newest is None else newest[1:]

"""The state of a federation that training begins from, once its operator has adopted a round.

It stands in the place of the package's own pooled state as a start, and alone is a candidate: whether it is
better is judged on this device. One file, below the folder of a federation that this device is a member of.
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
"""Prefix of the name of such a start. No run's name has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdoptedRound:
    """Contents of `adopted.json`: the number of rounds of the adopted state, and its package."""

    round: int
    package: str
    state_digest: str

    @property
    def start(self) -> str:
        """The name of this start in the records of runs."""
        return START + self.state_digest.removeprefix("sha256:")


def adopted_round(home: Home, package_digest: str) -> AdoptedRound | None:
    """Find what training on a package begins from; of several federations the one adopted last."""
    found = _adopted(home, package_digest)
    return None if found is None else found[1]


def adopted_state(home: Home, package: Package, start: str) -> PackedState:
    """Read the state that `start` names.

    Raises:
        OperatorError: it was replaced or left meanwhile.
        PackageError: the file is damaged.
    """
    found = _adopted(home, package.digest)
    if found is not None and found[1].start == start:
        state = read_state(package, (found[0] / _STATE).read_bytes())
        if state.digest == found[1].state_digest:
            return state
    raise OperatorError("The federation has moved on from the state that this run began from. Train again.")


def keep_adopted(folder: Path, adopted: AdoptedRound, state: bytes) -> None:
    """Make a packed state (FORMAT 11) the start of trainings to come; durable on return."""
    write_atomic(folder / _STATE, state, mode=0o600)
    write_record(folder / _RECORD, adopted)


def kept_round(folder: Path) -> int | None:
    """Return the adopted round of a federation's folder."""
    known = read_record(folder / _RECORD, AdoptedRound)
    return None if known is None else known.round


def _adopted(home: Home, package_digest: str) -> tuple[Path, AdoptedRound] | None:
    if not home.federations.is_dir():
        return None
    newest: tuple[int, Path, AdoptedRound] | None = None
    for path in home.federations.glob(f"*/{_RECORD}"):
        record = read_record(path, AdoptedRound)
        if record is not None and record.package == package_digest:
            found = (path.stat().st_mtime_ns, path.parent, record)
            newest = found if newest is None or found[:2] > newest[:2] else newest
    return None if newest is None else newest[1:]

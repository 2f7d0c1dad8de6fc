"""The personalised model of a run: its state from the journal, checked, as sparse values.

`state.i64` is only a cache: it counts where its digest is the decision's, else the journal is replayed, and
the replay has to have that digest. So a flipped bit in either is found before a model is used.
"""

import numpy as np
from numpy.typing import NDArray

from permille.errors import PackageError
from permille.files import write_atomic
from permille.package.reader import Package
from permille.zo.exponents import Exponents, exponents_of
from permille.zo.header import LogHeader
from permille.zo.journal import read_journal
from permille.zo.lattice import state_digest, values
from permille.zo.log import encode_canonical
from permille.zo.records import StepRecord, coefficients_of
from permille.zo.replay import replay
from permille_agent.state.activation import Active
from permille_agent.state.home import Home
from permille_agent.training.run import Json, RunFolder, find_run


def model_values(home: Home, active: Active, package: Package) -> NDArray[np.float32]:
    """The sparse values of the active model, float32 [k]: the base's own, or the run's state on top.

    Raises:
        OperatorError: the run is gone.
        PackageError: the state is not what was decided, or of another package.
    """
    w_base_K = package.values()
    if active.run is None:
        return w_base_K
    run = find_run(home, active.run)
    decision = run.require("decision")
    header, records = chosen_log(run, decision)
    header.check_binding(
        package_digest=package.digest, mask_digest=package.mask_digest, counts=package.counts
    )
    s_K = _cached_state(run, decision, header)
    if s_K is None:
        s_K = checked_replay(header, records, decision["state_digest"], exponents_of(package))
        store_state(run, s_K)
    return values(w_base_K, s_K, header.step_unit_exponent)


def chosen_log(run: RunFolder, decision: Json) -> tuple[LogHeader, list[StepRecord]]:
    """Header and records of the log prefix that the decision chose.

    Raises:
        PackageError: the journal is damaged or shorter than the decision says.
    """
    contents = read_journal(run.journal(decision["attempt"]))
    step = decision["step"]
    if len(contents.records) < step:
        raise PackageError(
            "state-log", f"expected {step} steps in the journal of {run.name}, got {len(contents.records)}"
        )
    return contents.header, list(contents.records[:step])


def canonical_log(run: RunFolder) -> bytes:
    """The log of the run's chosen state in its form for upload: personal data, see FORMAT 9."""
    return encode_canonical(*chosen_log(run, run.require("decision")))


def checked_replay(
    header: LogHeader, records: list[StepRecord], expected: str, exponents: Exponents | None = None
) -> NDArray[np.int64]:
    """The replayed state.

    Args:
        header: of the log.
        records: its steps.
        expected: digest of the state.
        exponents: of the package, as far as the header needs them.

    Raises:
        PackageError: `state-digest`: it is not the state that was decided on.
    """
    s_K = replay(header, coefficients_of(records, header), exponents)
    digest = state_digest(s_K, mask_digest=header.mask_digest, step_unit_exponent=header.step_unit_exponent)
    if digest != expected:
        raise PackageError(
            "state-digest", f"expected the state {expected} from the log's replay, got {digest}"
        )
    return s_K


def store_state(run: RunFolder, s_K: NDArray[np.int64]) -> None:
    """Keep a state, so that it need not be replayed each time."""
    write_atomic(run.path / "state.i64", s_K.astype("<i8").tobytes(), mode=0o600)


def _cached_state(run: RunFolder, decision: Json, header: LogHeader) -> NDArray[np.int64] | None:
    path = run.path / "state.i64"
    if not path.exists() or path.stat().st_size != 8 * header.k:
        return None
    s_K = np.frombuffer(path.read_bytes(), dtype="<i8").astype(np.int64)
    digest = state_digest(s_K, mask_digest=header.mask_digest, step_unit_exponent=header.step_unit_exponent)
    return s_K if digest == decision["state_digest"] else None

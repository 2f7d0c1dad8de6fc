"""The personal model of a run, and the state that a run starts from.

The files of a run hold its state at full strength. The model in use has the strength that the decision chose:
the number of eighths of the state that are kept.

`state.i64` is a cache of the journal's replay. If its digest is not the one in the decision, the journal is
replayed. The result must have the digest in the decision. So a flipped bit is found before a model is used.
"""

import numpy as np
from numpy.typing import NDArray

from permille.engines.key_values import KeyValues
from permille.errors import InputError, PackageError
from permille.files import write_atomic
from permille.package.blobs import BlobFolder
from permille.package.limits import MAX_MANIFEST_BYTES
from permille.package.manifest import Manifest
from permille.package.reader import Package
from permille.schemas.runs import LogForm
from permille.training.strength import scaled
from permille.zo.header import LogHeader
from permille.zo.journal import read_journal
from permille.zo.lattice import MAX_STEP_UNIT_EXPONENT, state_digest, values
from permille.zo.log import encode_canonical
from permille.zo.packed_state import read_state
from permille.zo.records import StepRecord, coefficients_of
from permille.zo.replay import replay
from permille_agent.state.home import Home
from permille_agent.state.models import Active, active_model
from permille_agent.text.preparation import Prepared
from permille_agent.training.adopted import START as FEDERATION_START
from permille_agent.training.adopted import adopted_round, adopted_state
from permille_agent.training.decision import Decision
from permille_agent.training.durable_steps import packed_state
from permille_agent.training.memory import read_memory
from permille_agent.training.options import Start, TrainOptions
from permille_agent.training.run import (
    BegunRun,
    LearnedText,
    RunDefinition,
    RunFolder,
    StartState,
    find_run,
    list_runs,
)


def model_values(
    home: Home, active: Active, package: Package, *, beside_memory: bool = False
) -> NDArray[np.float32]:
    """Return the values of the masked weights in the active model, float32 [k].

    Args:
        home: the home folder.
        active: the active model.
        package: its package.
        beside_memory: whether the model's memory is used, too. The strength of a state is lower beside it.

    Raises:
        OperatorError: the run is gone.
        PackageError: the state is damaged, or belongs to another package.
    """
    if active.run is None:
        return package.values()
    state = personal_state(home, active.run, package, beside_memory=beside_memory)
    return values(package.values(), state.s_K, state.step_unit_exponent)


def personal_state(home: Home, run: str, package: Package, *, beside_memory: bool = False) -> StartState:
    """Return the state of a run at the strength that the decision chose. A memory alone has the base's.

    Args:
        home: the home folder.
        run: name of the run.
        package: its package.
        beside_memory: whether the state stands beside the run's memory.

    Raises:
        OperatorError: the run is gone.
        PackageError: the state is damaged, or belongs to another package.
    """
    folder = find_run(home, run)
    decision = folder.require("decision", Decision)
    if not decision.part.has_state:
        return StartState(s_K=np.zeros(package.k, np.int64), step_unit_exponent=MAX_STEP_UNIT_EXPONENT)
    trained = _trained_state(folder, decision, package)
    exponent, strength = trained.step_unit_exponent, decision.strength
    expected: str | None = decision.scaled_digest or decision.state_digest
    if beside_memory:
        strength, expected = decision.beside_memory
    s_K = scaled(trained.s_K, strength)
    digest = state_digest(s_K, mask_digest=package.mask_digest, step_unit_exponent=exponent)
    if digest != expected:
        raise _other_state(folder)
    return StartState(s_K=s_K, step_unit_exponent=exponent)


def personal_memory(home: Home, active: Active, package: Package) -> KeyValues | None:
    """Return the memory of the active model, or None if it has none.

    Raises:
        OperatorError: the run is gone.
        PackageError: the memory is damaged, too large, or belongs to another model.
    """
    if active.run is None:
        return None
    folder = find_run(home, active.run)
    decision = folder.require("decision", Decision)
    return read_memory(folder, package, decision.beside_memory[1]) if decision.part.has_memory else None


def _trained_state(folder: RunFolder, decision: Decision, package: Package) -> StartState:
    """Return the state of a run at full strength."""
    unlogged = folder.best_state(decision.descent)
    if unlogged.exists():
        state = read_state(package, unlogged.read_bytes())
        if state.digest != decision.state_digest:
            raise _other_state(folder)
        return StartState(s_K=state.s_K, step_unit_exponent=state.header.step_unit_exponent)
    header, records = _selected_log(folder, decision)
    header.check_binding(
        package_digest=package.digest, mask_digest=package.mask_digest, counts=package.counts
    )
    s_K = _cached_state(folder, decision, header)
    if s_K is None:
        s_K = replay(header, coefficients_of(records, header), basis=package.basis())
        if _digest(s_K, header) != decision.state_digest:
            raise _other_state(folder)
        store_state(folder, s_K)
    return StartState(s_K=s_K, step_unit_exponent=header.step_unit_exponent)


def _other_state(folder: RunFolder) -> PackageError:
    return PackageError(
        "state-digest",
        f"The state of the run {folder.name} is not the one that was judged: a file is damaged. Replace it "
        "with `permille-agent train --from base --seed 1`.",
    )


def find_start(home: Home, package: Package, prepared: Prepared, options: TrainOptions) -> str | None:
    """Return the start of a run: a run or an adopted round by name, or None for the base.

    Raises:
        InputError: the options name the adopted round, but there is none, or the run is zeroth order.
    """
    adopted = adopted_round(home, package.digest)
    round_start = None if adopted is None else adopted.start
    if options.start is Start.ROUND and round_start is None:
        raise InputError("No round was adopted to begin from. Use --from base or --from active.")
    if options.start is Start.ROUND and options.has_log:
        raise InputError(
            "Zeroth order begins at the base, not at the state of a round. Train with --method gradient."
        )
    if options.start is Start.BASE or options.has_log:
        return None
    active = active_model(home) if options.start is Start.ACTIVE else None
    if active is None or active.run is None or not _has_values_of(package, active.package):
        return round_start
    if adopted is not None and _is_untried(home, package, prepared, options, adopted.start):
        return round_start
    # A short text both trains and judges. If the new text or the text of the active model is short, the
    # active model may have learned text that judges the new state. So the run must not start from that model.
    folder = find_run(home, active.run)
    if prepared.stages or folder.load("learned", LearnedText) is not None:
        return round_start
    # A repeated command must find its finished run again. It must not start a new run from that run's result.
    known = folder.require("run", BegunRun).definition
    same = RunDefinition(package=package.digest, data=prepared.digest, options=options, start=known.start)
    return known.start if known == same else active.run


def _is_untried(home: Home, package: Package, prepared: Prepared, options: TrainOptions, start: str) -> bool:
    """Return whether no run has tried the adopted round `start` yet.

    The round counts as tried if another run that started from it has a decision.
    """
    same = RunDefinition(package=package.digest, data=prepared.digest, options=options, start=start)
    # The run of this request itself does not count. A resumed run must find the same start again.
    if (home.runs / same.name()).is_dir():
        return True
    begun = (run.load("run", BegunRun) for run in list_runs(home) if run.load("decision", Decision))
    return all(run is None or run.definition.start != start for run in begun)


def start_state(home: Home, package: Package, start: str | None) -> StartState | None:
    """Return the state that `find_start` has named.

    Raises:
        OperatorError: the run is gone, or another round was adopted since.
        PackageError: the state is damaged, or belongs to another package.
    """
    if start is None:
        return None
    if start.startswith(FEDERATION_START):
        state = adopted_state(home, package, start)
        return StartState(
            s_K=state.s_K, step_unit_exponent=state.header.step_unit_exponent, is_candidate=True
        )
    digest = find_run(home, start).require("run", BegunRun).definition.package
    of = package if digest == package.digest else Package.open(package.blobs, digest)
    return personal_state(home, start, of)


def _has_values_of(package: Package, other: str) -> bool:
    """Return whether two packages are equal, or differ only in the program.

    Such packages have the same base values, so a state of one fits the other, too.
    """
    if other == package.digest:
        return True
    try:
        manifest = Manifest.from_bytes(package.blobs.read(other, limit=MAX_MANIFEST_BYTES))
    except PackageError:
        return False
    return manifest.parent() == package.manifest.parent()


def shareable(folder: RunFolder, form: LogForm, blobs: BlobFolder) -> bytes:
    """Return the log or the packed state of a run, for an upload.

    Both are personal data. With the package, they give the personal model at full strength.

    Args:
        folder: the run.
        form: log or packed state.
        blobs: blobs of the device. The state of a log in a basis needs the package.

    Raises:
        InputError: a log is asked for, but the run followed the gradient and has none.
        PackageError: the journal is damaged or too short.
    """
    decision = folder.require("decision", Decision)
    path = folder.best_state(decision.descent)
    if path.exists():
        if form is LogForm.LOG:
            raise InputError(
                "This run followed the gradient and has no log of seeds and scalars. Share its state with "
                "--share-state, or train with --method zeroth-order."
            )
        return path.read_bytes()
    header, records = _selected_log(folder, decision)
    if form is LogForm.LOG:
        return encode_canonical(header, records)
    basis = Package.open(blobs, header.package_digest).basis() if header.basis_steps else None
    return packed_state(header, replay(header, coefficients_of(records, header), basis=basis))


def store_state(folder: RunFolder, s_K: NDArray[np.int64]) -> None:
    """Store a state as a cache, so that the journal is not replayed for each use."""
    write_atomic(folder.path / "state.i64", s_K.astype("<i8").tobytes(), mode=0o600)


def _selected_log(folder: RunFolder, decision: Decision) -> tuple[LogHeader, list[StepRecord]]:
    """Return the header and the records of the steps that the decision selected."""
    contents = read_journal(folder.journal(decision.descent))
    if len(contents.records) < decision.step:
        got = f"{len(contents.records)} of the {decision.step} steps that were selected"
        raise PackageError("state-log", f"The journal of the run {folder.name} is damaged: it has {got}.")
    return contents.header, list(contents.records[: decision.step])


def _cached_state(folder: RunFolder, decision: Decision, header: LogHeader) -> NDArray[np.int64] | None:
    path = folder.path / "state.i64"
    if not path.exists() or path.stat().st_size != 8 * header.k:
        return None
    s_K = np.frombuffer(path.read_bytes(), dtype="<i8").astype(np.int64)
    return s_K if _digest(s_K, header) == decision.state_digest else None


def _digest(s_K: NDArray[np.int64], header: LogHeader) -> str:
    return state_digest(s_K, mask_digest=header.mask_digest, step_unit_exponent=header.step_unit_exponent)

"""The work of this device for one round, called its part: the files and the training.

The files in `federations/<digits of the definition's digest>/rounds/<n>/`:

    round.json           the invitation, and the number of withdrawals when it was accepted
    text.json            digest of the rows of text, and name of the engine
    gain.json            reduction of the loss by the pooled state, on rows that no round trains on
    steps.journal        the steps (permille_rounds.local), with Adam's state beside it
    contribution.bin     the signed contribution, which is made only once

The steps depend only on the definition, the package, the history, the user's text and the engine. So a part
that is resumed with the same text and engine makes the same steps. The text is divided as for a personal run.
Rows that select or judge a personal model do not train a round.

Shapes: T steps of a round, Q directions of a step, W masked weights.
"""

import logging
import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from permille.engines.interface import Engine
from permille.errors import InputError, OperatorError
from permille.files import fsync_folder, write_atomic
from permille.package.blobs import BlobFolder
from permille.package.reader import Package
from permille.zo.lattice import values
from permille_agent.link.api import Identity
from permille_agent.state.home import Home, read_record, write_record
from permille_agent.state.models import installed_release, opening
from permille_agent.text.preparation import Prepared, prepare
from permille_agent.text.reading import read_documents
from permille_agent.text.rows import Row, TrainingBatches
from permille_agent.text.tokens import package_tokenizer
from permille_agent.training.engines import EngineChoice, RunInterrupted, interruptible
from permille_agent.training.evaluation import mean_loss
from permille_agent.training.options import RunContext
from permille_rounds.agent.calls import signed_contribution
from permille_rounds.agent.membership import Membership, load_history, memberships
from permille_rounds.contribution import Contribution
from permille_rounds.definition import GAIN_NATS, Definition
from permille_rounds.local import LocalRound, take_local_steps

log = logging.getLogger("permille.agent")

WEIGHT_TOKENS = 2_000
"""Training tokens per unit of a device's weight, in federations that weigh devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Invited:
    """Contents of `round.json`.

    Attributes:
        number: number of the round.
        deadline: end of the round by this device's clock.
        start_digest: digest of the state before the round.
        withdrawals: number of withdrawals when the invitation was accepted.
    """

    number: int
    deadline: datetime
    start_digest: str
    withdrawals: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """Contents of `text.json`: digest of the rows, and name of the engine."""

    rows: str
    engine: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """Contents of `gain.json`: the gain in the units of a contribution (FORMAT 13.2)."""

    gain: int


@dataclass(frozen=True, slots=True)
class RoundPart:
    """The folder of one part. The function `parts` lists the parts of a federation."""

    membership: Membership
    path: Path

    @property
    def contribution(self) -> Path:
        """File of the contribution to send."""
        return self.path / "contribution.bin"

    def invited(self) -> Invited | None:
        """Read the invitation, or return None if the part was not fully created."""
        return read_record(self.path / "round.json", Invited)

    def erase(self) -> None:
        """Remove the part."""
        shutil.rmtree(self.path)
        # Otherwise a power loss could bring the part back.
        fsync_folder(self.path.parent)

    def begin_again(self) -> None:
        """Delete all results except the invitation, because another text or engine gives other steps."""
        for path in self.path.iterdir():
            if path.name != "round.json":
                path.unlink()


def parts(membership: Membership) -> list[RoundPart]:
    """Return the parts of a federation on this disk, sorted by round."""
    found = [path for path in membership.path.glob("rounds/*") if path.name.isdecimal()]
    return [RoundPart(membership, path) for path in sorted(found, key=lambda path: int(path.name))]


def begin_part(membership: Membership, invited: Invited) -> RoundPart:
    """Accept an invitation durably, and return the new part."""
    path = membership.path / "rounds" / str(invited.number)
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    # A new folder is durable only after its parent is synced. The first sync is for the folder `rounds`.
    fsync_folder(membership.path)
    fsync_folder(path.parent)
    write_record(path / "round.json", invited)
    return RoundPart(membership, path)


def find_part(home: Home, federation: str, number: int) -> RoundPart:
    """Return the part for round `number` of the federation with the folder name `federation`.

    Raises:
        InputError: the user left, or the round is over.
    """
    for part in _all_parts(home):
        if (part.membership.path.name, part.path.name) == (federation, str(number)):
            return part
    raise InputError(f"There is nothing to do for round {number}: the user left, or the round is over.")


def waiting_part(home: Home, now: datetime) -> RoundPart | None:
    """Return a part that still has to be trained, or None.

    Parts whose deadline is over, or whose user has left since the invitation, are skipped.
    """
    for part in _all_parts(home):
        membership = part.membership
        try:
            invited = part.invited()
            if invited is None or part.contribution.exists() or invited.deadline <= now:
                continue
            if membership.agrees(invited.withdrawals) and not membership.has_ended(invited.number):
                return part
        except OperatorError as exc:  # a damaged record stops neither other federations nor personal runs
            log.warning("federation %s: %s", membership.path.name[:12], exc)
    return None


def _all_parts(home: Home) -> Iterator[RoundPart]:
    for membership in memberships(home):
        yield from parts(membership)


def train_part(
    home: Home,
    part: RoundPart,
    data_paths: Sequence[Path],
    identity: Identity,
    context: RunContext = RunContext(),
) -> bool:
    """Train a part and write its contribution. Return False if the training was stopped and can be resumed.

    The caller holds the writers' lock.

    Raises:
        InputError: there is too little text, the federation's package is not installed, or the round is over.
        PackageError: the package, the history or the definition is damaged.
    """
    try:
        return _train(home, part, data_paths, identity, context)
    except OSError as exc:
        raise OperatorError(
            f"Cannot write {part.path}: {exc}. Leaving the federation erases this folder."
        ) from exc


def _train(
    home: Home, part: RoundPart, data_paths: Sequence[Path], identity: Identity, context: RunContext
) -> bool:
    membership, invited = part.membership, part.invited()
    if invited is None:
        raise InputError(f"{part.path} has no invitation. Run `permille-agent federations run` to get one.")
    if part.contribution.exists():
        return True
    definition = membership.definition()
    release = installed_release(home)
    if release is None or release.manifest_digest != definition.log.package_digest:
        raise InputError("The package of the federation is not installed. Run `permille-agent pull`.")
    with opening(home, release.manifest_digest):
        package = Package.open(BlobFolder(home.blobs), release.manifest_digest)
        # Check all hashes now. Otherwise, a damaged tensor would be found only when the training reads it.
        package.check_blocks()
    history = load_history(membership, definition)
    # FORMAT 13.2: a contribution names the state from which it began, and the service refuses any other.
    if (history.number, history.digest) != (invited.number, invited.start_digest):
        raise InputError(
            f"The invitation is for round {invited.number}, but the history is at {history.number}."
        )
    name = membership.choice().name
    context.progress.phase(f"round {invited.number} of {name}: reading the text")
    prepared = _prepared(data_paths, package, definition)
    engine_of = context.engine_of
    begun = read_record(part.path / "text.json", Text)
    if begun is not None and isinstance(engine_of, EngineChoice):
        # Losses of two engines differ in their last bits, so a resumed part keeps its engine.
        engine_of = engine_of.begun_with(begun.engine)
    engine = interruptible(engine_of(package), context.stop)
    text = Text(rows=prepared.digest, engine=engine.info()["name"])
    if begun != text:
        # Delete the results of the old text before the new record is written. Otherwise, they would count as
        # results of the new text after a kill.
        part.begin_again()
        write_record(part.path / "text.json", text)
    local = LocalRound(
        definition=definition,
        number=invited.number,
        start_W=history.s_W,
        w_base_W=package.values(),
    )
    rows = training_rows(prepared)
    try:
        context.progress.phase(f"round {invited.number} of {name}: measuring the pooled state")
        gain = read_record(part.path / "gain.json", Gain)
        if gain is None:
            gain = Gain(gain=_measured_gain(local, engine, prepared))
            write_record(part.path / "gain.json", gain)
        context.progress.phase(f"round {invited.number} of {name}: {definition.steps} steps")
        # This seed only orders the rows of this device. The directions come from the definition.
        batches = TrainingBatches(rows, batch_rows=definition.batch_rows, seed=0)
        c_TQ = take_local_steps(local, engine, batches, part.path)
    except RunInterrupted:
        return False
    contribution = Contribution(
        definition=definition,
        round_number=invited.number,
        weight=_weight(rows, definition),
        start_digest=invited.start_digest,
        c_TQ=c_TQ,
        gain=gain.gain,
    )
    write_atomic(part.contribution, signed_contribution(identity, contribution), mode=0o600)
    return True


def training_rows(prepared: Prepared) -> list[Row]:
    """Return the rows that a round may train on.

    The later parts of a short text judge a personal model, so only its first part trains a round.
    """
    return prepared.stages[0].train if prepared.stages else prepared.train


def _prepared(data_paths: Sequence[Path], package: Package, definition: Definition) -> Prepared:
    documents, report = read_documents(data_paths)
    positions = int(package.config.get("max_position_embeddings") or 1 << 31)
    tokenizer = package_tokenizer(package)
    try:
        row_tokens = min(definition.row_tokens, positions)
        return prepare(documents, tokenizer, row_tokens=row_tokens, report=report)
    finally:
        tokenizer.close()


def _measured_gain(local: LocalRound, engine: Engine, prepared: Prepared) -> int:
    # Before the first round, the pooled state is the base, so there is nothing to measure.
    if not local.start_W.any():
        return 0
    rows, rules = prepared.select or prepared.test, local.definition
    pooled_W = values(local.w_base_W, local.start_W, rules.log.step_unit_exponent)
    nats = mean_loss(engine, local.w_base_W, rows) - mean_loss(engine, pooled_W, rows)
    # A state that breaks the model is reported with the lowest possible gain.
    if not math.isfinite(nats):
        nats = -GAIN_NATS
    # FORMAT 13.2: the gain is clipped and converted to the units of a contribution.
    return round(max(-1.0, min(1.0, nats / GAIN_NATS)) * rules.gain_bound)


def _weight(rows: Sequence[Row], definition: Definition) -> int:
    tokens = sum(int(row.target_T.sum()) for row in rows)
    # The division rounds up. FORMAT 13.2: a weight is 1 to `max_weight`.
    return max(1, min(definition.max_weight, -(-tokens // WEIGHT_TOKENS)))

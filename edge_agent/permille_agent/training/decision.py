"""Decision whether the state that a run has trained is adopted.

1. The state is multiplied by the largest factor of 8/8, 7/8, ..., 1/8 for which two conditions hold: The
   loss on general text is within its bound, and the base's answers to general questions are kept
   (`evaluation.py`). The number of eighths is the strength of the state.
2. The memory is computed with the state in place, at the lower strength that it has beside a memory. Of the
   state, the memory and both, the select split chooses the model. Its memory must keep the base's answers,
   too (`parts.py`).
3. The chosen model is compared with the base on the test split (`evidence.py`).
4. If a personal model is active, the chosen model is also compared with that model.

The model is adopted if it is significantly better in each comparison. Decisions are numbered, and later ones
need stronger evidence. This bounds the probability of any false adoption on a device.

- If the active model cannot be opened, the comparison with the base decides.
- If the active model belongs to another package, each model reads the same documents with its own
  tokenizer. The losses are then compared per byte.
- A short text is split into parts (`preparation.py`). Each part after the first tests a state that was
  trained on the parts before it. The final state is trained on the whole text. If the final state is adopted,
  later comparisons with it leave out this text. In the same way, each part judges a memory of the parts
  before it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np
from numpy.typing import NDArray

from permille.engines.interface import Engine
from permille.errors import InputError, OperatorError, PackageError
from permille.training.strength import EIGHTHS, scaled
from permille.zo.lattice import MAX_STEP_UNIT_EXPONENT, state_digest, values
from permille_agent.state.home import Home, read_record, write_record
from permille_agent.state.models import Active
from permille_agent.text.documents import Document
from permille_agent.text.preparation import LITTLE_GROUP_TOKENS, LITTLE_TOKENS, Split, tokenize
from permille_agent.text.reading import passages
from permille_agent.text.rows import Row, document_rows, rows_in_groups, rows_in_pieces
from permille_agent.text.tokens import TextTokenizer, package_tokenizer
from permille_agent.training.answers import Sample
from permille_agent.training.evaluation import (
    DocumentLosses,
    GeneralLoss,
    Kept,
    document_losses,
    joined,
    keep_general,
    mean_loss,
    summed,
)
from permille_agent.training.evidence import GROUP_TOKENS, Comparison, compare_losses, merged
from permille_agent.training.memory import Part, memory_share, remembers
from permille_agent.training.parts import Candidates, Model, Parts, ScaledState, choose_parts
from permille_agent.training.run import LearnedText, Run, RunFolder, finite_or_none
from permille_agent.training.steps import SelectedState, Stop

PIECE_TOKENS = 64
"""Approximate number of targets per piece. A test needs 20 pieces, and 2,000 tokens of text give about 30."""
_LOWER_RATE = "lower the rate with --rate-scale 0.1, or add more text"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenModel:
    """A model that can be evaluated. `row_tokens` is the largest number of tokens in one of its rows."""

    engine: Engine
    values_K: NDArray[np.float32]
    tokenizer: TextTokenizer
    row_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Decision on the result of a run, with its numbers. Numbers that were not finite are None.

    Attributes:
        descent: the index of the descent that the state comes from, among all descents of the run.
        step: the number of that descent's steps up to the state.
        steps: the number of all steps of that descent.
        stopped: why the last descent stopped.
        state_digest: the digest of the state at full strength. Replaying a log gives this state.
        scaled_digest: the digest of the scaled state that was judged. None at full strength.
        strength: the strength that was judged, in eighths. 0 means that even one eighth costs too much
            general knowledge.
        fault: what a larger strength would do to an answer. "" if the answers are not the reason
            for the strength.
        general: the losses on general text. None if the package has no reference text.
        answers: answers of the base and of the scaled state to general questions.
        incumbent: the model that was active at the time of the decision.
        adopted: whether the state replaces the incumbent.
        reason: reason of the decision, for the user.
        loss_base: the loss of the base on the test split, in nats per token.
        loss_personal: the loss of the chosen model there.
        loss_state: the loss there of the state alone, the only one that a report has.
        parts: the choice among state and memory. None if the run made no memory.
        state_against_base: the reduction of the loss from the base to the state alone.
        number: the index of this decision among all on this device, from 1. 0 if nothing was compared.
        against_base: the reduction of the loss from the base to the chosen model.
        against_active: the reduction of the loss from the active model to the chosen model.
        rows: the rows on which losses were measured, in words.
    """

    descent: int
    step: int
    steps: int
    stopped: Stop
    state_digest: str
    incumbent: Active
    number: int
    adopted: bool = False
    reason: str
    loss_base: float | None
    bits_per_byte_base: float | None
    loss_personal: float | None = None
    bits_per_byte_personal: float | None = None
    against_base: Comparison | None = None
    against_active: Comparison | None = None
    rows: str = ""
    strength: int = EIGHTHS
    scaled_digest: str | None = None
    fault: str = ""
    general: GeneralLoss | None = None
    answers: tuple[Sample, ...] = ()
    loss_state: float | None = None
    state_against_base: Comparison | None = None
    parts: Parts | None = None

    @property
    def part(self) -> Part:
        """Return the parts of the model that was chosen."""
        return Part.STATE if self.parts is None else self.parts.chosen

    @property
    def beside_memory(self) -> tuple[int, str | None]:
        """Return strength and digest of the state beside the memory. 0 and None are the base."""
        return (0, None) if self.parts is None else (self.parts.strength, self.parts.state_digest)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLosses:
    """Losses of the compared pieces of text. None replaces a loss that was not finite.

    Pieces are parts of rows (about 64 targets), groups of a short text (24 targets), or passages.
    """

    nats: tuple[float | None, ...]
    tokens: tuple[int, ...]
    bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionCount:
    """The count of decisions on this device. A run stores it as the number of its own decision."""

    decisions: int


def next_decision(home: Home) -> DecisionCount:
    """Count a decision durably, and return the new count. No number is used twice."""
    known = read_record(home.decisions, DecisionCount) or DecisionCount(decisions=0)
    count = DecisionCount(decisions=known.decisions + 1)
    write_record(home.decisions, count)
    return count


def decide_adoption(
    home: Home,
    run: Run,
    selected: SelectedState,
    incumbent: Active,
    open_incumbent: Callable[[], OpenModel],
) -> Decision:
    """Judge the selected state, and return the durable decision.

    Args:
        home: the home folder, which counts the decisions.
        run: the run.
        selected: the state that the run has selected.
        incumbent: the active model.
        open_incumbent: opens the active model. Not called if no personal model is active.
    """

    def decide() -> Decision:
        # Keep the number when a run is resumed. A new number would demand stronger evidence.
        number = run.folder.once("decision-number", DecisionCount, lambda: next_decision(home)).decisions
        learned = LearnedText()
        if incumbent.run is not None:
            learned = RunFolder(home.runs / incumbent.run).load("learned", LearnedText) or learned
        return _decide(
            run, selected, number, _Incumbent(incumbent, open_incumbent, frozenset(learned.groups))
        )

    judged = run.folder.once("incumbent", Active, lambda: incumbent)
    if incumbent not in (judged, Active(package=run.package.digest, run=run.folder.name)):
        # A kill interrupted the run after it was compared with a model that is no longer in use. Compare it
        # with the model that is. The incumbent goes last, so that another kill changes nothing.
        run.folder.discard("decision", "decision-number", "losses-active", "incumbent")
        run.folder.store("incumbent", incumbent)
    return run.folder.once("decision", Decision, decide)


def decide_untested(run: Run, incumbent: Active) -> Decision:
    """Return the durable decision on a text that is too short for a test. Only a memory is made of it.

    No comparison is made, so the decision does not count among those of the device.
    """

    def decide() -> Decision:
        parts = choose_parts(run, Candidates(run), lambda _: math.nan)
        adopted = parts.chosen is Part.MEMORY
        prepared = run.prepared
        is_whole = memory_share(prepared.read, prepared.separator, run.options.memory) == 1
        told = (
            f"the model remembers {'' if is_whole else 'the end of '}this text word by word. It is untested"
            if adopted
            else f"it would {parts.fault}"
        )
        tokens = run.prepared.counts[Split.TRAIN].tokens
        return Decision(
            descent=0,
            step=0,
            steps=0,
            stopped=Stop.STEPS,
            state_digest=state_digest(
                np.zeros(run.package.k, np.int64),
                mask_digest=run.package.mask_digest,
                step_unit_exponent=MAX_STEP_UNIT_EXPONENT,
            ),
            incumbent=incumbent,
            number=0,
            adopted=adopted,
            reason=f"{told}: {tokens} tokens are too few to train and test a state. "
            f"This needs {LITTLE_TOKENS}, and some more in long paragraphs",
            loss_base=None,
            bits_per_byte_base=None,
            strength=0,
            parts=parts,
        )

    return run.folder.once("decision", Decision, decide)


@dataclass(frozen=True, slots=True)
class _Incumbent:
    """The active model, a function that opens it, and the groups of text that it has learned from."""

    model: Active
    open: Callable[[], OpenModel]
    learned: frozenset[str]


def _decide(run: Run, selected: SelectedState, number: int, incumbent: _Incumbent) -> Decision:
    # Measure the base first, because every outcome reports its losses.
    base = _losses(run, "base", lambda _: (run.engine, run.w_base_K))
    decision = Decision(
        descent=selected.descent,
        step=selected.step,
        steps=selected.steps,
        stopped=selected.stopped,
        state_digest=_digest(run, selected, EIGHTHS),
        incumbent=incumbent.model,
        number=number,
        reason=_no_step(selected.stopped),
        loss_base=finite_or_none(base.per_token),
        bits_per_byte_base=finite_or_none(base.bits_per_byte),
        rows=rows_words(run.prepared.test, run.options.row_tokens),
        strength=0,
    )
    # Without a step, no state was selected. Judging the start would only use up test text.
    if selected.step or run.judges_start:
        kept = keep_general(run, selected.s_K, selected.header.step_unit_exponent)
        decision = replace(
            decision, strength=kept.strength, fault=kept.fault, general=kept.general, answers=kept.answers
        )
        if not kept.strength:
            decision = replace(decision, reason=_too_costly(run, kept))
        elif kept.strength < EIGHTHS:
            decision = replace(decision, scaled_digest=_digest(run, selected, kept.strength))
    strength = decision.strength
    candidates = Candidates(run, strength, partial(_scaled_state, run, selected) if strength else None)

    def losses_of(part: Part) -> DocumentLosses:
        return _losses(run, part.value, candidates.judged(part).__getitem__)

    def loss_of(part: Part) -> float:
        if run.prepared.stages:
            return losses_of(part).per_token
        return mean_loss(*candidates.whole(part), run.prepared.select)

    if remembers(run):
        parts = choose_parts(run, candidates, loss_of)
        decision = replace(decision, parts=parts)
        if parts.chosen is Part.BASE:
            why = f"would {parts.fault}" if parts.fault else "of the text did not help, either"
            return replace(decision, reason=f"{decision.reason}; a memory {why}")
    elif not strength:
        return decision
    chosen = candidates.judged(decision.part)
    personal, state = losses_of(decision.part), losses_of(Part.STATE) if strength else base
    least = LITTLE_GROUP_TOKENS if run.prepared.stages else GROUP_TOKENS
    where = "on parts of the text, before training on them" if run.prepared.stages else "on held-out text"
    against_base = _compared(base, personal, number, least)
    decision = replace(
        decision,
        loss_personal=finite_or_none(personal.per_token),
        loss_state=finite_or_none(state.per_token),
        bits_per_byte_personal=finite_or_none(personal.bits_per_byte),
        against_base=_finite(against_base),
        state_against_base=_finite(_compared(base, state, number, least)),
        adopted=against_base.better,
        reason=f"better than the base {where}",
    )
    if not against_base.better:
        return replace(decision, reason=f"not surely better than the base {where}")
    if incumbent.model.run is None:  # the base is active
        return decision
    return _against_active(run, decision, chosen, incumbent, least, where)


def _against_active(
    run: Run,
    decision: Decision,
    judges: Sequence[Model],
    incumbent: _Incumbent,
    least: int,
    where: str,
) -> Decision:
    """Compare a model that is better than the base with the active model, and return the decision.

    Args:
        judges: the chosen model, for each tested part of the text.
        least: the least tokens of a compared piece.
        where: the text of the test, in words.
    """
    try:
        first, second = _losses_beside_active(run, decision.part, judges, incumbent)
    except (InputError, PackageError, OperatorError) as exc:
        # The device can no longer use the active model, so nothing is lost by replacing it.
        return replace(decision, reason=f"better than the base; the active model cannot be opened: {exc}")
    if not len(first.tokens_D):
        reason = "the active model has learned from all of this text: add new text to compare the two models"
        return replace(decision, adopted=False, reason=reason)
    against_active = _compared(first, second, decision.number, least)
    reason = f"better than the base and than the active model {where}"
    if not against_active.better:
        reason = f"better than the base, but not surely better than the active model {where}"
        if incumbent.learned:
            reason += ", without the text that the active model has learned from"
    return replace(
        decision, against_active=_finite(against_active), adopted=against_active.better, reason=reason
    )


def _scaled_state(run: Run, selected: SelectedState, eighths: int) -> ScaledState:
    """Return the selected state at a strength."""

    def values_of(s_K: NDArray[np.int64]) -> NDArray[np.float32]:
        return values(run.w_base_K, scaled(s_K, eighths), selected.header.step_unit_exponent)

    return ScaledState(
        eighths=eighths,
        values_K=values_of(selected.s_K),
        # A short text has one state for each tested part. No state was trained on the part that tests it.
        judges=[values_of(s_K) for s_K in selected.judges or (selected.s_K,)],
        digest=_digest(run, selected, eighths),
    )


def _digest(run: Run, selected: SelectedState, eighths: int) -> str:
    return state_digest(
        scaled(selected.s_K, eighths),
        mask_digest=run.package.mask_digest,
        step_unit_exponent=selected.header.step_unit_exponent,
    )


def _losses_beside_active(
    run: Run, part: Part, judges: Sequence[Model], incumbent: _Incumbent
) -> tuple[DocumentLosses, DocumentLosses]:
    """Return the losses of the active model and of the run's model.

    Two models of one package are compared on the same rows of tokens. Models of two packages are compared on
    the same passages of text. Text that the active model has learned from is left out.
    """
    documents = run.prepared.test_documents
    if incumbent.model.package == run.package.digest:
        personal = _losses(run, part.value, judges.__getitem__)
        # The model is opened once for all parts, and not at all if its losses are already stored.
        opened = cache(incumbent.open)
        active = _losses(run, "active", lambda _: (opened().engine, opened().values_K))
        new_D = np.concatenate([part.unlearned(documents, incumbent.learned) for part in _parts(run)])
        return active.of(new_D), personal.of(new_D)
    tokenizer, row_tokens = package_tokenizer(run.package, run.options.learn), run.options.row_tokens
    own = [
        OpenModel(engine=engine, values_K=values_K, tokenizer=tokenizer, row_tokens=row_tokens)
        for engine, values_K in judges
    ]
    parts = [passages(documents[stage.documents]) for stage in run.prepared.stages] or [passages(documents)]
    whole = [document for part in parts for document in part]
    active = _measured_once(run.folder, "active", lambda: _passage_losses(whole, incumbent.open()))
    personal = _measured_once(
        run.folder, "personal-passages", lambda: joined(map(_passage_losses, parts, own))
    )
    # Leave out text that the active model has learned from. Its losses there say nothing about new text.
    new_D = np.array([document.group not in incumbent.learned for document in whole])
    # A passage has 0 tokens if a tokenizer refused it. Compare only passages that both tokenizers accepted.
    both_D = new_D & (active.tokens_D > 0) & (personal.tokens_D > 0)
    return active.of(both_D), personal.of(both_D)


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows that judge a state.

    In `rows`, `document_T` holds the index of each token's document. In `grouped`, it holds the index of the
    group in which the token is compared.
    """

    rows: list[Row]
    grouped: list[Row]

    @property
    def groups(self) -> int:
        """Number of compared groups."""
        return max(int(row.document_T[row.target_T].max()) for row in self.grouped) + 1

    def unlearned(self, documents: Sequence[Document], learned: frozenset[str]) -> NDArray[np.bool_]:
        """Return a mask of the groups whose documents are not in `learned`."""
        new_D = np.ones(self.groups, dtype=np.bool_)
        for row, grouped in zip(self.rows, self.grouped, strict=True):
            if documents[int(row.document_T[0])].group in learned:
                new_D[grouped.document_T[grouped.target_T]] = False
        return new_D


def _parts(run: Run) -> list[_Part]:
    """Return the text that judges states. This is the test split, or the parts of a short text."""
    test, stages = run.prepared.test, run.prepared.stages
    if not stages:
        return [_Part(test, rows_in_pieces(test, PIECE_TOKENS))]
    parts = [test[stage.rows] for stage in stages]
    return [_Part(rows, rows_in_groups(rows, LITTLE_GROUP_TOKENS)) for rows in parts]


def _compared(first: DocumentLosses, second: DocumentLosses, number: int, least: int) -> Comparison:
    """Compare the losses of two models on the same text, in nats per token of the second model."""
    # A piece with too few targets is merged with its neighbour.
    group_D = merged(second.tokens_D, least)
    first, second = summed(first, group_D), summed(second, group_D)
    bytes_a_token = second.bytes_D.sum() / second.tokens_D.sum()
    if np.array_equal(first.tokens_D, second.tokens_D) and np.array_equal(first.bytes_D, second.bytes_D):
        gain_G = (first.nats_D - second.nats_D) / second.tokens_D
    else:
        # Tokenizers of two packages cut the text differently, so only losses per byte can be compared.
        gain_G = (first.nats_D / first.bytes_D - second.nats_D / second.bytes_D) * bytes_a_token
    return compare_losses(gain_G, second.tokens_D, decision=number)


def _passage_losses(documents: Sequence[Document], model: OpenModel) -> DocumentLosses:
    """Return the losses of each passage. A passage that cannot be tokenized has 0 tokens."""
    known, tokenized = tokenize(documents, model.tokenizer, row_tokens=model.row_tokens)
    rows = document_rows(tokenized, model.row_tokens)
    found = document_losses(model.engine, model.values_K, rows, len(known))
    # Look passages up by identity, because two of them may have the same text.
    place_of = {id(document): place for place, document in enumerate(documents)}
    nats_D = np.zeros(len(documents))
    tokens_D, bytes_D = (np.zeros(len(documents), np.int64) for _ in range(2))
    for index, document in enumerate(known):
        place = place_of[id(document)]
        nats_D[place], tokens_D[place] = found.nats_D[index], found.tokens_D[index]
        bytes_D[place] = found.bytes_D[index]
    return DocumentLosses(nats_D, tokens_D, bytes_D)


def _losses(run: Run, name: str, model_of: Callable[[int], Model]) -> DocumentLosses:
    """Return the loss of each piece of the test split.

    `model_of(n)` returns the model that part n judges.
    """

    def measure() -> DocumentLosses:
        return joined(
            document_losses(*model_of(number), part.grouped, part.groups)
            for number, part in enumerate(_parts(run))
        )

    return _measured_once(run.folder, name, measure)


def _measured_once(folder: RunFolder, name: str, measure: Callable[[], DocumentLosses]) -> DocumentLosses:
    def stored() -> StoredLosses:
        losses = measure()
        nats = tuple(finite_or_none(nats) for nats in losses.nats_D.tolist())
        return StoredLosses(
            nats=nats, tokens=tuple(losses.tokens_D.tolist()), bytes=tuple(losses.bytes_D.tolist())
        )

    return _unpacked(folder.once(f"losses-{name}", StoredLosses, stored))


def _unpacked(known: StoredLosses) -> DocumentLosses:
    return DocumentLosses(
        np.array([math.nan if nats is None else nats for nats in known.nats], dtype=np.float64),
        np.array(known.tokens, dtype=np.int64),
        np.array(known.bytes, dtype=np.int64),
    )


def _finite(comparison: Comparison) -> Comparison | None:
    return comparison if math.isfinite(comparison.improvement) else None


def _too_costly(run: Run, kept: Kept) -> str:
    if kept.fault:
        return (
            f"it would {kept.fault}, even with an eighth of what was trained. The base model does not; "
            f"{_LOWER_RATE}"
        )
    rise = kept.general.rise if kept.general else None
    by = "by too many" if rise is None else f"by {rise:.4f}"
    return (
        "it would lose general knowledge: even an eighth of what was trained raises the loss on general "
        f"text {by} nats per token, and at most {run.options.keep_general:g} are allowed; {_LOWER_RATE}, or "
        "allow more with --keep-general"
    )


def rows_words(rows: Sequence[Row], row_tokens: int) -> str:
    """Describe the rows on which a loss is measured, as the model reads them in use."""
    begins = "each begins with BOS, as in use" if rows and rows[0].begun else "without BOS, as in use"
    return f"rows of at most {row_tokens} tokens of one document; {begins}"


def _no_step(stopped: Stop) -> str:
    match stopped:
        case Stop.REJECTED:
            return f"too many steps had no finite loss, with every rate that was tried; {_LOWER_RATE}"
        case Stop.DIVERGED:
            return f"training diverged with every rate that was tried; {_LOWER_RATE}"
    return "training did not bring the loss below that of its start, on the text that selects the result"

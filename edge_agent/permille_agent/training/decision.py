"""Whether the selected state is adopted: judged once, on text that nothing has looked at.

Adopted means better than the base and, where another personalised model is active, better than that one, each
by the lower end of a 95% interval (`evaluation.py`). An active model that cannot be opened any more protects
nothing. The active model may belong to another package with another tokenizer: it is judged under its own, on
the same documents, in nats per byte of its own targets.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from permille.engines.interface import Engine
from permille.errors import InputError, OperatorError, PackageError
from permille.zo.lattice import state_digest, values
from permille_agent.state.models import Active
from permille_agent.text.documents import Document
from permille_agent.text.preparation import tokenize
from permille_agent.text.rows import document_rows
from permille_agent.text.tokens import TextTokenizer
from permille_agent.training.evaluation import (
    Comparison,
    DocumentLosses,
    by_group,
    document_losses,
    paired_bootstrap,
)
from permille_agent.training.run import Run, RunFolder, finite_or_none
from permille_agent.training.step_size import search_seed
from permille_agent.training.steps import SelectedState
from permille_agent.training.stopping import Stop


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenModel:
    """A model that can be evaluated; `row_tokens` is how long its rows may be."""

    engine: Engine
    values_K: NDArray[np.float32]
    tokenizer: TextTokenizer
    row_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What a run ended with, and whether it is adopted. Numbers that were not finite are None.

    Attributes:
        descent: which descent the state is from.
        step: how many of its steps it is made of.
        steps: how many steps the descent made.
        stopped: why the last descent stopped.
        state_digest: of the state.
        incumbent: what was active when this was decided.
        adopted: whether the state replaces it.
        reason: why, for the user.
        loss_base: of the base on the test split, nats a token.
        against_base: how much lower the state's loss is, per token.
        against_active: the same against a personalised model that is active, per byte.
    """

    descent: int
    step: int
    steps: int
    stopped: Stop
    state_digest: str
    incumbent: Active
    adopted: bool = False
    reason: str
    loss_base: float | None
    bits_per_byte_base: float | None
    loss_personal: float | None = None
    bits_per_byte_personal: float | None = None
    against_base: Comparison | None = None
    against_active: Comparison | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLosses:
    """Losses by group of documents, as a run keeps them; None where they were not finite."""

    nats: tuple[float | None, ...]
    tokens: tuple[int, ...]
    bytes: tuple[int, ...]


def decide_adoption(
    run: Run, selected: SelectedState, incumbent: Active, open_incumbent: Callable[[], OpenModel]
) -> Decision:
    """Judge the selected state; the decision is durable before anything acts on it.

    Args:
        run: that ended.
        selected: the state that it ended with.
        incumbent: what is active now.
        open_incumbent: opens it; called only where it is personalised.
    """
    return run.folder.once("decision", Decision, lambda: _decide(run, selected, incumbent, open_incumbent))


def _decide(
    run: Run, selected: SelectedState, incumbent: Active, open_incumbent: Callable[[], OpenModel]
) -> Decision:
    base = _losses(run, "base", run.w_base_K)
    exponent = selected.header.step_unit_exponent
    mask_digest = run.package.mask_digest
    decision = Decision(
        descent=selected.descent,
        step=selected.step,
        steps=selected.steps,
        stopped=selected.stopped,
        state_digest=state_digest(selected.s_K, mask_digest=mask_digest, step_unit_exponent=exponent),
        incumbent=incumbent,
        reason=_no_step(selected.stopped),
        loss_base=finite_or_none(base.per_token),
        bits_per_byte_base=finite_or_none(base.bits_per_byte),
    )
    if selected.step == 0:
        return decision
    personal = _losses(run, "personal", values(run.w_base_K, selected.s_K, exponent))
    seed = search_seed(run.options.seed, "bootstrap")
    against_base = paired_bootstrap(base.nats_D, personal.nats_D, base.tokens_D, seed=seed)
    decision = replace(
        decision,
        loss_personal=finite_or_none(personal.per_token),
        bits_per_byte_personal=finite_or_none(personal.bits_per_byte),
        against_base=_finite(against_base),
        adopted=against_base.better,
        reason="better than the base on held-out text",
    )
    if not against_base.better:
        return replace(decision, reason="not surely better than the base on held-out text")
    if incumbent.run is None:
        return decision
    try:
        against_active = _against_active(run, personal, open_incumbent, seed)
    except (InputError, PackageError, OperatorError) as exc:
        # It cannot be used either: nothing is lost, and it stays in the history.
        return replace(decision, reason=f"the active model cannot be opened: {exc}")
    reason = "better than the base and than the active model on held-out text"
    if not against_active.better:
        reason = "better than the base, but not surely better than the active model on held-out text"
    return replace(
        decision, against_active=_finite(against_active), adopted=against_active.better, reason=reason
    )


def _against_active(
    run: Run, personal: DocumentLosses, open_incumbent: Callable[[], OpenModel], seed: int
) -> Comparison:
    documents = run.prepared.test_documents
    active = _measured_once(run.folder, "active", lambda: _active_losses(documents, open_incumbent()))
    both_G = active.tokens_D > 0
    return paired_bootstrap(
        active.nats_D[both_G],
        personal.nats_D[both_G],
        active.bytes_D[both_G],
        second_weight_D=personal.bytes_D[both_G],
        seed=seed,
    )


def _active_losses(documents: Sequence[Document], model: OpenModel) -> DocumentLosses:
    """Losses of the active model by group; 0 tokens where its tokenizer or template refused a document."""
    known, tokenized = tokenize(documents, model.tokenizer, row_tokens=model.row_tokens)
    rows = document_rows(tokenized, model.row_tokens)
    found = document_losses(model.engine, model.values_K, rows, len(known))
    place_of = {id(document): place for place, document in enumerate(documents)}
    shown = {id(document) for document in known}
    refused = {document.group for document in documents if id(document) not in shown}
    nats_D = np.zeros(len(documents))
    tokens_D, bytes_D = (np.zeros(len(documents), np.int64) for _ in range(2))
    for index, document in enumerate(known):
        if document.group not in refused:
            place = place_of[id(document)]
            nats_D[place], tokens_D[place] = found.nats_D[index], found.tokens_D[index]
            bytes_D[place] = found.bytes_D[index]
    losses = DocumentLosses(nats_D, tokens_D, bytes_D)
    return by_group(losses, [document.group for document in documents])


def _losses(run: Run, name: str, values_K: NDArray[np.float32]) -> DocumentLosses:
    """Losses on the test split by group of documents."""
    documents = run.prepared.test_documents

    def measure() -> DocumentLosses:
        losses = document_losses(run.engine, values_K, run.prepared.test, len(documents))
        return by_group(losses, [document.group for document in documents])

    return _measured_once(run.folder, name, measure)


def _measured_once(folder: RunFolder, name: str, measure: Callable[[], DocumentLosses]) -> DocumentLosses:
    def stored() -> StoredLosses:
        losses = measure()
        nats = tuple(finite_or_none(nats) for nats in losses.nats_D.tolist())
        return StoredLosses(
            nats=nats, tokens=tuple(losses.tokens_D.tolist()), bytes=tuple(losses.bytes_D.tolist())
        )

    known = folder.once(f"losses-{name}", StoredLosses, stored)
    return DocumentLosses(
        np.array([math.nan if nats is None else nats for nats in known.nats], dtype=np.float64),
        np.array(known.tokens, dtype=np.int64),
        np.array(known.bytes, dtype=np.int64),
    )


def _finite(comparison: Comparison) -> Comparison | None:
    return comparison if math.isfinite(comparison.improvement) else None


def _no_step(stopped: Stop) -> str:
    match stopped:
        case Stop.REJECTED:
            return "too many steps had a loss that is not finite, with every step size that was tried"
        case Stop.DIVERGED:
            return "the loss grew with every step size that was tried"
    return "no state was better than the base on the select split"

"""Whether the chosen state is adopted: judged once, on text that nothing has looked at.

Adopted means better than the base and, where another personalised model is active, better than that one, each
by the lower end of a 95% interval (`evaluate.py`). An active model that cannot be opened any more protects
nothing. The active model may belong to another package with another
tokenizer: it is judged under its own, on the same documents, in nats per byte of its own targets.
"""

from collections.abc import Callable
from dataclasses import asdict

import numpy as np
from numpy.typing import NDArray

from permille.engines.interface import Engine
from permille.errors import InputError, OperatorError, PackageError
from permille.zo.lattice import state_digest, values
from permille_agent.state.activation import Active
from permille_agent.text.preparation import tokenize
from permille_agent.text.reading import DataReport
from permille_agent.text.rows import document_rows
from permille_agent.text.tokens import TextTokenizer
from permille_agent.training.evaluation import (
    Comparison,
    DocumentLosses,
    by_group,
    document_losses,
    paired_bootstrap,
)
from permille_agent.training.run import Json, RunFolder, finite_or_none
from permille_agent.training.setup import Setup
from permille_agent.training.step_size import search_seed
from permille_agent.training.steps import Chosen

# Opens the model that is active now: its engine, values, tokenizer, and how long its rows may be.
OpenModel = Callable[[], tuple[Engine, NDArray[np.float32], TextTokenizer, int]]


def judge(setup: Setup, run: RunFolder, chosen: Chosen, incumbent: Active, open_incumbent: OpenModel) -> Json:
    """The decision, durable before anything acts on it.

    Args:
        setup: of the run.
        run: its folder.
        chosen: the state that the run ended with.
        incumbent: what is active now.
        open_incumbent: opens it; called only where it is personalised.
    """

    def decide() -> Json:
        base = _losses(run, "base", setup, setup.w_base_K)
        exponent = chosen.header.step_unit_exponent
        decision: Json = {
            "attempt": chosen.attempt,
            "step": chosen.step,
            "steps": chosen.steps,
            "stopped": chosen.stopped,
            "state_digest": state_digest(
                chosen.s_K, mask_digest=setup.mask_digest, step_unit_exponent=exponent
            ),
            "incumbent": asdict(incumbent),
            "loss_base": finite_or_none(base.per_token),
            "bits_per_byte_base": finite_or_none(base.bits_per_byte),
        }
        if chosen.step == 0:
            return decision | {"adopted": False, "reason": _no_step(chosen.stopped)}
        personal = _losses(run, "personal", setup, values(setup.w_base_K, chosen.s_K, exponent))
        seed = search_seed(setup.options.seed, "bootstrap")
        against_base = paired_bootstrap(base.nats_D, personal.nats_D, base.tokens_D, seed=seed)
        decision |= {
            "loss_personal": finite_or_none(personal.per_token),
            "bits_per_byte_personal": finite_or_none(personal.bits_per_byte),
            "against_base": _json(against_base),
        }
        if not against_base.better:
            return decision | {"adopted": False, "reason": "not surely better than the base on held-out text"}
        if incumbent.run is None:
            return decision | {"adopted": True, "reason": "better than the base on held-out text"}
        try:
            against_active = _against_active(run, setup, personal, open_incumbent, seed)
        except (InputError, PackageError, OperatorError) as exc:
            # It cannot be used either: nothing is lost, and it stays in the history.
            return decision | {"adopted": True, "reason": f"the active model cannot be opened: {exc}"}
        reason = "better than the base and than the active model on held-out text"
        if not against_active.better:
            reason = "better than the base, but not surely better than the active model on held-out text"
        return decision | {
            "against_active": _json(against_active),
            "adopted": against_active.better,
            "reason": reason,
        }

    return run.once("decision", decide)


def _against_active(
    run: RunFolder, setup: Setup, personal: DocumentLosses, open_incumbent: OpenModel, seed: int
) -> Comparison:
    known = run.once("losses-active", lambda: _to_json(_active_losses(setup, open_incumbent)))
    active = _from_json(known)
    both_G = active.tokens_D > 0
    return paired_bootstrap(
        active.nats_D[both_G],
        personal.nats_D[both_G],
        active.bytes_D[both_G],
        second_weight_D=personal.bytes_D[both_G],
        seed=seed,
    )


def _active_losses(setup: Setup, open_incumbent: OpenModel) -> DocumentLosses:
    """Losses of the active model by group; 0 tokens where its tokenizer or template refused a document."""
    engine, values_K, tokenizer, row_tokens = open_incumbent()
    documents = setup.prepared.test_documents
    known, tokenized = tokenize(documents, tokenizer, DataReport(), row_tokens=row_tokens)
    found = document_losses(engine, values_K, document_rows(tokenized, row_tokens), len(known))
    of_document = {id(document): index for index, document in enumerate(known)}
    refused = {document.group for document in documents if id(document) not in of_document}
    losses = DocumentLosses(
        np.zeros(len(documents)), np.zeros(len(documents), np.int64), np.zeros(len(documents), np.int64)
    )
    for place, document in enumerate(documents):
        if document.group not in refused:
            index = of_document[id(document)]
            losses.nats_D[place] = found.nats_D[index]
            losses.tokens_D[place] = found.tokens_D[index]
            losses.bytes_D[place] = found.bytes_D[index]
    return by_group(losses, [document.group for document in documents])


def _losses(run: RunFolder, name: str, setup: Setup, values_K: NDArray[np.float32]) -> DocumentLosses:
    """Losses on the test split by group of documents, measured once."""
    documents = setup.prepared.test_documents

    def measure() -> Json:
        losses = document_losses(setup.engine, values_K, setup.prepared.test, len(documents))
        return _to_json(by_group(losses, [document.group for document in documents]))

    return _from_json(run.once(f"losses-{name}", measure))


def _to_json(losses: DocumentLosses) -> Json:
    nats = [finite_or_none(nats) for nats in losses.nats_D.tolist()]
    return {"nats": nats, "tokens": losses.tokens_D.tolist(), "bytes": losses.bytes_D.tolist()}


def _from_json(known: Json) -> DocumentLosses:
    return DocumentLosses(
        np.array([np.nan if nats is None else nats for nats in known["nats"]], dtype=np.float64),
        np.array(known["tokens"], dtype=np.int64),
        np.array(known["bytes"], dtype=np.int64),
    )


def _json(comparison: Comparison) -> Json:
    return {name: finite_or_none(number) for name, number in asdict(comparison).items()}


def _no_step(stopped: str) -> str:
    if stopped == "rejected":
        return "too many steps had a loss that is not finite, with every step size that was tried"
    if stopped == "diverged":
        return "the loss grew with every step size that was tried"
    return "no state was better than the base on the select split"

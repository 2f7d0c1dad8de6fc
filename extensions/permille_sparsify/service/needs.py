"""The memory and disk that a sparsification needs."""

from permille.store import inputs, rows
from permille.store.tables import Model
from permille_service.preflights.estimates import FLOAT_BYTES, PROCESS_BYTES, TOKENS_A_PASS, Needs, Sizes
from permille_service.preflights.planning import NOTHING, Planner
from permille_service.problems import as_conflicts
from permille_sparsify.schemas import Recovery, SparsificationCreate


def planned(planner: Planner, request: SparsificationCreate) -> Needs:
    """Estimate a sparsification. Refuse it if it does not fit the model, or if its name is taken."""
    inputs.check_name(planner.session, Model, planner.tenant_id, request.name)
    planner.check_sequences(request.corpus_id, request.model_id, request.sequences, request.length)
    sizes = planner.sizes(request.model_id)
    model = rows.get(planner.session, Model, tenant_id=planner.tenant_id, row_id=request.model_id)
    if sizes is None or model.config is None:
        return NOTHING
    with as_conflicts():
        request.plan().check(model.config)
    # Jobs decode a GGUF file to a folder of float32 values.
    size_bytes = None if model.source["kind"] == "gguf" else model.size_bytes
    model_bytes = size_bytes or sizes.parameters * FLOAT_BYTES
    return sparsification_needs(sizes, request, model_bytes=model_bytes)


def sparsification_needs(sizes: Sizes, request: SparsificationCreate, *, model_bytes: int) -> Needs:
    """Estimate the needs of a sparsification.

    Memory: the larger of two amounts. One is the embedding and the head, with the logits of a sequence. The
    other is a decoder layer with the Gram matrices of its inputs and the temporary arrays of SparseGPT. Disk:
    two copies of the model, and the hidden states.
    """
    sequences = request.sequences + 2 * request.evaluation_sequences
    tokens = sequences * request.length
    layer = sizes.scoped // sizes.layers
    features = sizes.largest // min(sizes.hidden, sizes.largest)  # input features of the widest linear layer
    ends = sizes.parameters - sizes.scoped + request.length * sizes.vocabulary
    held = max(ends, layer + 3 * sizes.largest + 6 * max(features, sizes.hidden) ** 2)
    needs = Needs(
        memory_bytes=PROCESS_BYTES + held * FLOAT_BYTES,
        disk_bytes=2 * model_bytes + 2 * tokens * sizes.hidden * FLOAT_BYTES,
    )
    if request.recovery is None:
        return needs
    return _recovery_needs(sizes, request, request.recovery, pruning=needs)


def _recovery_needs(
    sizes: Sizes, request: SparsificationCreate, recovery: Recovery, *, pruning: Needs
) -> Needs:
    """Return the needs of pruning and of the fine-tuning that follows.

    Memory: the whole model, the changed weights and gradients of a decoder layer, adapters with their
    gradients and moments, and logits with their gradients. Disk: the pruned model and the fine-tuned one.
    """
    adapters = 4 * 2 * recovery.rank * sizes.scoped // min(sizes.hidden, sizes.scoped)
    logits = 4 * max(request.length, TOKENS_A_PASS) * sizes.vocabulary
    held = sizes.parameters + 3 * sizes.scoped // sizes.layers + adapters + logits
    return Needs(
        memory_bytes=max(pruning.memory_bytes, PROCESS_BYTES + held * FLOAT_BYTES),
        disk_bytes=2 * pruning.disk_bytes,
    )

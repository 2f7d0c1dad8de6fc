"""The basis job: gradients of a corpus on a mask, the directions that they share, the evidence."""

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from sqlalchemy.orm import Session

from permille.corpora.sequences import token_sequences
from permille.errors import InputError
from permille.models.families import scoped_tensors
from permille.package.canonical import JSON
from permille.package.direction_layers import write_basis
from permille.package.manifest import Layer
from permille.sensitivity.basis import captured, learn_basis, whitening
from permille.store import results
from permille.store.tables import Mask
from workers.context import Publish, Result, TaskContext
from workers.payloads import BasisPayload, parse_payload
from workers.tasks.layers import layer_record, read_mask
from workers.tasks.sources import SourceCorpus, SourceModel, open_corpus, open_model, versions

LEFT_OUT_EVERY = 8
_MEASURED = 0.9  # of the time


def run(context: TaskContext) -> Publish:
    """Learn the basis of the payload.

    Raises:
        InputError: no such mask or corpus, weights that changed since the mask, gradients that do not serve.
        RetryableError: a hub or data set that cannot be reached.
    """
    payload = parse_payload(BasisPayload, context.claim.payload)
    with context.db.read() as session:
        mask_row = results.get_mask(session, tenant_id=context.claim.tenant_id, mask_id=payload.mask_id)
    context.progress(0.0, "opening the model")
    model = open_model(context, mask_row.model_id)
    if mask_row.provenance["model"]["digest"] != model.provenance["digest"]:
        raise InputError(f"expected the weights that {mask_row.id} was made of, got others")
    corpus = open_corpus(context, payload.corpus_id)
    stored = read_mask(context.blobs, mask_row.mask_digest)
    mask = {name: stored[name] for name, _ in scoped_tensors(model.checkpoint.config)}
    gradients_NK = _gradients(context, model, corpus, mask, payload)
    context.progress(_MEASURED, "learning")
    learned_N = np.arange(len(gradients_NK)) % LEFT_OUT_EVERY != LEFT_OUT_EVERY - 1
    rows_NK = _rows(context.work_folder, gradients_NK, learned_N)
    basis_KR = learn_basis(rows_NK, payload.rank)
    layer = write_basis(context.blobs, basis_KR, {name: indices.size for name, indices in mask.items()})
    context.progress(0.97, "reporting")
    provenance = _provenance(model, mask_row, corpus, payload, layer)
    left_out_NK = gradients_NK[~learned_N]
    report = {
        "k": mask_row.k,
        "learned_from": int(learned_N.sum()),
        "left_out": len(left_out_NK),
        "captured": _captured_by_rank(basis_KR, left_out_NK, whitening(rows_NK)),
        "corpus": corpus.report.as_json(),
        "provenance": provenance,
    }
    report_digest = context.blobs.put_bytes(json.dumps(report, allow_nan=False, sort_keys=True).encode())

    def publish(session: Session) -> Result:
        row = results.add_basis(
            session,
            tenant_id=context.claim.tenant_id,
            job_id=context.claim.job_id,
            model_id=mask_row.model_id,
            mask_id=mask_row.id,
            corpus_id=payload.corpus_id,
            options=payload.options(),
            k=mask_row.k,
            layer=layer_record(layer),
            provenance=provenance,
            report_digest=report_digest,
        )
        return Result(kind="basis", id=row.id)

    return publish


def _gradients(
    context: TaskContext,
    model: SourceModel,
    corpus: SourceCorpus,
    mask: dict[str, NDArray[np.uint32]],
    payload: BasisPayload,
) -> NDArray[np.float32]:
    from permille.models.loading import FileTokenizer, load_model
    from permille.sensitivity.gradients import masked_gradients

    folder = model.checkpoint.folder
    context.progress(0.01, "reading the corpus")
    sequences = token_sequences(
        FileTokenizer(folder), corpus.texts(context), payload.sequences, payload.length, payload.seed
    )
    context.progress(0.03, "loading the model")

    def progress(done: int, total: int) -> None:
        context.progress(0.05 + (_MEASURED - 0.05) * done / total, f"gradient {done}/{total}")

    return masked_gradients(
        load_model(folder), sequences, mask, progress=progress, folder=context.work_folder / "gradients"
    )


def _rows(
    folder: Path, gradients_NK: NDArray[np.float32], chosen_N: NDArray[np.bool_]
) -> NDArray[np.float32]:
    """A copy of the chosen rows as a mapped file: all rows together may not fit into memory."""
    numbers = np.flatnonzero(chosen_N)
    rows_NK = np.memmap(folder / "learned.f32", np.float32, "w+", shape=(numbers.size, gradients_NK.shape[1]))
    for target, number in enumerate(numbers):
        rows_NK[target] = gradients_NK[number]
    return rows_NK


def _captured_by_rank(
    basis_KR: NDArray[np.int8], left_out_NK: NDArray[np.float32], scaling_K: NDArray[np.float64]
) -> list[dict[str, float | int]]:
    """What the first 1, 2, 4, ... columns hold of whitened gradients that the basis was not learned from: the
    mean share of one sequence's, and the share of their mean's; beside it what random columns would hold."""
    if not len(left_out_NK):
        return []
    mean_1K = left_out_NK.mean(axis=0, dtype=np.float64, keepdims=True).astype(np.float32)
    rank = basis_KR.shape[1]
    return [
        {
            "rank": columns,
            "of_a_sequence": float(captured(basis_KR[:, :columns], left_out_NK, scaling_K).mean()),
            "of_the_mean": float(captured(basis_KR[:, :columns], mean_1K, scaling_K)[0]),
            "of_random_columns": min(1.0, columns / basis_KR.shape[0]),
        }
        for columns in sorted({*(1 << power for power in range(rank.bit_length())), rank})
    ]


def _provenance(
    model: SourceModel, mask: Mask, corpus: SourceCorpus, payload: BasisPayload, layer: Layer
) -> dict[str, JSON]:
    """Where it comes from: no clock, no row ids."""
    return {
        "model": model.provenance,
        "mask": mask.mask_digest,
        "corpus": corpus.provenance,
        "sequences": payload.sequences,
        "length": payload.length,
        "rank": payload.rank,
        "seed": payload.seed,
        "basis": layer.digest,
        "versions": versions("torch", "transformers", "tokenizers"),
    }

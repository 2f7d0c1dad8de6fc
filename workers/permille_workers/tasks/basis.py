"""The basis job: gradients of a corpus on a mask, the directions that they share, the evidence."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from sqlalchemy.orm import Session

from permille.corpora.sequences import Tokenizer, token_sequences
from permille.corpora.sources import ReadReport
from permille.digests import JSON
from permille.errors import InputError
from permille.models.families import scoped_tensors
from permille.package.direction_layers import write_basis
from permille.package.manifest import Layer
from permille.sensitivity.basis import captured, learn_basis, whitening
from permille.store import results
from permille.store.tables import Mask
from permille_workers.context import Publish, Result, TaskContext
from permille_workers.payloads import BasisPayload, parse_payload
from permille_workers.tasks.layers import layer_record, read_mask
from permille_workers.tasks.sources import SourceCorpus, SourceModel, open_corpus, open_model, versions

# Of eight texts one is left out whole, so that what is measured shares no text with what was learned.
LEFT_OUT_EVERY = 8
_MEASURED = 0.9  # of the time


@dataclass(frozen=True, slots=True)
class Sequences:
    """Token sequences [N, T]: `learned` rows to learn from, then those of the texts that are left out."""

    tokens_NT: NDArray[np.int64]
    learned: int
    note: str | None
    corpus: ReadReport


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
    context.progress(0.01, "reading the corpus")
    sequences = _sequences(context, model, corpus, payload)
    gradients_NK = _gradients(context, model, sequences.tokens_NT, mask)
    context.progress(_MEASURED, "learning")
    rows_NK, left_out_NK = gradients_NK[: sequences.learned], gradients_NK[sequences.learned :]
    basis_KR = learn_basis(rows_NK, payload.rank)
    layer = write_basis(context.blobs, basis_KR, {name: indices.size for name, indices in mask.items()})
    context.progress(0.97, "reporting")
    provenance = _provenance(model, mask_row, corpus, payload, layer)
    report = {
        "k": mask_row.k,
        "learned_from": len(rows_NK),
        "left_out": len(left_out_NK),
        "left_out_note": sequences.note,
        "captured": _captured_by_rank(basis_KR, left_out_NK, whitening(rows_NK)),
        "corpus": sequences.corpus.as_json(),
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


def _sequences(
    context: TaskContext, model: SourceModel, corpus: SourceCorpus, payload: BasisPayload
) -> Sequences:
    """Sequences to learn from, and an eighth of all from every 8th text, from which nothing is learned.

    Fewer of the latter where those texts hold fewer; none where the others then do not suffice.

    Raises:
        InputError: the corpus is too small to learn from.
    """
    from permille.models.loading import FileTokenizer

    tokenizer: Tokenizer = FileTokenizer(model.checkpoint.folder)
    left_out = payload.sequences // LEFT_OUT_EVERY

    def read(number: int, side: bool | None) -> tuple[NDArray[np.int64], ReadReport]:
        """Raises InputError when the texts of the side (None: all) are too few."""
        source = replace(corpus, report=ReadReport())
        texts = source.texts(context) if side is None else _side(source.texts(context), left_out=side)
        return token_sequences(tokenizer, texts, number, payload.length, payload.seed), source.report

    if not left_out:
        tokens_NT, report = read(payload.sequences, None)
        return Sequences(tokens_NT, len(tokens_NT), "fewer than 8 sequences: none is left out", report)
    learned = payload.sequences - left_out
    try:
        tokens_NT, report = read(learned, False)
    except InputError:
        tokens_NT, report = read(learned, None)
        why = "too few texts to leave out every 8th: nothing was measured"
        return Sequences(tokens_NT, learned, why, report)
    number = left_out
    while number:
        try:
            others_NT, _ = read(number, True)
        except InputError:
            number //= 2
            continue
        note = None if number == left_out else f"every 8th text holds less than {left_out} sequences"
        return Sequences(np.concatenate([tokens_NT, others_NT]), learned, note, report)
    return Sequences(tokens_NT, learned, "every 8th text holds no sequence: nothing was measured", report)


def _side(texts: Iterable[str], *, left_out: bool) -> Iterator[str]:
    """The texts that are left out, or those that are not."""
    last = LEFT_OUT_EVERY - 1
    return (text for number, text in enumerate(texts) if (number % LEFT_OUT_EVERY == last) == left_out)


def _gradients(
    context: TaskContext,
    model: SourceModel,
    tokens_NT: NDArray[np.int64],
    mask: dict[str, NDArray[np.uint32]],
) -> NDArray[np.float32]:
    from permille.models.loading import load_model
    from permille.sensitivity.gradients import masked_gradients

    context.progress(0.03, "loading the model")

    def progress(done: int, total: int) -> None:
        context.progress(0.05 + (_MEASURED - 0.05) * done / total, f"gradient {done}/{total}")

    return masked_gradients(
        load_model(model.checkpoint.folder),
        tokens_NT,
        mask,
        progress=progress,
        folder=context.work_folder / "gradients",
    )


def _captured_by_rank(
    basis_KR: NDArray[np.int8], left_out_NK: NDArray[np.float32], scaling_K: NDArray[np.float64]
) -> list[dict[str, float | int]]:
    """What the first 1, 2, 4, ... columns hold of whitened gradients of texts that are left out: the
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

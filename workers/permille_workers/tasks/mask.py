"""The mask job: scores of a model's weights, the mask that follows from them, and the evidence behind it."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sqlalchemy.orm import Session

from permille.corpora.sequences import token_sequences
from permille.digests import JSON
from permille.errors import InputError
from permille.models.families import scoped_tensors
from permille.package.layers import write_mask
from permille.package.manifest import Layer, decimal_text
from permille.sensitivity.coverage import Report, mask_report
from permille.sensitivity.masks import Allocation, MaskMethod, select_mask
from permille.sensitivity.plots import curve_picture
from permille.sensitivity.scores import put_scores
from permille.store import results
from permille_workers.context import Publish, Result, TaskContext
from permille_workers.payloads import MaskPayload, parse_payload
from permille_workers.tasks.layers import layer_record
from permille_workers.tasks.sources import SourceCorpus, SourceModel, open_corpus, open_model, versions

Tensors = Mapping[str, NDArray[np.float32]]
_SCORED = 0.9  # of the time


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scored:
    tensors: Tensors
    scores_digest: str | None
    provenance: dict[str, JSON]
    corpus_report: dict[str, object] | None


def run(context: TaskContext) -> Publish:
    """Choose the mask of the payload.

    Raises:
        InputError: options that do not go together, a model or corpus that does not serve.
        RetryableError: a hub or data set that cannot be reached.
    """
    payload = parse_payload(MaskPayload, context.claim.payload)
    method, allocation = _method(payload.method), _allocation(payload.allocation)
    context.progress(0.0, "opening the model")
    model = open_model(context, payload.model_id)
    if method is MaskMethod.FISHER:
        scored = _fisher(context, model, payload)
    else:
        tensors = model.checkpoint.weights(payload.scope)
        scored = _Scored(tensors=tensors, scores_digest=None, provenance={}, corpus_report=None)
    context.progress(_SCORED, "selecting")
    mask = select_mask(scored.tensors, method, payload.density, payload.seed, allocation)
    order = [name for name, _ in scoped_tensors(model.checkpoint.config)]
    layer = write_mask(context.blobs, mask, order)
    context.progress(0.95, "reporting")
    evidence = scored.tensors if method is MaskMethod.FISHER else _Magnitudes(scored.tensors)
    report = mask_report(evidence, mask)
    provenance = _provenance(model, payload, scored, layer)
    report_digest = context.blobs.put_bytes(_report_bytes(report, method, scored, provenance))
    picture = curve_picture({payload.method: report["curve"]}, density=payload.density)
    picture_digest = context.blobs.put_bytes(picture)

    def publish(session: Session) -> Result:
        row = results.add_mask(
            session,
            tenant_id=context.claim.tenant_id,
            job_id=context.claim.job_id,
            model_id=payload.model_id,
            corpus_id=payload.corpus_id if method is MaskMethod.FISHER else None,
            options=payload.options(),
            k=report["k"],
            layer=layer_record(layer),
            provenance=provenance,
            scores_digest=scored.scores_digest,
            report_digest=report_digest,
            picture_digest=picture_digest,
        )
        return Result(kind="mask", id=row.id)

    return publish


def _fisher(context: TaskContext, model: SourceModel, payload: MaskPayload) -> _Scored:
    from permille.models.loading import FileTokenizer, load_model
    from permille.sensitivity.fisher import fisher_scores

    if payload.corpus_id is None or payload.sequences is None or payload.length is None:
        raise InputError("expected corpus_id, sequences and length of a fisher mask, got one without")
    corpus: SourceCorpus = open_corpus(context, payload.corpus_id)
    folder = model.checkpoint.folder
    context.progress(0.01, "reading the corpus")
    sequences = token_sequences(
        FileTokenizer(folder), corpus.texts(context), payload.sequences, payload.length, payload.seed
    )
    context.progress(0.03, "loading the model")

    def progress(done: int, total: int) -> None:
        context.progress(0.05 + (_SCORED - 0.05) * done / total, f"fisher {done}/{total}")

    scores = fisher_scores(
        load_model(folder),
        sequences,
        payload.scope,
        progress=progress,
        spill_dir=context.work_folder / "scores",
        resume=context.work_folder / "fisher",
    )
    provenance: dict[str, JSON] = {
        "corpus": corpus.provenance,
        "sequences": payload.sequences,
        "length": payload.length,
        "versions": versions("torch", "transformers", "tokenizers"),
    }
    return _Scored(
        tensors=scores,
        scores_digest=put_scores(context.blobs, scores),
        provenance=provenance,
        corpus_report=corpus.report.as_json(),
    )


class _Magnitudes(Mapping[str, NDArray[np.float32]]):
    """Absolute weights as scores, read tensor by tensor."""

    def __init__(self, weights: Tensors) -> None:
        self._weights = weights

    def __getitem__(self, name: str) -> NDArray[np.float32]:
        return np.abs(self._weights[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def _provenance(model: SourceModel, payload: MaskPayload, scored: _Scored, layer: Layer) -> dict[str, JSON]:
    provenance: dict[str, JSON] = {
        "model": model.provenance,
        "method": payload.method,
        "density": decimal_text(payload.density),
        "scope": payload.scope,
        "allocation": payload.allocation,
        "seed": payload.seed,
        "mask": layer.digest,
        "versions": versions(),
    }
    if scored.scores_digest is not None:
        provenance["scores"] = scored.scores_digest
    return provenance | scored.provenance


def _report_bytes(report: Report, method: MaskMethod, scored: _Scored, provenance: dict[str, JSON]) -> bytes:
    """The evidence; `score` says what the coverage is of."""
    score = "fisher" if method is MaskMethod.FISHER else "magnitude"
    content = {**report, "score": score, "corpus": scored.corpus_report, "provenance": provenance}
    return json.dumps(content, allow_nan=False, sort_keys=True).encode()


def _method(name: str) -> MaskMethod:
    if name not in set(MaskMethod):
        raise InputError(f"expected a method of {', '.join(MaskMethod)}, got {name!r}")
    return MaskMethod(name)


def _allocation(name: str) -> Allocation:
    if name not in set(Allocation):
        raise InputError(f"expected an allocation of {', '.join(Allocation)}, got {name!r}")
    return Allocation(name)

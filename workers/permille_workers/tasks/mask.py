"""The mask job: score the weights of a model, select the mask, and write a report about it."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from permille.digests import JSON
from permille.files import write_atomic
from permille.models.families import scoped_tensors
from permille.models.settings import within_positions
from permille.package.layers import write_mask
from permille.package.manifest import decimal_text
from permille.schemas.masks import FisherMaskCreate, WeightMaskCreate
from permille.sensitivity.coverage import mask_report
from permille.sensitivity.masks import select_mask
from permille.sensitivity.scores import SHARD_SEQUENCES, Scores, fisher_work
from permille.store.artifacts import TaskResult
from permille_workers.runtime.context import PartsToAdd, Publish, TaskContext
from permille_workers.tasks import shard
from permille_workers.tasks.layers import blob_of_layer, publishes, report_blob
from permille_workers.tasks.sources import (
    Sampling,
    SourceModel,
    open_corpus,
    open_model,
    reach_corpus,
    versions,
)

Tensors = Mapping[str, NDArray[np.float32]]
Request = FisherMaskCreate | WeightMaskCreate
_SCORED = 0.9  # the job's progress when all weights are scored


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scored:
    """The numbers that decide the mask: Fisher scores on a corpus, or the weights themselves."""

    tensors: Tensors
    provenance: Mapping[str, JSON]
    corpus_read: dict[str, object] | None = None
    base: dict[str, object] | None = None


def run(context: TaskContext, request: Request) -> Publish | PartsToAdd:
    """Select a mask. If the scoring takes long, split it into parts, which are jobs of their own.

    Raises:
        InputError: the options contradict each other, or the model or corpus is unusable.
        RetryableError: the hub or the data set cannot be reached.
    """
    # Opening a model may take minutes. Sequences that an earlier attempt drew need no corpus.
    if isinstance(request, FisherMaskCreate) and shard.drawn_before(context) is None:
        context.progress(0.0, "reaching the corpus")
        reach_corpus(context, request.corpus_id)
    context.progress(0.0, "opening the model")
    model = open_model(context, request.model_id)
    if isinstance(request, FisherMaskCreate):
        fisher = _fisher(context, model, request)
        if isinstance(fisher, PartsToAdd):
            return fisher
        scored, score = fisher, "fisher"
    else:
        scored, score = _Scored(tensors=model.checkpoint.weights(request.scope), provenance={}), "magnitude"
    context.progress(_SCORED, "selecting")
    weights = model.checkpoint.weights(request.scope)
    mask = select_mask(scored.tensors, request.method, request.density, request.seed, weights=weights)
    order = [name for name, _ in scoped_tensors(model.checkpoint.config)]
    layer = write_mask(context.blobs, mask, order)
    context.progress(0.95, "reporting")
    report = mask_report(_Shown(weights, scored.tensors if score == "fisher" else None), mask)
    provenance: dict[str, JSON] = {
        "model": model.provenance,
        "method": request.method.value,
        "density": decimal_text(request.density),
        "scope": request.scope,
        "seed": request.seed,
        "mask": layer.digest,
        "versions": versions(),
        **scored.provenance,
    }
    read = {"corpus": scored.corpus_read, "base": scored.base}
    content = {**report, "score": score, **read, "provenance": provenance}
    return publishes(
        context,
        TaskResult(
            model_id=model.id,
            digest=layer.digest,
            k=report["k"],
            provenance=provenance,
            blobs=(blob_of_layer(layer), report_blob(context.blobs, content)),
        ),
    )


def _fisher(context: TaskContext, model: SourceModel, request: FisherMaskCreate) -> _Scored | PartsToAdd:
    drawn = shard.drawn_before(context) or _draw(context, model, request)
    base = _check_base(context, model, drawn)
    work = fisher_work(drawn.tokens_NT.size, model.checkpoint.parameters)
    if request.sequences > SHARD_SEQUENCES and work > context.settings.fisher_split_flops:
        found = shard.split_or_join(context, request, drawn)
        if isinstance(found, PartsToAdd):
            return found
        scores = found
    else:
        scores = _score(context, model, request, drawn)
    return _Scored(
        tensors=scores,
        provenance={
            "corpus": drawn.provenance,
            "sequences": request.sequences,
            "length": drawn.tokens_NT.shape[1],
            "dtype": context.settings.dtype,
            "versions": versions("torch", "transformers", "tokenizers"),
        },
        corpus_read=drawn.read,
        base=base,
    )


def _check_base(context: TaskContext, model: SourceModel, drawn: shard.Drawn) -> dict[str, object]:
    """Measure the base once per job, and warn the operator of oddities before the long work begins."""
    from permille.models.loading import FileTokenizer
    from permille.sensitivity.base_check import check_base, remarks
    from permille_workers.tasks.compute import open_torch_model

    known = context.work_folder / "base.json"
    if known.exists():
        return dict(json.loads(known.read_bytes()))
    context.progress(0.02, "measuring the base")
    opened = open_torch_model(context, model.checkpoint, drawn.tokens_NT.shape[1])
    losses = check_base(opened, drawn.tokens_NT, bos=FileTokenizer(model.checkpoint.folder).known_bos)
    found = [*remarks(losses)]
    words = f"base: loss {losses['loss']:.3f} nats per token on the corpus."
    context.progress(0.02, " ".join([words, *found]))
    report = {**losses, "remarks": found}
    write_atomic(known, json.dumps(report).encode())
    return report


def _draw(context: TaskContext, model: SourceModel, request: FisherMaskCreate) -> shard.Drawn:
    from permille.models.loading import FileTokenizer

    corpus = open_corpus(context, request.corpus_id)
    context.progress(0.01, "reading the corpus")
    length = within_positions(model.checkpoint.config, request.length)
    sampling = Sampling(number=request.sequences, length=length, seed=request.seed)
    sequences = corpus.sequences(FileTokenizer(model.checkpoint.folder), sampling)
    return shard.Drawn(tokens_NT=sequences.tokens_NT, provenance=corpus.provenance, read=sequences.read)


def _score(context: TaskContext, model: SourceModel, request: FisherMaskCreate, drawn: shard.Drawn) -> Scores:
    from permille.sensitivity.fisher import fisher_scores
    from permille_workers.tasks.compute import open_torch_model

    context.progress(0.03, "loading the model")

    return fisher_scores(
        open_torch_model(context, model.checkpoint, drawn.tokens_NT.shape[1]),
        drawn.tokens_NT,
        request.scope,
        progress=context.part(0.05, _SCORED, "fisher"),
        spill_dir=context.work_folder / "scores",
        resume=context.work_folder / "fisher",
    )


class _Shown(Mapping[str, NDArray[np.float32]]):
    """The numbers that the report describes, computed for one tensor at a time.

    With scores, the numbers are the scores. But a weight that is 0 has the number 0, because a mask never
    selects it. Without scores, the numbers are the absolute values of the weights.
    """

    def __init__(self, weights: Tensors, scores: Tensors | None) -> None:
        self._weights = weights
        self._scores = scores

    def __getitem__(self, name: str) -> NDArray[np.float32]:
        weights = self._weights[name]
        return np.abs(weights) if self._scores is None else self._scores[name] * (weights != 0)

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

"""Codes that are made with more than the weights: int4 that auto-round calibrates on a corpus, all layers in
one go (ADR 13); code books for a mask's scores, tensor by tensor."""

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import cast

from permille.digests import JSON
from permille.errors import InputError, OperatorError
from permille.models.checkpoint import Checkpoint
from permille.models.families import scoped_tensors
from permille.package.build import code
from permille.package.manifest import Quantization
from permille.quantization.types import Coded
from permille.schemas.jobs import JobKind
from permille.schemas.kinds import parse_request
from permille.schemas.masks import FisherMaskCreate
from permille.schemas.quantizations import AutoRound, SqueezeLLM
from permille.sensitivity.scores import load_scores
from permille.store import artifacts
from permille_workers.runtime.context import TaskContext
from permille_workers.tasks.sources import Sampling, SourceModel, open_corpus, versions

Tensors = Iterator[tuple[str, Coded]]
_SEED = 0
_SCORED = ("scores", "corpus", "sequences", "length", "seed", "dtype")  # of a mask's provenance


@dataclass(frozen=True, slots=True, kw_only=True)
class Codes:
    """A dense layer's codes and where they come from.

    Attributes:
        tensors: all of them, as often as they are asked for.
        corpus_read: what calibrating them has read.
        used: tokens that they were calibrated on, by corpus.
    """

    tensors: Callable[[], Tensors]
    provenance: Mapping[str, JSON]
    corpus_read: dict[str, object] | None = None
    used: Mapping[str, int] = field(default_factory=dict)


def calibrated_codes(context: TaskContext, checkpoint: Checkpoint, options: AutoRound) -> Codes:
    """Calibrate all dense tensors by auto-round. A cancel acts before and after.

    Raises:
        InputError: what auto-round cannot do; too little text.
        RetryableError: a data set that cannot be reached.
        OperatorError: auto-round is not installed.
    """
    if importlib.util.find_spec("auto_round") is None:
        raise OperatorError(
            'expected auto-round, which is not installed: pip install "permille[workers,evaluate]"'
        )
    from permille.models.loading import FileTokenizer, load_model
    from permille.quantization.rounding import rounded_int4

    corpus = open_corpus(context, options.calibration_corpus_id)
    context.progress(0.0, "reading the text to calibrate on")
    length = min(options.calibration_length, int(checkpoint.config.get("max_position_embeddings", 1 << 30)))
    sampling = Sampling(number=options.calibration_sequences, length=length, seed=_SEED)
    sequences = corpus.sequences(FileTokenizer(checkpoint.folder), sampling)
    number = len(sequences.tokens_NT)
    names = [name for name, _ in scoped_tensors(checkpoint.config)]
    context.progress(0.01, f"auto-round on {number} sequences: minutes or hours, in one piece")
    tensors = rounded_int4(load_model(checkpoint.folder), names, sequences.tokens_NT)
    return Codes(
        tensors=lambda: iter(tensors.items()),
        provenance={
            "rounding": options.scheme.value,
            "calibration": {
                "corpus": corpus.provenance,
                "sequences": number,
                "length": length,
                "seed": _SEED,
            },
            "versions": versions("auto-round", "torch", "transformers", "tokenizers"),
        },
        corpus_read=sequences.read,
        used={options.calibration_corpus_id: options.calibration_sequences * options.calibration_length},
    )


def code_books(context: TaskContext, model: SourceModel, options: SqueezeLLM, how: Quantization) -> Codes:
    """Code books for the scores of a mask of the same weights.

    Raises:
        InputError: a mask of other weights, or without scores of all linears.
        PackageError: the scores are gone or damaged.
    """
    with context.db.read() as session:
        mask = artifacts.get(
            session, tenant_id=context.claim.tenant_id, kind=JobKind.MASK, key=options.mask_id
        )
        stored = artifacts.blob_of(mask, artifacts.SCORES)
    request = parse_request(JobKind.MASK, mask.request)
    if stored is None or not isinstance(request, FisherMaskCreate):
        raise InputError(f"expected a mask with scores, got {mask.id}, which has none")
    if mask.provenance["model"] != model.provenance:
        raise InputError(
            f"expected {mask.id} to be made of {model.provenance}, got {mask.provenance['model']}"
        )
    context.blobs.check(stored.digest)
    scores = load_scores(context.blobs.path(stored.digest))
    if scores.shapes != tuple(scoped_tensors(model.checkpoint.config)):
        raise InputError(f"expected scores of all linears, got {mask.id} of {request.scope}")

    def books() -> Tensors:
        for name, scores_NK in scores.items():
            yield name, code(model.checkpoint.float32(name), how, name=name, scores_NK=scores_NK)

    made = {name: mask.provenance[name] for name in _SCORED}
    return Codes(
        tensors=books,
        provenance=cast("Mapping[str, JSON]", made | {"versions": versions()}),
        used={request.corpus_id: request.sequences * request.length},
    )

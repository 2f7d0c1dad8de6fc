"""The quantization job: a dense layer, the layer of what stays as it is, and what that costs."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy.orm import Session

from permille.corpora.sequences import POOL, Tokenizer, token_sequences
from permille.digests import JSON
from permille.errors import InputError
from permille.models.checkpoint import Checkpoint
from permille.models.families import scoped_tensors
from permille.package.build import plain_tensors
from permille.package.layers import write_dense, write_plain
from permille.quantization import QuantizedTensor, Scheme, dequantize, quantize
from permille.quantization.report import ErrorReport
from permille.sensitivity.plots import error_picture
from permille.store import results
from permille_workers.context import Publish, Result, TaskContext
from permille_workers.payloads import QuantizationPayload, parse_payload
from permille_workers.tasks.calibration import calibrated_layers
from permille_workers.tasks.layers import layer_record
from permille_workers.tasks.sources import SourceCorpus, SourceModel, open_corpus, open_model, versions

Coded = Callable[[], Iterator[tuple[str, QuantizedTensor]]]
_QUANTIZED = 0.6  # of the time, where there is text to measure on
_EVALUATION_SEED = 0
_LONGEST_EVALUATION = 512


def run(context: TaskContext) -> Publish:
    """Quantize the model of the payload.

    Raises:
        InputError: a scheme or rounding that does not exist, a model that does not
            serve, too little text to calibrate on.
        RetryableError: a hub or data set that cannot be reached.
        OperatorError: this worker was installed without auto-round, and it is asked for.
    """
    payload = parse_payload(QuantizationPayload, context.claim.payload)
    if payload.scheme not in set(Scheme):
        raise InputError(f"expected a scheme of {', '.join(Scheme)}, got {payload.scheme!r}")
    scheme = Scheme(payload.scheme)
    context.progress(0.0, "opening the model")
    model = open_model(context, payload.model_id)
    errors = ErrorReport()
    coded, calibration = _coded(context, model.checkpoint, scheme, payload)
    tensors = _measured(context, model.checkpoint, coded(), errors)
    dense = write_dense(context.blobs, tensors, scheme)
    context.progress(_QUANTIZED, "writing the plain layer")
    plain = write_plain(context.blobs, plain_tensors(model.checkpoint))
    summary = errors.summary()
    perplexity = _perplexity(context, model, payload, coded)
    provenance: dict[str, JSON] = {
        "model": model.provenance,
        "scheme": scheme.value,
        "group_size": payload.group_size,
        **calibration,
    }
    content = {**summary, "perplexity": perplexity, "provenance": provenance}
    report_digest = context.blobs.put_bytes(json.dumps(content, allow_nan=False, sort_keys=True).encode())
    picture = error_picture({row["name"]: row["relative_error"] for row in summary["tensors"]})
    picture_digest = context.blobs.put_bytes(picture)

    def publish(session: Session) -> Result:
        row = results.add_quantization(
            session,
            tenant_id=context.claim.tenant_id,
            job_id=context.claim.job_id,
            model_id=payload.model_id,
            evaluation_corpus_id=payload.evaluation_corpus_id,
            options=payload.options(),
            dense_layer=layer_record(dense),
            plain_layer=layer_record(plain),
            provenance=provenance,
            report_digest=report_digest,
            picture_digest=picture_digest,
        )
        return Result(kind="quantization", id=row.id)

    return publish


def _coded(
    context: TaskContext,
    checkpoint: Checkpoint,
    scheme: Scheme,
    payload: QuantizationPayload,
) -> tuple[Coded, dict[str, JSON]]:
    """The codes, as often as they are asked for, and their provenance. To the nearest code each time anew:
    cheaper than reading them back, and no two tensors are held at once."""
    if payload.rounding == "nearest":

        def nearest() -> Iterator[tuple[str, QuantizedTensor]]:
            for name, _ in scoped_tensors(checkpoint.config):
                yield name, quantize(checkpoint.float32(name), scheme, payload.group_size, name=name)

        return nearest, {"versions": versions()}
    layers, provenance = calibrated_layers(context, checkpoint, scheme, payload)
    return lambda: iter(layers.items()), provenance


def _measured(
    context: TaskContext,
    checkpoint: Checkpoint,
    coded: Iterator[tuple[str, QuantizedTensor]],
    errors: ErrorReport,
) -> Iterator[tuple[str, QuantizedTensor]]:
    """Tensor by tensor; `errors` measures on the way."""
    number = len(scoped_tensors(checkpoint.config))
    for index, (name, quantized) in enumerate(coded):
        context.progress(_QUANTIZED * (index + 1) / number, f"quantize {index + 1}/{number}")
        errors.add(name, checkpoint.float32(name), dequantize(quantized))
        yield name, quantized


def _perplexity(
    context: TaskContext,
    model: SourceModel,
    payload: QuantizationPayload,
    coded: Coded,
) -> dict[str, Any] | None:
    """Before and after, on text that the codes were not calibrated on where the corpus is large enough."""
    if payload.evaluation_corpus_id is None:
        return None
    from permille.models.loading import FileTokenizer, load_model
    from permille.quantization.perplexity import apply_quantized, perplexity

    corpus = open_corpus(context, payload.evaluation_corpus_id)
    context.progress(_QUANTIZED, "reading the evaluation text")
    folder = model.checkpoint.folder
    sequences, held_out = evaluation_sequences(
        context, FileTokenizer(folder), corpus, payload, _used_tokens(payload), model.checkpoint
    )
    loaded = load_model(folder)

    def part(first: float, name: str) -> Any:
        def progress(done: int, total: int) -> None:
            context.progress(first + 0.18 * done / total, f"{name} {done}/{total}")

        return progress

    before = perplexity(loaded, sequences, progress=part(0.62, "before"))
    apply_quantized(loaded, coded(), None)
    after = perplexity(loaded, sequences, progress=part(0.8, "after"))
    return {
        "tokens": before["tokens"],
        "before": before["perplexity"],
        "after": after["perplexity"],
        "loss_before": before["loss"],
        "loss_after": after["loss"],
        "held_out": held_out,
        "corpus": corpus.provenance,
    }


def evaluation_sequences(
    context: TaskContext,
    tokenizer: Tokenizer,
    corpus: SourceCorpus,
    payload: QuantizationPayload,
    used_tokens: int,
    checkpoint: Checkpoint,
) -> tuple[NDArray[np.int64], bool]:
    """[N, T] tokens to measure on, and whether they lie after the `used_tokens` that calibrated the codes.

    Of a small corpus as much is taken as there is, at last without passing over the used part (and said so).
    """
    longest = int(checkpoint.config.get("max_position_embeddings", _LONGEST_EVALUATION))
    length = min(_LONGEST_EVALUATION, longest)
    wanted = max(1, payload.evaluation_tokens // length)
    for skip in dict.fromkeys((-(-used_tokens // length), 0)):
        number = wanted
        while number >= 1:
            try:
                texts = corpus.texts(context)
                found = token_sequences(tokenizer, texts, number, length, _EVALUATION_SEED, skip=skip)
            except InputError:
                number //= 2
                continue
            return found, skip * length >= used_tokens
    raise InputError(f"expected an evaluation corpus of at least {length} tokens, got less")


def _used_tokens(payload: QuantizationPayload) -> int:
    """Of the evaluation corpus, what the calibration of codes could have drawn."""
    if payload.calibration_corpus_id != payload.evaluation_corpus_id:
        return 0
    return POOL * payload.calibration_sequences * payload.calibration_length

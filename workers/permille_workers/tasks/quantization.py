"""The quantization job: it writes the codes of the linear weights, all other tensors, and a report."""

from contextlib import suppress

from permille.errors import RetryableError
from permille.package.manifest import Quantization
from permille.pipeline.draw import evaluation_text
from permille.pipeline.inputs import SourceModel
from permille.pipeline.quantize import (
    Codes,
    Evaluation,
    calibrated_codes,
    nearest_codes,
    quantize,
    source_codes,
)
from permille.schemas.quantizations import AutoRound, QuantizationCreate, Source
from permille_workers.runtime.context import Publish, TaskContext
from permille_workers.tasks.artifacts import publishes_made, quantization_of
from permille_workers.tasks.sources import check_text_of_build, open_corpus, open_model


def run(context: TaskContext, request: QuantizationCreate) -> Publish:
    """Quantize a model.

    Raises:
        InputError: the model is unusable, the corpus is damaged, or the text is too short to calibrate on.
        RetryableError: the hub or the data set cannot be reached.
        OperatorError: the request asks for auto-round, and this worker lacks it.
    """
    context.progress(0.0, "opening the model")
    model = open_model(context, request.model_id)
    with suppress(RetryableError):  # only the check needs the corpus of the mask
        check_text_of_build(context, model)
    how, embeddings = quantization_of(request.options), request.options.embeddings
    evaluation = _evaluation(context, model, request)
    codes = _codes(context, model, request, how)
    made = quantize(
        context.blobs, model, how, embeddings, codes, evaluation=evaluation, progress=context.progress
    )
    return publishes_made(context, request.model_id, made)


def _codes(context: TaskContext, model: SourceModel, request: QuantizationCreate, how: Quantization) -> Codes:
    options = request.options
    if isinstance(options, AutoRound):
        corpus = open_corpus(context, options.calibration_corpus_id)
        number, length = options.calibration_sequences, options.calibration_length
        return calibrated_codes(model, corpus, number, length, context.progress)
    return source_codes(model, how) if isinstance(options, Source) else nearest_codes(model, how)


def _evaluation(context: TaskContext, model: SourceModel, request: QuantizationCreate) -> Evaluation | None:
    """Return the measurement of the perplexity, if possible on text that calibration does not use."""
    corpus_id, options, used = request.evaluation_corpus_id, request.options, 0
    if corpus_id is None:
        return None
    if isinstance(options, AutoRound) and options.calibration_corpus_id == corpus_id:
        used = options.calibration_sequences * options.calibration_length
    context.progress(0.0, "reading the evaluation text")
    text, held_out = evaluation_text(
        model.checkpoint, open_corpus(context, corpus_id), options.evaluation_tokens, used
    )
    return Evaluation(text=text, held_out=held_out, compute=context.compute)

"""The quantization job: it writes the codes of the linear weights, all other tensors, and a report.

The report has the errors of the codes. Most schemes need only the weights. auto-round also needs a corpus,
on which it calibrates all layers in one run (ADR 13).
"""

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from permille.corpora.sequences import POOL
from permille.digests import JSON
from permille.errors import InputError, OperatorError
from permille.models.checkpoint import Checkpoint
from permille.models.families import scoped_tensors
from permille.models.settings import within_positions
from permille.package.build import code, plain_tensors
from permille.package.layers import write_dense, write_plain
from permille.package.manifest import Quantization
from permille.quantization import dequantize
from permille.quantization.report import ErrorReport
from permille.quantization.types import QuantizedTensor
from permille.schemas.quantizations import (
    AnyOptions,
    AutoRound,
    QuantizationCreate,
    Source,
)
from permille.store.artifacts import TaskResult
from permille_workers.runtime.context import Publish, TaskContext
from permille_workers.tasks.layers import blob_of_layer, publishes, quantization_of, report_blob
from permille_workers.tasks.sources import (
    Sampling,
    SourceModel,
    evaluation_sequences,
    open_corpus,
    open_model,
    versions,
)

if TYPE_CHECKING:
    from permille.models.gguf.codes import KeptModel


_QUANTIZED = 0.6  # the job's progress when all weights are quantized
_EVALUATION_SEED = 0
_LONGEST_EVALUATION = 512  # tokens in a sequence of the evaluation

Tensors = Iterator[tuple[str, QuantizedTensor]]
_CALIBRATION_SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Codes:
    """The codes of a dense layer (all linear weights), and where they come from.

    Attributes:
        tensors: a function. Each call returns an iterator over all tensors.
        corpus_read: how many rows of the corpus the calibration has read, and how many of them were bad.
        used: for each corpus id, how many tokens the calibration has used.
    """

    tensors: Callable[[], Tensors]
    provenance: Mapping[str, JSON]
    corpus_read: dict[str, object] | None = None
    used: Mapping[str, int] = field(default_factory=dict)


def run(context: TaskContext, request: QuantizationCreate) -> Publish:
    """Quantize a model.

    Raises:
        InputError: the model is unusable, the corpus is damaged, or the text is too short to calibrate on.
        RetryableError: the hub or the data set cannot be reached.
        OperatorError: the request asks for auto-round, and this worker lacks it.
    """
    options = request.options
    context.progress(0.0, "opening the model")
    model = open_model(context, request.model_id)
    how = quantization_of(options)
    coded = _coded(context, model, options, how)
    errors = ErrorReport()
    dense = write_dense(context.blobs, _measured(context, model.checkpoint, coded.tensors(), errors), how)
    context.progress(_QUANTIZED, "writing the plain layer")
    plain = write_plain(context.blobs, plain_tensors(_kept(model) or model.checkpoint, options.embeddings))
    summary = errors.summary()
    provenance: dict[str, JSON] = {
        "model": model.provenance,
        "scheme": how.name.value,
        "group_size": how.group_size,
        "embeddings": options.embeddings.value,
        **coded.provenance,
    }
    content = {
        **summary,
        "perplexity": _perplexity(context, model, request, coded),
        "calibration_corpus": coded.corpus_read,
        "provenance": provenance,
    }
    return publishes(
        context,
        TaskResult(
            model_id=model.id,
            digest=dense.digest,
            provenance=provenance,
            blobs=(
                blob_of_layer(dense),
                blob_of_layer(plain),
                report_blob(context.blobs, content),
            ),
        ),
    )


def _coded(context: TaskContext, model: SourceModel, options: AnyOptions, how: Quantization) -> Codes:
    """Return the codes for these options.

    For nf4, int4 and int8, each pass over the codes rounds the weights again. This is cheaper than to read
    stored codes, and only one tensor is in memory at a time.
    """
    checkpoint = model.checkpoint
    if isinstance(options, AutoRound):
        return calibrated_codes(context, checkpoint, options)
    if isinstance(options, Source):
        return _source_codes(model)

    def nearest() -> Tensors:
        for name, _ in scoped_tensors(checkpoint.config):
            yield name, code(checkpoint.float32(name), how, name=name)

    return Codes(tensors=nearest, provenance={"versions": versions()})


def _source_codes(model: SourceModel) -> Codes:
    """Return the codes of the model's GGUF file.

    Raises:
        InputError: the model was not added from a GGUF file, or the file has types that cannot be kept.
    """
    kept = _kept(model)
    if kept is None:
        raise InputError(
            "The scheme `source` keeps the codes of a GGUF file, and this model has none. Add the model with "
            "--gguf, or choose another scheme."
        )
    kept.check_codes()
    names = [name for name, _ in scoped_tensors(kept.config)]
    return Codes(
        tensors=lambda: ((name, kept.codes(name)) for name in names), provenance={"versions": versions()}
    )


def _kept(model: SourceModel) -> "KeptModel | None":
    """Return the model together with its GGUF file, or None if it was not added from a GGUF file."""
    if model.gguf is None:
        return None
    from permille.models.gguf.codes import KeptModel

    return KeptModel(model.checkpoint, model.gguf)


def _measured(context: TaskContext, checkpoint: Checkpoint, coded: Tensors, errors: ErrorReport) -> Tensors:
    """Yield the tensors unchanged. Add the error of each tensor to `errors`."""
    number = len(scoped_tensors(checkpoint.config))
    for index, (name, quantized) in enumerate(coded):
        context.progress(_QUANTIZED * (index + 1) / number, f"quantize {index + 1}/{number}")
        errors.add(name, checkpoint.float32(name), dequantize(quantized))
        yield name, quantized


def _perplexity(
    context: TaskContext, model: SourceModel, request: QuantizationCreate, coded: Codes
) -> dict[str, object] | None:
    """Measure the perplexity before and after quantization.

    If possible, use text that calibration has not used.
    """
    if request.evaluation_corpus_id is None:
        return None
    from permille.models.loading import FileTokenizer
    from permille.quantization.perplexity import apply_quantized, perplexity, perplexity_by_layer
    from permille.sensitivity.streamed import StreamedModel
    from permille_workers.tasks.compute import open_torch_model

    corpus = open_corpus(context, request.evaluation_corpus_id)
    context.progress(_QUANTIZED, "reading the evaluation text")
    folder = model.checkpoint.folder
    length = within_positions(model.checkpoint.config, _LONGEST_EVALUATION)
    # To choose n sequences, calibration reads up to POOL * n sequences of the corpus. Skip all tokens that it
    # may have read. `used` is their number in sequences of this length, rounded up.
    used = -(-POOL * coded.used.get(request.evaluation_corpus_id, 0) // length)
    wanted = Sampling(
        number=max(1, request.options.evaluation_tokens // length),
        length=length,
        seed=_EVALUATION_SEED,
        skip=used,
    )
    sequences, held_out = evaluation_sequences(FileTokenizer(folder), corpus, wanted)
    loaded = open_torch_model(context, model.checkpoint, length)

    tokens_NT = sequences.tokens_NT
    first, second = context.part(0.62, 0.8, "before"), context.part(0.8, 0.98, "after")
    if isinstance(loaded, StreamedModel):
        before = perplexity_by_layer(loaded.stream, tokens_NT, progress=first)
        after = perplexity_by_layer(loaded.stream, tokens_NT, quantized=coded.tensors(), progress=second)
    else:
        before = perplexity(loaded, tokens_NT, progress=first)
        apply_quantized(loaded, coded.tensors())
        after = perplexity(loaded, tokens_NT, progress=second)
    return {
        "tokens": before["tokens"],
        "before": before["perplexity"],
        "after": after["perplexity"],
        "loss_before": before["loss"],
        "loss_after": after["loss"],
        "held_out": held_out,
        "corpus": corpus.provenance,
        "read": sequences.read,
    }


def calibrated_codes(context: TaskContext, checkpoint: Checkpoint, options: AutoRound) -> Codes:
    """Calibrate all dense tensors with auto-round.

    This is a single long call, which does not notice a cancellation. If the job is cancelled, the supervisor
    kills the process.

    Raises:
        InputError: auto-round does not support the model, or the text is too short.
        RetryableError: the data set cannot be reached.
        OperatorError: auto-round is not installed.
    """
    if importlib.util.find_spec("auto_round") is None:
        raise OperatorError(
            'auto-round is not installed on this worker. Run: pip install "permille[workers]"'
        )
    from permille.models.loading import FileTokenizer, load_model
    from permille.quantization.rounding import rounded_int4

    corpus = open_corpus(context, options.calibration_corpus_id)
    context.progress(0.0, "reading the calibration text")
    length = min(options.calibration_length, int(checkpoint.config.get("max_position_embeddings", 1 << 30)))
    sampling = Sampling(number=options.calibration_sequences, length=length, seed=_CALIBRATION_SEED)
    sequences = corpus.sequences(FileTokenizer(checkpoint.folder), sampling)
    number = len(sequences.tokens_NT)
    names = [name for name, _ in scoped_tensors(checkpoint.config)]
    context.progress(0.01, f"auto-round on {number} sequences: takes minutes or hours, without progress")
    tensors = rounded_int4(load_model(checkpoint.folder), names, sequences.tokens_NT)
    return Codes(
        tensors=lambda: iter(tensors.items()),
        provenance={
            "rounding": options.scheme.value,
            "calibration": {
                "corpus": corpus.provenance,
                "sequences": number,
                "length": length,
                "seed": _CALIBRATION_SEED,
            },
            "versions": versions("auto-round", "torch", "transformers", "tokenizers"),
        },
        corpus_read=sequences.read,
        used={options.calibration_corpus_id: options.calibration_sequences * options.calibration_length},
    )

"""The quantization job: a dense layer, the layer of what stays as it is, and what that costs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from permille.corpora.sequences import POOL
from permille.digests import JSON
from permille.models.checkpoint import Checkpoint
from permille.models.families import scoped_tensors
from permille.package.build import code, plain_tensors
from permille.package.layers import write_dense, write_plain
from permille.package.manifest import Quantization
from permille.quantization import dequantize
from permille.quantization.report import ErrorReport
from permille.quantization.sparse import find_sparsity
from permille.quantization.types import Coded, Scheme, Sparsity
from permille.schemas.quantizations import AnyOptions, AutoRound, QuantizationCreate
from permille.sensitivity.plots import error_picture
from permille.store.artifacts import Made
from permille_workers.runtime.context import Publish, TaskContext
from permille_workers.tasks.calibration import calibrated_layers
from permille_workers.tasks.layers import blob_of_layer, evidence, publishes, quantization_of
from permille_workers.tasks.sources import (
    Sampling,
    SourceModel,
    evaluation_sequences,
    open_corpus,
    open_model,
    versions,
)

Tensors = Iterator[tuple[str, Coded]]
_QUANTIZED = 0.6  # of the time, where there is text to measure on
_EVALUATION_SEED = 0
_LONGEST_EVALUATION = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class _Coded:
    """The codes, as often as they are asked for, their provenance, and what calibrating them has read."""

    tensors: Callable[[], Tensors]
    provenance: dict[str, JSON]
    corpus_read: dict[str, object] | None = None


def run(context: TaskContext, request: QuantizationCreate) -> Publish:
    """Quantize a model.

    Raises:
        InputError: a model that does not serve, too little text to calibrate on, a corpus that is broken.
        RetryableError: a hub or data set that cannot be reached.
        OperatorError: this worker was installed without auto-round, and it is asked for.
    """
    options = request.options
    context.progress(0.0, "opening the model")
    model = open_model(context, request.model_id)
    sparsity = _sparsity(model.checkpoint, options)
    how = quantization_of(options, sparsity)
    coded = _coded(context, model.checkpoint, options, how)
    errors = ErrorReport()
    dense = write_dense(context.blobs, _measured(context, model.checkpoint, coded.tensors(), errors), how)
    context.progress(_QUANTIZED, "writing the plain layer")
    plain = write_plain(context.blobs, plain_tensors(model.checkpoint))
    summary = errors.summary()
    provenance: dict[str, JSON] = {
        "model": model.provenance,
        "scheme": how.name.value,
        "group_size": how.group_size,
        "sparsity": sparsity,
        **coded.provenance,
    }
    content = {
        **summary,
        "perplexity": _perplexity(context, model, request, coded),
        "calibration_corpus": coded.corpus_read,
        "provenance": provenance,
    }
    picture = error_picture({row["name"]: row["relative_error"] for row in summary["tensors"]})
    return publishes(
        context,
        Made(
            model_id=model.id,
            digest=dense.digest,
            provenance=provenance,
            blobs=(
                blob_of_layer(dense),
                blob_of_layer(plain),
                *evidence(context.blobs, content, picture),
            ),
        ),
    )


def _sparsity(checkpoint: Checkpoint, options: AnyOptions) -> str | None:
    """The sparsity that was asked for, or what fits the model; calibrated codes are of all weights."""
    if isinstance(options, AutoRound) or options.sparsity == "none":
        return None
    if options.sparsity is not None:
        return Sparsity(options.sparsity).value
    names = [name for name, _ in scoped_tensors(checkpoint.config)]
    found = find_sparsity(checkpoint.float32(name) for name in names)
    return None if found is None else found.value


def _coded(context: TaskContext, checkpoint: Checkpoint, options: AnyOptions, how: Quantization) -> _Coded:
    """To the nearest code each time anew: cheaper than reading codes back, and no two tensors are held at
    once."""
    if isinstance(options, AutoRound):
        calibrated = calibrated_layers(context, checkpoint, options)
        return _Coded(
            tensors=lambda: iter(calibrated.tensors.items()),
            provenance=calibrated.provenance,
            corpus_read=calibrated.corpus_read,
        )

    def nearest() -> Tensors:
        for name, _ in scoped_tensors(checkpoint.config):
            yield name, code(checkpoint.float32(name), how, name=name)

    def on_device() -> Tensors:
        from permille.quantization.on_device import quantize_nf4

        for name, _ in scoped_tensors(checkpoint.config):
            yield name, quantize_nf4(checkpoint.float32(name), device, name=name)

    device = context.settings.device
    if device != "cpu" and how.name is Scheme.NF4 and how.sparsity is None:
        return _Coded(tensors=on_device, provenance={"versions": versions("bitsandbytes")})
    return _Coded(tensors=nearest, provenance={"versions": versions()})


def _measured(context: TaskContext, checkpoint: Checkpoint, coded: Tensors, errors: ErrorReport) -> Tensors:
    """Tensor by tensor; `errors` measures on the way."""
    number = len(scoped_tensors(checkpoint.config))
    for index, (name, quantized) in enumerate(coded):
        context.progress(_QUANTIZED * (index + 1) / number, f"quantize {index + 1}/{number}")
        errors.add(name, checkpoint.float32(name), dequantize(quantized))
        yield name, quantized


def _perplexity(
    context: TaskContext, model: SourceModel, request: QuantizationCreate, coded: _Coded
) -> dict[str, object] | None:
    """Before and after, on text that the codes were not calibrated on where the corpus is large enough."""
    if request.evaluation_corpus_id is None:
        return None
    from permille.models.loading import FileTokenizer
    from permille.quantization.perplexity import apply_quantized, perplexity, perplexity_by_layer
    from permille.sensitivity.streamed import StreamedModel
    from permille_workers.tasks.compute import open_torch_model

    corpus = open_corpus(context, request.evaluation_corpus_id)
    context.progress(_QUANTIZED, "reading the evaluation text")
    folder = model.checkpoint.folder
    length = min(_LONGEST_EVALUATION, int(model.checkpoint.config.get("max_position_embeddings", 1 << 30)))
    used = -(-_used_tokens(request) // length)
    wanted = Sampling(
        number=max(1, request.options.evaluation_tokens // length),
        length=length,
        seed=_EVALUATION_SEED,
        skip=used,
    )
    sequences, held_out = evaluation_sequences(FileTokenizer(folder), corpus, wanted)
    loaded = open_torch_model(context, model.checkpoint, length)

    def part(first: float, name: str) -> Callable[[int, int], None]:
        def progress(done: int, total: int) -> None:
            context.progress(first + 0.18 * done / total, f"{name} {done}/{total}")

        return progress

    tokens_NT, first, second = sequences.tokens_NT, part(0.62, "before"), part(0.8, "after")
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


def _used_tokens(request: QuantizationCreate) -> int:
    """Of the evaluation corpus, what the calibration of codes could have drawn."""
    options = request.options
    if not isinstance(options, AutoRound) or options.calibration_corpus_id != request.evaluation_corpus_id:
        return 0
    return POOL * options.calibration_sequences * options.calibration_length

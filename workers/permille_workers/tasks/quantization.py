"""The quantization job: a dense layer, the layer of what stays as it is, and what that costs."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from permille.corpora.sequences import POOL
from permille.digests import JSON
from permille.errors import InputError
from permille.models.checkpoint import Checkpoint
from permille.models.families import scoped_tensors
from permille.package.build import code, plain_tensors
from permille.package.layers import write_dense, write_plain
from permille.package.manifest import Layer, Quantization
from permille.package.reader import read_codes
from permille.package.safetensors_io import SafetensorsFile
from permille.quantization import dequantize, nf4
from permille.quantization.report import ErrorReport
from permille.quantization.source import check_finite, check_weight
from permille.quantization.sparse import find_sparsity
from permille.quantization.types import QuantizedTensor, Scheme, Sparsity
from permille.schemas.quantizations import (
    AnyOptions,
    AutoRound,
    CodeBooks,
    Int8,
    QuantizationCreate,
    Source,
    SqueezeLLM,
)
from permille.sensitivity.plots import error_picture
from permille.store.artifacts import Made
from permille_workers.runtime.context import Publish, TaskContext
from permille_workers.tasks.calibration import Codes, Tensors, calibrated_codes, code_books
from permille_workers.tasks.layers import blob_of_layer, evidence, publishes, quantization_of
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

_QUANTIZED = 0.6  # of the time, where there is text to measure on
_EVALUATION_SEED = 0
_LONGEST_EVALUATION = 512


def run(context: TaskContext, request: QuantizationCreate) -> Publish:
    """Quantize a model.

    Raises:
        InputError: a model or mask that does not serve, too little text to calibrate on, a corpus that is
            broken.
        RetryableError: a hub or data set that cannot be reached.
        OperatorError: this worker was installed without auto-round, and it is asked for.
    """
    options = request.options
    context.progress(0.0, "opening the model")
    model = open_model(context, request.model_id)
    sparsity = _sparsity(model.checkpoint, options)
    how = quantization_of(options, sparsity)
    coded = _coded(context, model, options, how)
    errors = ErrorReport()
    dense = write_dense(context.blobs, _measured(context, model.checkpoint, coded.tensors(), errors), how)
    if how.name is Scheme.SQUEEZELLM:
        coded = replace(coded, tensors=lambda: _stored(context, model.checkpoint, dense, how))
    context.progress(_QUANTIZED, "writing the plain layer")
    plain = write_plain(context.blobs, plain_tensors(_kept(model) or model.checkpoint, options.embeddings))
    summary = errors.summary()
    provenance: dict[str, JSON] = {
        "model": model.provenance,
        "scheme": how.name.value,
        "group_size": how.group_size,
        "sparsity": sparsity,
        "embeddings": options.embeddings.value,
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
    """The sparsity that was asked for, or what fits the model; of calibrated codes and int8 none."""
    if isinstance(options, AutoRound | Int8 | Source):
        return None
    if not isinstance(options, CodeBooks) and options.sparsity is not None:
        return None if options.sparsity == "none" else Sparsity(options.sparsity).value
    names = [name for name, _ in scoped_tensors(checkpoint.config)]
    found = find_sparsity(checkpoint.float32(name) for name in names)
    if found is not None and isinstance(options, CodeBooks):
        raise InputError(
            f"expected a model that is not sparse for squeezellm, got {found}: nf4 and int4 keep its zeros"
        )
    return None if found is None else found.value


def _coded(context: TaskContext, model: SourceModel, options: AnyOptions, how: Quantization) -> Codes:
    """To the nearest code each time anew: cheaper than reading codes back, and no two tensors are held at
    once. Code books take longer: they are read back."""
    checkpoint = model.checkpoint
    if isinstance(options, SqueezeLLM):
        return code_books(context, model, options, how)
    if isinstance(options, AutoRound):
        return calibrated_codes(context, checkpoint, options)
    if isinstance(options, Source):
        return _source_codes(model)

    def nearest() -> Tensors:
        for name, _ in scoped_tensors(checkpoint.config):
            yield name, code(checkpoint.float32(name), how, name=name)

    def on_device() -> Tensors:
        for name, _ in scoped_tensors(checkpoint.config):
            yield name, quantize_nf4(checkpoint.float32(name), device, name=name)

    device = context.settings.device
    if device != "cpu" and how.name is Scheme.NF4 and how.sparsity is None:
        return Codes(tensors=on_device, provenance={"versions": versions("bitsandbytes")})
    return Codes(tensors=nearest, provenance={"versions": versions()})


def _source_codes(model: SourceModel) -> Codes:
    """The codes of the model's file. Raises InputError: there is none, or it has others."""
    kept = _kept(model)
    if kept is None:
        raise InputError(
            "Scheme source keeps the codes of a GGUF file, and this model has none. Add the model with "
            "--gguf, or choose another scheme."
        )
    kept.check_codes()
    names = [name for name, _ in scoped_tensors(kept.config)]
    return Codes(
        tensors=lambda: ((name, kept.codes(name)) for name in names), provenance={"versions": versions()}
    )


def _kept(model: SourceModel) -> "KeptModel | None":
    """The model beside its GGUF file; None: it was made of none."""
    if model.gguf is None:
        return None
    from permille.models.gguf.codes import KeptModel

    return KeptModel(model.checkpoint, model.gguf)


def quantize_nf4(w_NK: NDArray[np.float32], device: str, *, name: str = "weight") -> QuantizedTensor:
    """The same as `nf4.quantize`, by bitsandbytes, whose tensors are ours (ADR 13).

    It never ran on a GPU: tests run its CPU code. A weight that is no whole number of blocks is coded here:
    bitsandbytes treats the last one otherwise.

    Raises:
        InputError: NaN or infinity, or no float32 matrix.
    """
    if w_NK.size % nf4.BLOCK_SIZE:
        return nf4.quantize(w_NK, name=name)
    import torch
    from bitsandbytes.functional import quantize_4bit

    check_weight(w_NK, name)
    check_finite(w_NK, 0, name)
    w = torch.from_numpy(w_NK).to(device)
    packed, state = quantize_4bit(w, blocksize=nf4.BLOCK_SIZE, compress_statistics=False, quant_type="nf4")
    rows, columns = w_NK.shape
    return QuantizedTensor(
        scheme=Scheme.NF4,
        shape=(rows, columns),
        group_size=nf4.BLOCK_SIZE,
        packed=packed.cpu().numpy().reshape(-1),
        scales=state.absmax.cpu().numpy(),
    )


def _stored(context: TaskContext, checkpoint: Checkpoint, dense: Layer, how: Quantization) -> Tensors:
    """The codes as they were written."""
    file = SafetensorsFile(context.blobs.path(dense.digest), dtypes=("U8", "F16"))
    for name, shape in scoped_tensors(checkpoint.config):
        yield name, read_codes(file, name, shape, how)


def _measured(context: TaskContext, checkpoint: Checkpoint, coded: Tensors, errors: ErrorReport) -> Tensors:
    """Tensor by tensor; `errors` measures on the way."""
    number = len(scoped_tensors(checkpoint.config))
    for index, (name, quantized) in enumerate(coded):
        context.progress(_QUANTIZED * (index + 1) / number, f"quantize {index + 1}/{number}")
        errors.add(name, checkpoint.float32(name), dequantize(quantized))
        yield name, quantized


def _perplexity(
    context: TaskContext, model: SourceModel, request: QuantizationCreate, coded: Codes
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
    used = -(-POOL * coded.used.get(request.evaluation_corpus_id, 0) // length)
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

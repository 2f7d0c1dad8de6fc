"""The fourth step: quantize the weights of a model, and report on the errors of the codes.

    how = Quantization(name=Scheme.NF4, group_size=64)
    made = quantize(blobs, model, how, Embeddings.Q8_0, nearest_codes(model, how))

Most schemes need only the weights. auto-round also needs text, on which it calibrates all layers in one run
(ADR 13).
"""

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from permille.choices import Embeddings
from permille.digests import JSON
from permille.errors import InputError, OperatorError
from permille.extras import install_line
from permille.models.families import scoped_tensors
from permille.models.settings import within_positions
from permille.package.blobs import BlobFolder
from permille.package.build import Coded, coded_tensors, write_weights
from permille.package.manifest import Quantization
from permille.pipeline.draw import Corpus, Drawn, Sampling
from permille.pipeline.inputs import Made, Progress, SourceModel, part, silent, versions
from permille.quantization import dequantize
from permille.quantization.report import ErrorReport

if TYPE_CHECKING:
    from permille.pipeline.score import Compute

_QUANTIZED = 0.6  # the progress when all weights are quantized
_SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Codes:
    """The codes of a dense layer (all linear weights), and where they come from.

    Attributes:
        tensors: a function. Each call returns an iterator over all tensors.
        read: how many rows of the corpus the calibration has read, and how many of them were bad.
    """

    tensors: Callable[[], Coded]
    provenance: dict[str, JSON]
    read: Mapping[str, object] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Measurement of the perplexity before and after quantization.

    Attributes:
        text: the sequences to measure on.
        held_out: whether the calibration does not use them.
    """

    text: Drawn
    held_out: bool
    compute: "Compute"


def nearest_codes(model: SourceModel, how: Quantization) -> Codes:
    """Return the nearest codes of nf4, int4 or int8.

    Each pass over the codes rounds the weights again. This is cheaper than reading stored codes, and
    only one tensor is in memory at a time.
    """
    return Codes(tensors=lambda: coded_tensors(model.checkpoint, how), provenance={"versions": versions()})


def source_codes(model: SourceModel, how: Quantization) -> Codes:
    """Return the codes of the model's GGUF file.

    Raises:
        InputError: the model was not added from a GGUF file, or the file has types that cannot be kept.
    """
    kept = model.kept
    if kept is None:
        raise InputError(
            "The scheme `source` keeps the codes of a GGUF file, and this model has none. Add the model with "
            "--gguf, or choose another scheme."
        )
    kept.check_codes()
    return Codes(tensors=lambda: coded_tensors(kept, how, kept.codes), provenance={"versions": versions()})


def calibrated_codes(
    model: SourceModel, corpus: Corpus, number: int, length: int, progress: Progress = silent
) -> Codes:
    """Calibrate all dense tensors with auto-round, on a number of sequences.

    This is a single long call, which does not notice a cancellation. If the job is cancelled, the supervisor
    kills the process.

    Raises:
        InputError: auto-round does not support the model, or the text is too short.
        RetryableError: the data set cannot be reached.
        OperatorError: auto-round is not installed.
    """
    if importlib.util.find_spec("auto_round") is None:
        raise OperatorError(f"auto-round is not installed on this worker. Run {install_line('workers')}.")
    import torch

    from permille.models.layerwise import whole_model
    from permille.models.loading import FileTokenizer
    from permille.quantization.rounding import rounded_int4

    checkpoint = model.checkpoint
    progress(0.0, "reading the calibration text")
    length = within_positions(checkpoint.config, length)
    sampling = Sampling(number=number, length=length, seed=_SEED)
    drawn = corpus.draw(FileTokenizer(checkpoint.folder), sampling)
    names = [name for name, _ in scoped_tensors(checkpoint.config)]
    progress(0.01, f"auto-round on {number} sequences: takes minutes or hours, without progress")
    tensors = rounded_int4(whole_model(checkpoint, torch.float32, "cpu"), names, drawn.tokens_NT)
    return Codes(
        tensors=lambda: iter(tensors.items()),
        provenance={
            "rounding": "auto-round",
            "calibration": {
                "corpus": corpus.provenance,
                "sequences": number,
                "length": length,
                "seed": _SEED,
            },
            "versions": versions("auto-round", "torch", "transformers", "tokenizers"),
        },
        read=drawn.read,
    )


def quantize(
    blobs: BlobFolder,
    model: SourceModel,
    how: Quantization,
    embeddings: Embeddings,
    codes: Codes,
    *,
    evaluation: Evaluation | None = None,
    progress: Progress = silent,
) -> Made:
    """Write the codes and all other tensors as layers, the dense one and the plain one.

    Raises:
        InputError: a weight cannot be quantized.
    """
    errors = ErrorReport()
    coded = _measured(model, codes.tensors(), errors, progress)
    layers = write_weights(blobs, model.kept or model.checkpoint, coded, how, embeddings)
    provenance: dict[str, JSON] = {
        "model": model.provenance,
        "scheme": how.name.value,
        "group_size": how.group_size,
        "embeddings": embeddings.value,
        **codes.provenance,
    }
    content = {
        **errors.summary(),
        "perplexity": evaluation and _perplexity(model, codes, evaluation, progress),
        "calibration_corpus": codes.read,
        "provenance": provenance,
    }
    return Made(layers=layers, provenance=provenance, report=content)


def _measured(model: SourceModel, coded: Coded, errors: ErrorReport, progress: Progress) -> Coded:
    """Yield the tensors unchanged. Add the error of each tensor to `errors`."""
    number = len(scoped_tensors(model.checkpoint.config))
    for index, (name, quantized) in enumerate(coded):
        progress(_QUANTIZED * (index + 1) / number, f"quantize {index + 1}/{number}")
        errors.add(name, model.checkpoint.float32(name), dequantize(quantized))
        yield name, quantized
    progress(_QUANTIZED, "writing the plain layer")


def _perplexity(
    model: SourceModel, codes: Codes, evaluation: Evaluation, progress: Progress
) -> dict[str, object]:
    """Measure the perplexity before and after quantization."""
    from permille.quantization.perplexity import apply_quantized, perplexity, perplexity_by_layer
    from permille.sensitivity.streamed import StreamedModel

    tokens_NT = evaluation.text.tokens_NT
    loaded = evaluation.compute.open(model.checkpoint, tokens_NT.shape[1])
    first, second = part(progress, 0.62, 0.8, "before"), part(progress, 0.8, 0.98, "after")
    if isinstance(loaded, StreamedModel):
        before = perplexity_by_layer(loaded.stream, tokens_NT, progress=first)
        after = perplexity_by_layer(loaded.stream, tokens_NT, quantized=codes.tensors(), progress=second)
    else:
        before = perplexity(loaded, tokens_NT, progress=first)
        apply_quantized(loaded, codes.tensors())
        after = perplexity(loaded, tokens_NT, progress=second)
    return {
        "tokens": before["tokens"],
        "before": before["perplexity"],
        "after": after["perplexity"],
        "loss_before": before["loss"],
        "loss_after": after["loss"],
        "held_out": evaluation.held_out,
        "corpus": evaluation.text.provenance,
        "read": evaluation.text.read,
    }

"""Codes that a corpus calibrates: int4 rounded by auto-round, all layers in one go (ADR 149)."""

import importlib.util

from permille.corpora.sequences import token_sequences
from permille.digests import JSON
from permille.errors import InputError, OperatorError
from permille.models.checkpoint import Checkpoint
from permille.models.families import scoped_tensors
from permille.quantization import QuantizedTensor, Scheme
from permille_workers.context import TaskContext
from permille_workers.payloads import QuantizationPayload
from permille_workers.tasks.sources import open_corpus, versions

_SEED = 0
_AUTO_ROUND = "auto-round"


def calibrated_layers(
    context: TaskContext, checkpoint: Checkpoint, scheme: Scheme, payload: QuantizationPayload
) -> tuple[dict[str, QuantizedTensor], dict[str, JSON]]:
    """The dense layer's tensors, and the provenance of their codes. A cancel acts before and after.

    Raises:
        InputError: another rounding than auto-round, or what it cannot do; too little text.
        RetryableError: a data set that cannot be reached.
        OperatorError: auto-round is not installed.
    """
    _check(scheme, payload)
    from permille.models.loading import FileTokenizer, load_model
    from permille.quantization.rounding import GROUP_SIZE, rounded_int4

    if payload.group_size != GROUP_SIZE or payload.calibration_corpus_id is None:
        raise InputError(
            f"expected groups of {GROUP_SIZE} and a corpus for auto-round, got {payload.group_size} and "
            f"{payload.calibration_corpus_id}"
        )
    corpus = open_corpus(context, payload.calibration_corpus_id)
    context.progress(0.0, "reading the text to calibrate on")
    length = min(payload.calibration_length, int(checkpoint.config.get("max_position_embeddings", 1 << 30)))
    sequences_QT = token_sequences(
        FileTokenizer(checkpoint.folder), corpus.texts(context), payload.calibration_sequences, length, _SEED
    )
    names = [name for name, _ in scoped_tensors(checkpoint.config)]
    context.progress(0.01, f"auto-round on {len(sequences_QT)} sequences: minutes or hours, in one piece")
    layers = rounded_int4(load_model(checkpoint.folder), names, sequences_QT)
    provenance: dict[str, JSON] = {
        "rounding": _AUTO_ROUND,
        "calibration": {
            "corpus": corpus.provenance,
            "sequences": len(sequences_QT),
            "length": length,
            "seed": _SEED,
        },
        "versions": versions("auto-round", "torch", "transformers", "tokenizers"),
    }
    return layers, provenance


def _check(scheme: Scheme, payload: QuantizationPayload) -> None:
    if payload.rounding != _AUTO_ROUND:
        raise InputError(f"expected rounding nearest or {_AUTO_ROUND}, got {payload.rounding!r}")
    if scheme is not Scheme.INT4:
        raise InputError(f"expected int4 for {_AUTO_ROUND}, got {scheme}")
    if importlib.util.find_spec("auto_round") is None:
        raise OperatorError(
            'expected auto-round, which is not installed: pip install "permille[workers,evaluate]"'
        )

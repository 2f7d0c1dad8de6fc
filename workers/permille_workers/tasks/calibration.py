"""Codes that a corpus calibrates: int4 rounded by auto-round, all layers in one go (ADR 14)."""

import importlib.util
from dataclasses import dataclass

from permille.digests import JSON
from permille.errors import OperatorError
from permille.models.checkpoint import Checkpoint
from permille.models.families import scoped_tensors
from permille.quantization.types import QuantizedTensor
from permille.schemas.quantizations import AutoRound
from permille_workers.runtime.context import TaskContext
from permille_workers.tasks.sources import Sampling, open_corpus, versions

_SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """The dense layer's tensors, their provenance, and what reading the corpus met."""

    tensors: dict[str, QuantizedTensor]
    provenance: dict[str, JSON]
    corpus_read: dict[str, object]


def calibrated_layers(context: TaskContext, checkpoint: Checkpoint, options: AutoRound) -> Calibrated:
    """Calibrate all dense tensors. A cancel acts before and after.

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
    return Calibrated(
        tensors=rounded_int4(load_model(checkpoint.folder), names, sequences.tokens_NT),
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
    )

"""The second step: score the weights of a model on drawn sequences, by their squared gradients.

    scoring = Scoring(checkpoint=checkpoint, drawn=drawn, work=Path("work"))
    scoring.base()["loss"], scoring.scores()

The model is read layer by layer if it does not fit into memory. The bits are the same.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from permille.errors import OperatorError
from permille.files import write_atomic
from permille.machine_memory import available_memory
from permille.models.checkpoint import Checkpoint
from permille.models.families import scoped_tensors, shape_of
from permille.models.layerwise import LayerStream, whole_model
from permille.models.loading import FileTokenizer
from permille.pipeline.draw import Drawn
from permille.pipeline.inputs import Progress, part, silent, versions
from permille.pipeline.select import Scored
from permille.sensitivity.base_check import check_base, remarks
from permille.sensitivity.fisher import fisher_scores, shard_sums
from permille.sensitivity.scores import IN_MEMORY_BYTES, Scores
from permille.sensitivity.streamed import StreamedModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_PROCESS_BYTES = 512 << 20  # memory of the interpreter and torch
_HIDDEN_SHARE = 4  # a quarter of the memory holds hidden states, if the model is read layer by layer
SCORED = 0.9
"""The progress of a mask when all weights are scored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """Use of torch: the device, the precision, and the memory. None means the memory that is free."""

    device: str = "cpu"
    dtype: str = "float32"
    memory_bytes: int | None = None

    @property
    def torch_device(self) -> torch.device:
        """The device. Raises OperatorError if the machine lacks it."""
        device, found = torch.device(self.device), torch.cuda.device_count()
        if device.type == "cuda" and (device.index or 0) >= found:
            raise OperatorError(
                f"PERMILLE_DEVICE is {self.device}, but torch finds {found} CUDA devices. Set it to cpu."
            )
        return device

    def open(self, checkpoint: Checkpoint, length: int) -> "PreTrainedModel | StreamedModel":
        """Open a model for sequences of this length. If it exceeds the memory, read it layer by layer.

        Raises:
            InputError: `whole_model` refuses the model.
            OperatorError: this machine lacks the device.
        """
        dtype, device = _DTYPES[self.dtype], self.torch_device
        memory_bytes = self.memory_bytes
        if memory_bytes is None:
            memory_bytes = available_memory() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
        if memory_bytes is None or needed_bytes(checkpoint, length, dtype.itemsize) <= memory_bytes:
            return cast("PreTrainedModel", whole_model(checkpoint, dtype, self.device))
        stream = LayerStream(checkpoint, dtype=dtype, device=device)
        return StreamedModel(stream=stream, hidden_bytes=memory_bytes // _HIDDEN_SHARE)


def needed_bytes(checkpoint: Checkpoint, length: int, item_bytes: int) -> int:
    """Estimate the memory for the whole model, its scores and one backward pass.

    The estimate is an upper bound.
    """
    shape = shape_of(checkpoint.config)
    scored = sum(prod(size) for _, size in scoped_tensors(checkpoint.config))
    largest = max(prod(checkpoint.shape(name)) for name in checkpoint.names)
    activations = length * ((shape.layers + 32) * shape.hidden + 3 * shape.vocabulary)
    scores_bytes = min(4 * scored, IN_MEMORY_BYTES)
    return (
        _PROCESS_BYTES + item_bytes * checkpoint.parameters + scores_bytes + 4 * (3 * largest + activations)
    )


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """Scoring of a model on drawn sequences. The model is opened at its first use, and then kept.

    Attributes:
        scope: the linear layers to score, as in `fisher_scores`.
        work: a folder for checkpoints, with which another call resumes, and for large scores. None keeps
            nothing.
    """

    checkpoint: Checkpoint
    drawn: Drawn
    scope: str = "all"
    compute: Compute = Compute()
    progress: Progress = silent
    work: Path | None = None

    @cached_property
    def _opened(self) -> "PreTrainedModel | StreamedModel":
        return self.compute.open(self.checkpoint, self.drawn.tokens_NT.shape[1])

    def base(self) -> dict[str, Any]:
        """Measure the base, so that a person sees oddities before the long work begins.

        Return the losses of `check_base` and its `remarks`.
        """
        known = None if self.work is None else self.work / "base.json"
        if known is not None and known.exists():
            return dict(json.loads(known.read_bytes()))
        self.progress(0.02, "measuring the base")
        bos = FileTokenizer(self.checkpoint.folder).known_bos
        losses = check_base(self._opened, self.drawn.tokens_NT, bos=bos)
        report = {**losses, "remarks": [*remarks(losses)]}
        if known is not None:
            write_atomic(known, json.dumps(report).encode())
        return report

    def scores(self) -> Scores:
        """Score all sequences. Errors are those of `fisher_scores`."""
        self.progress(0.03, "loading the model")
        told = part(self.progress, 0.05, SCORED, "fisher")
        return fisher_scores(self._opened, self.drawn.tokens_NT, self.scope, progress=told, **self._folders())

    def shard(self, shard: range) -> Scores:
        """Sum the squared gradients of some sequences, for `join_shards`."""
        self.progress(0.0, "loading the model")
        told = part(self.progress, 0.02, 0.99, "fisher")
        return shard_sums(
            self._opened, self.drawn.tokens_NT, shard, self.scope, progress=told, **self._folders()
        )

    def close(self) -> None:
        """Free the model. The next use opens it again."""
        self.__dict__.pop("_opened", None)

    def scored(self, scores: Scores, base: Mapping[str, object]) -> Scored:
        """Return the scores together with their origin."""
        number, length = self.drawn.tokens_NT.shape
        return Scored(
            tensors=scores,
            provenance={
                "corpus": self.drawn.provenance,
                "sequences": number,
                "length": length,
                "dtype": self.compute.dtype,
                "versions": versions("torch", "transformers", "tokenizers"),
            },
            read=self.drawn.read,
            base=base,
        )

    def _folders(self) -> dict[str, Path | None]:
        work = self.work
        return {"spill_dir": work and work / "scores", "resume": work and work / "fisher"}

"""Use of torch in a job: the device, the precision, and whether the model is loaded as a whole or by layers.

Tasks import this module only when they need torch.
"""

from math import prod
from typing import TYPE_CHECKING

import torch

from permille.errors import OperatorError
from permille.memory import available_memory
from permille.models.checkpoint import Checkpoint
from permille.models.families import scoped_tensors, shape_of
from permille.models.layerwise import LayerStream
from permille.models.loading import load_model
from permille.schemas.masks import Dtype
from permille.sensitivity.scores import IN_MEMORY_BYTES
from permille.sensitivity.streamed import StreamedModel
from permille_workers.runtime.context import TaskContext
from permille_workers.runtime.settings import WorkerSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_PROCESS_BYTES = 512 << 20  # memory of the interpreter and torch
_HIDDEN_SHARE = 4  # a quarter of the memory holds hidden states, if the model is read layer by layer


def open_torch_model(
    context: TaskContext, checkpoint: Checkpoint, length: int, dtype_name: Dtype | None = None
) -> "PreTrainedModel | StreamedModel":
    """Open a model for sequences of this length. If it does not fit into the memory, read it layer by layer.

    Args:
        dtype_name: the precision. None: the precision of the settings.

    Raises:
        InputError: `load_model` refuses the model.
        OperatorError: this machine lacks the device that the settings name.
    """
    settings = context.settings
    dtype, device = _DTYPES[dtype_name or settings.dtype], torch_device(settings.device)
    memory_bytes = _memory_of(settings, device)
    if memory_bytes is None or needed_bytes(checkpoint, length, dtype.itemsize) <= memory_bytes:
        return load_model(checkpoint.folder, dtype, device=settings.device)
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


def torch_device(name: str) -> torch.device:
    """Return the device of this name. Raises OperatorError if the machine lacks it."""
    device, found = torch.device(name), torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= found:
        raise OperatorError(
            f"PERMILLE_DEVICE is {name}, but torch finds {found} CUDA devices. Set it to cpu."
        )
    return device


def _memory_of(settings: WorkerSettings, device: torch.device) -> int | None:
    if settings.memory_bytes is not None:
        return settings.memory_bytes
    return available_memory() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]

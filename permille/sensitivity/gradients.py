"""Gradients of the masked weights, one row a sequence: what a basis is learned from.

Memory: the weights, one gradient a tensor in turn, the activations of one block. The rows go to a mapped file
where they do not fit; that file goes on where a stopped job left it.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from permille.errors import InputError
from permille.files import write_atomic
from permille.sensitivity.backward import check_sequences, differentiable, sequence_loss
from permille.sensitivity.fisher import Progress

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Indices = Mapping[str, NDArray[np.uint32]]
_SAVE_EVERY = 16


def masked_gradients(
    model: "PreTrainedModel",
    sequences_NT: NDArray[np.int64],
    mask: Indices,
    *,
    progress: Progress | None = None,
    folder: Path | None = None,
) -> NDArray[np.float32]:
    """The gradient of each sequence's mean next-token loss by the masked weights.

    Args:
        model: any dtype; its parameters and their `requires_grad` are as before afterwards.
        sequences_NT: [N, T] token ids.
        mask: flat indices by tensor, all tensors in tensor_id order; a tensor may have none.
        folder: keeps the rows as a mapped file; a second call with the same model, sequences and mask goes on
            after the rows that are there. None: in memory.

    Returns:
        [N, k] float32, columns in flat order.

    Raises:
        InputError: nothing masked, tokens outside the vocabulary, a loss or gradient that is not finite.
        OSError: as the file system reports it.
    """
    check_sequences(model, sequences_NT)
    spans = _spans(mask)
    if not spans:
        raise InputError("expected masked weights, got none")
    shape = (len(sequences_NT), max(span.stop for span in spans.values()))
    rows_NK, done, save = _storage(folder, shape, lambda: _fingerprint(model, sequences_NT, mask))
    with differentiable(model, list(spans)):
        for number in range(done, shape[0]):
            with _gradients_into(model, mask, spans, rows_NK[number]):
                sequence_loss(model, sequences_NT[number], number).backward()  # type: ignore[no-untyped-call]
            if not np.isfinite(rows_NK[number]).all():
                raise InputError(f"expected finite gradients, got NaN or infinity at sequence {number}")
            if (number + 1) % _SAVE_EVERY == 0:
                save(number + 1)
            if progress is not None:
                progress(number + 1, shape[0])
    save(shape[0])
    return rows_NK


def _spans(mask: Indices) -> dict[str, slice]:
    """Where each tensor's masked weights are in flat order; tensors without any are left out."""
    spans, start = {}, 0
    for name, indices in mask.items():
        if indices.size:
            spans[name] = slice(start, start + indices.size)
            start += indices.size
    return spans


@contextlib.contextmanager
def _gradients_into(
    model: "PreTrainedModel", mask: Indices, spans: Mapping[str, slice], row_K: NDArray[np.float32]
) -> Iterator[None]:
    """While autograd runs backward: copy each gradient's masked elements and free it at once."""
    handles = []
    for name, span in spans.items():
        hook = _copy_hook(torch.from_numpy(mask[name].astype(np.int64)), row_K[span])
        handles.append(model.get_parameter(name).register_post_accumulate_grad_hook(hook))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for name in spans:
            model.get_parameter(name).grad = None


def _copy_hook(indices: Tensor, target: NDArray[np.float32]) -> Callable[[Tensor], None]:
    def copy(parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            raise RuntimeError("autograd called the hook without a gradient")
        target[:] = (
            gradient.detach().reshape(-1)[indices.to(gradient.device)].to("cpu", torch.float32).numpy()
        )

    return copy


def _storage(
    folder: Path | None, shape: tuple[int, int], fingerprint: Callable[[], str]
) -> tuple[NDArray[np.float32], int, Callable[[int], None]]:
    """The rows, how many of them are there already, and what to call after more of them."""
    if folder is None:
        return np.zeros(shape, np.float32), 0, lambda _: None
    folder.mkdir(parents=True, exist_ok=True)
    path, state, name = folder / "gradients.f32", folder / "gradients.json", fingerprint()
    known = json.loads(state.read_text()) if state.exists() else {}
    size = shape[0] * shape[1] * 4
    goes_on = known.get("of") == name and path.exists() and path.stat().st_size == size
    rows_NK = np.memmap(path, np.float32, "r+" if goes_on else "w+", shape=shape)

    def save(done: int) -> None:
        rows_NK.flush()
        write_atomic(state, json.dumps({"of": name, "done": done}).encode())

    return rows_NK, int(known["done"]) if goes_on else 0, save


def _fingerprint(model: "PreTrainedModel", sequences_NT: NDArray[np.int64], mask: Indices) -> str:
    """Names the rows: weights, sequences and mask."""
    state = hashlib.sha256(f"permille-gradients-1 {sequences_NT.shape}".encode())
    state.update(np.ascontiguousarray(sequences_NT).astype("<i8", copy=False).data)
    for name, indices in mask.items():
        state.update(f"{name} {indices.size}".encode())
        state.update(np.ascontiguousarray(indices).astype("<u4", copy=False).data)
    for name, parameter in model.named_parameters():
        state.update(f"{name} {parameter.dtype}".encode())
        state.update(parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return state.hexdigest()

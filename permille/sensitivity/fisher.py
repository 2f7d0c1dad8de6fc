"""Fisher scores: the diagonal of the empirical Fisher of a causal language model, one sequence at a time.

    F_i = (1/N) * sum_n g_{n,i}^2

The formula is from "Zeroth-order fine-tuning of LLMs with extreme sparsity", section 3.1. `g_n` is the
gradient of the mean next-token loss of sequence n. Squares are computed and summed in float32 for any dtype
of the model, because a sum in bfloat16 stops growing at 2^8 equal terms. The square of a batch's mean
gradient is another quantity, and this module does not compute it.

These are in memory at a time: the weights, the scores in scope, the gradient of one tensor, and the
activations of one decoder layer. Of a `StreamedModel`, only one decoder layer is in memory, and large scores
may be in a mapped file. Each gradient is squared and freed as soon as autograd has made it. Activations of
other layers are recomputed.

Squared gradients are summed in shards of sequences (`shard_ranges`), and the sums of the shards are added in
their order. So one process and sixteen workers get the same bits from the same gradients. A stopped job loses
about a minute of work (`SAVE_EVERY_S`), or more if saving is slow, and its scores have the same bits as
without the stop.
"""

import contextlib
import functools
import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from permille.errors import InputError
from permille.models.families import scoped_tensors, shape_of
from permille.models.layerwise import DecoderLayer
from permille.sensitivity.backward import check_sequences, check_tokens, differentiable, sequence_loss
from permille.sensitivity.scores import (
    IN_MEMORY_BYTES,
    PartialSums,
    Scores,
    Shapes,
    divide,
    merge,
    shard_ranges,
    zero_scores,
)
from permille.sensitivity.streamed import StreamedModel, backward_by_layer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

AnyModel: TypeAlias = "PreTrainedModel | StreamedModel"


SAVE_EVERY_S = 60.0
"""Seconds of work between two savings of the sums. Of a `StreamedModel`, a pass is finished first."""
_SAVING_SHARE = 10  # saving takes at most one part in ten of the time, even of large sums on a slow disk

# Called after each sequence with the number of sequences done and their total. An exception stops the work,
# and the sums that were saved last stay in the `resume` folder.
Progress: TypeAlias = Callable[[int, int], None]


def fisher_scores(
    model: AnyModel,
    sequences_NT: NDArray[np.int64],
    scope: str = "all",
    *,
    progress: Progress | None = None,
    spill_dir: Path | None = None,
    resume: Path | None = None,
) -> Scores:
    """Score the linear layers in scope over all sequences.

        scores = fisher_scores(model, sequences_NT, "attention")

    Args:
        model: a model of any dtype and device. Its parameters and their `requires_grad` are not changed.
        sequences_NT: [N, T] token ids. The loss of a sequence is the mean over its T - 1 predictions.
        scope: the layers to score: "all", "attention", "mlp", or a range of layers such as "layers:4-7".
        progress: called after each sequence.
        spill_dir: the folder for scores larger than 4 GiB, which are mapped. None keeps them in memory.
        resume: a folder that keeps the sums after each shard, and at most once a minute. A second call with
            the same model, sequences and scope continues from there.

    Raises:
        InputError: a weight, loss or gradient is not finite (the message names it), or a token is outside of
            the vocabulary.
        OSError: the file system failed.
    """
    shapes = scope_shapes(model, scope)
    check_model(model)
    shards = shard_ranges(len(sequences_NT))
    sums = PartialSums.open(resume, fingerprint=_fingerprint(model, sequences_NT, shapes) if resume else "")
    total = zero_scores(shapes, spill_dir=spill_dir)
    finished = sums.load_into(total)
    # A single shard needs no second array, which would be as large as the model's weights in scope.
    partial = total if len(shards) == 1 else zero_scores(shapes, spill_dir=spill_dir)
    for index, shard in enumerate(shards[finished:], start=finished):
        report = None if progress is None else _offset(progress, shard.start, len(sequences_NT))
        tokens_NT = sequences_NT[shard.start : shard.stop]
        _add_saved(model, tokens_NT, partial, sums.within(index), first=shard.start, progress=report)
        if partial is not total:
            merge(total, partial)
            partial.flat[:] = 0
        sums.save(total, index + 1)
    divide(total, len(sequences_NT))
    return total


def shard_sums(
    model: AnyModel,
    sequences_NT: NDArray[np.int64],
    shard: range,
    scope: str = "all",
    *,
    progress: Progress | None = None,
    spill_dir: Path | None = None,
    resume: Path | None = None,
) -> Scores:
    """Sum the squared gradients of one shard, for `join_shards`.

    Arguments and errors are those of `fisher_scores`.
    """
    shapes = scope_shapes(model, scope)
    check_model(model)
    tokens_NT = sequences_NT[shard.start : shard.stop]
    sums = PartialSums.open(resume, fingerprint=_fingerprint(model, tokens_NT, shapes) if resume else "")
    total = zero_scores(shapes, spill_dir=spill_dir)
    report = None if progress is None else _offset(progress, 0, len(tokens_NT))
    # `within`, because a sum of `fisher_scores` in this folder counts shards, not sequences.
    _add_saved(model, tokens_NT, total, sums.within(0), first=shard.start, progress=report)
    return total


def _add_saved(
    model: AnyModel,
    tokens_NT: NDArray[np.int64],
    sums: Scores,
    saved: PartialSums,
    *,
    first: int,
    progress: Callable[[int], None] | None,
) -> None:
    """Add g^2 of the sequences to `sums`, which are 0, or continue from those that were saved."""
    done, wait_s = saved.load_into(sums), SAVE_EVERY_S
    while done < len(tokens_NT):
        report = None if progress is None else functools.partial(_beside, progress, done)
        due_s = time.monotonic() + wait_s if saved.folder is not None else math.inf
        done += add_shard(model, tokens_NT[done:], sums, first=first + done, progress=report, until_s=due_s)
        if done < len(tokens_NT):
            began_s = time.monotonic()
            with contextlib.suppress(OSError):  # a full disk must not end work that may need no resume
                saved.save(sums, done)
            wait_s = max(SAVE_EVERY_S, _SAVING_SHARE * (time.monotonic() - began_s))


def scope_shapes(model: AnyModel, scope: str) -> Shapes:
    """Return names and shapes of the linear layers in scope.

    Raises:
        InputError: the family or scope is unknown.
    """
    if isinstance(model, StreamedModel):
        return scoped_tensors(model.stream.checkpoint.config, scope)
    return scoped_tensors(model.config.to_dict(), scope)


def check_model(model: AnyModel) -> None:
    """Check that all weights are finite.

    Raises:
        InputError: a weight is NaN or infinite. The message names the first such tensor.
    """
    if isinstance(model, StreamedModel):
        checkpoint = model.stream.checkpoint
        for name in checkpoint.names:
            if not checkpoint.raw(name).all_finite():
                raise _not_finite(name)
        return
    for name, parameter in model.named_parameters():
        # A sum is finite only if all terms are. It may also overflow, so look again before refusing.
        if not torch.isfinite(parameter.detach().sum()) and not torch.isfinite(parameter.detach()).all():
            raise _not_finite(name)


def add_shard(
    model: AnyModel,
    sequences_NT: NDArray[np.int64],
    sums: Scores,
    *,
    first: int = 0,
    progress: Callable[[int], None] | None = None,
    until_s: float = math.inf,
) -> int:
    """Add g^2 of each sequence to `sums`, in their order, and return the number of sequences.

    Args:
        first: the number of the first sequence, for messages.
        until_s: the time, as of `time.monotonic`, after which no other sequence or pass begins. At least one
            is finished.

    Raises:
        InputError: as for `fisher_scores`.
    """
    if isinstance(model, StreamedModel):
        return _add_streamed(model, sequences_NT, sums, first, progress, until_s)
    check_sequences(model, sequences_NT)
    with differentiable(model, list(sums)), _sums_beside(model.device, sums) as sum_of:
        for index, tokens_T in enumerate(sequences_NT):
            parameters = {name: model.get_parameter(name) for name in sums}
            with _squares_into(parameters, sum_of, first + index):
                sequence_loss(model, tokens_T, first + index).backward()  # type: ignore[no-untyped-call]
            if progress is not None:
                progress(index + 1)
            if time.monotonic() >= until_s:
                return index + 1
    return len(sequences_NT)


def _add_streamed(
    model: StreamedModel,
    sequences_NT: NDArray[np.int64],
    sums: Scores,
    first: int,
    progress: Callable[[int], None] | None,
    until_s: float,
) -> int:
    checkpoint = model.stream.checkpoint
    check_tokens(shape_of(checkpoint.config).vocabulary, sequences_NT)

    def watched(layer: DecoderLayer, sequence: int) -> contextlib.AbstractContextManager[None]:
        named = ((f"{layer.prefix}.{name}", each) for name, each in layer.module.named_parameters())
        parameters = {name: parameter for name, parameter in named if parameter.requires_grad}
        return _squares_into(parameters, functools.partial(_shared, sums), first + sequence)

    return backward_by_layer(model, sequences_NT, list(sums), watched, progress=progress, until_s=until_s)


def _not_finite(name: str) -> InputError:
    return InputError(
        f"{name} has weights that are NaN or infinite. The model is damaged: download it again."
    )


@contextlib.contextmanager
def _sums_beside(device: torch.device, sums: Scores) -> Iterator[Callable[[str], Tensor]]:
    """Yield a function that returns the sum of a tensor by name.

    If the model is on a GPU and the sums fit there, the sums stay on the GPU until the end of the context.
    Then squares need not be copied to the host.
    """
    if not _holds_sums(device, sums):
        yield functools.partial(_shared, sums)
        return
    # They start from `sums`, so that a pause does not change how the squares are grouped.
    beside = {name: _shared(sums, name).to(device, copy=True) for name in sums}
    yield beside.__getitem__
    for name, sum_NK in beside.items():
        _shared(sums, name).copy_(sum_NK)


def _holds_sums(device: torch.device, sums: Scores) -> bool:
    return device.type != "cpu" and sums.flat.nbytes <= IN_MEMORY_BYTES


def _shared(sums: Scores, name: str) -> Tensor:
    """Return the sum of a tensor as a torch tensor over the same memory."""
    return torch.from_numpy(sums[name])


@contextlib.contextmanager
def _squares_into(
    parameters: Mapping[str, nn.Parameter], sum_of: Callable[[str], Tensor], sequence: int
) -> Iterator[None]:
    """Add the square of each gradient to its sum while autograd runs, and free the gradient at once."""
    handles = []
    for name, parameter in parameters.items():
        hook = _square_hook(name, sum_of(name), sequence)
        handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for parameter in parameters.values():
            # An error may have left gradients behind, each as large as its weight.
            parameter.grad = None


def _square_hook(name: str, sum_NK: Tensor, sequence: int) -> Callable[[Tensor], None]:
    def add_square(parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            raise RuntimeError(f"{name}: autograd called the hook without a gradient")
        # Convert to float32 before squaring, because bfloat16 would round the square to eight bits.
        square_NK = gradient.detach().float().square_()
        # Check now: a NaN would stay in the sum, and `select_mask` would refuse it only after all sequences.
        if not torch.isfinite(square_NK).all():
            raise InputError(f"The squared gradients of {name} are not finite at sequence {sequence}.")
        # The sum may be in memory while the gradient is on a GPU (`_sums_beside`).
        sum_NK.add_(square_NK.to(sum_NK.device))

    return add_square


def _offset(progress: Progress, start: int, total: int) -> Callable[[int], None]:
    return lambda done: progress(start + done, total)


def _beside(progress: Callable[[int], None], before: int, done: int) -> None:
    progress(before + done)


def _fingerprint(model: AnyModel, sequences_NT: NDArray[np.int64], shapes: Shapes) -> str:
    """Return a name for the sum: a hash of weights, sequences and scope."""
    # A call must not continue from the sum of other weights or sequences, so the hash covers both.
    state = hashlib.sha256(f"permille-fisher-2 {sequences_NT.shape} {shapes}".encode())
    state.update(np.ascontiguousarray(sequences_NT).astype("<i8", copy=False).data)
    if isinstance(model, StreamedModel):
        state.update(f"{model.stream.checkpoint.digest()} {model.stream.dtype}".encode())
        return state.hexdigest()
    for name, parameter in model.named_parameters():
        state.update(f"{name} {parameter.dtype}".encode())
        state.update(parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return state.hexdigest()

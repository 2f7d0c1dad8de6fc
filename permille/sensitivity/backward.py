"""The loss of a sequence in a form that can be differentiated with little memory.

Only the selected weights require a gradient, the activations of a decoder layer are recomputed in the
reverse pass, and dropout is off.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from permille.errors import InputError
from permille.models.families import layer_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def check_sequences(model: "PreTrainedModel", sequences_NT: NDArray[np.int64]) -> None:
    """Check that the model can take the sequences.

    Raises:
        InputError: the shape is not [N, T] with T of at least 2, or a token is outside of the vocabulary.
    """
    check_tokens(model.get_input_embeddings().weight.shape[0], sequences_NT)


def check_tokens(vocabulary: int, sequences_NT: NDArray[np.int64]) -> None:
    """Check token sequences.

    Raises:
        InputError: the shape is not [N, T] with T of at least 2, or a token is outside of the vocabulary.
    """
    if sequences_NT.ndim != 2 or sequences_NT.shape[1] < 2:
        raise InputError(f"expected sequences [N, T] of at least 2 tokens, got shape {sequences_NT.shape}")
    if sequences_NT.min() < 0 or sequences_NT.max() >= vocabulary:
        raise InputError(
            f"The model has the tokens 0 to {vocabulary - 1}, and the text has {sequences_NT.min()} to "
            f"{sequences_NT.max()}. Use the model's own tokenizer."
        )


@contextlib.contextmanager
def differentiable(model: "PreTrainedModel", names: Sequence[str]) -> Iterator[None]:
    """Give gradients to `names` only, recompute layers in the reverse pass, and use eval mode.

    At the end of the context, the model is as it was before.
    """
    with _only_trainable(model, names), _recomputed(_layers(model, names)), _in_eval_mode(model):
        yield


def sequence_loss(model: "PreTrainedModel", tokens_T: NDArray[np.int64], sequence: int) -> Tensor:
    """Return the mean over t of -log p(token t | earlier tokens), with logits in float32.

    Raises:
        InputError: the loss is not finite.
    """
    ids_BT = torch.from_numpy(np.ascontiguousarray(tokens_T))[None].to(model.device)
    # Use float32 for any dtype of the model, because a softmax in bfloat16 loses small probabilities.
    logits_TV = model(input_ids=ids_BT, use_cache=False).logits[0, :-1].float()
    loss = functional.cross_entropy(logits_TV, ids_BT[0, 1:])
    if not torch.isfinite(loss):
        raise InputError(f"The loss of sequence {sequence} is not finite: {loss.item()}.")
    return loss


@contextlib.contextmanager
def _only_trainable(model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Let only `names` require a gradient. Autograd then keeps no graph below the lowest named layer."""
    before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    wanted = set(names)
    try:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in wanted)
        yield
    finally:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(before[name])


@contextlib.contextmanager
def _in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Turn dropout off, so that scores depend on weights and tokens alone."""
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        yield
    finally:
        for module, training in modes.items():
            module.training = training


@contextlib.contextmanager
def _recomputed(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Keep only the input of a decoder layer, and recompute the layer in the reverse pass.

    transformers can do this itself, but only in training mode, where dropout is on.
    """
    # Look only in the instance, because `layer.forward` would also find the method of the class.
    own = [vars(layer).get("forward") for layer in layers]
    try:
        for layer in layers:
            layer.forward = _checkpointed(layer.forward)
        yield
    finally:
        for layer, forward in zip(layers, own, strict=True):
            del layer.forward  # the class's own method is visible again
            if forward is not None:  # the instance already had a method of its own
                layer.forward = forward


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        # Dropout is off, so there is no random state to keep.
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return run


def _layers(model: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """Return the decoder layers from the lowest in `names` upwards. The reverse pass visits only these."""
    lowest = min(index for index in map(layer_of, names) if index is not None)
    prefix = names[0].split(".layers.", 1)[0] + ".layers"
    layers = model.get_submodule(prefix)
    if not isinstance(layers, nn.ModuleList):
        raise InputError(f"expected a list of layers at {prefix}, got {type(layers).__name__}")
    return list(layers)[lowest:]

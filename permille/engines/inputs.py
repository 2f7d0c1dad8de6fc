"""Checks of an engine's inputs. numpy only.

A token id outside of the vocabulary could read memory outside of an array, or crash the process. So every
input is checked here before an engine uses it.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from permille.engines.key_values import KeyValues
from permille.errors import InputError
from permille.zo.estimators import Batch, SoftTargets

_MOST_NAMED = 1024  # the largest number of tokens that a soft target can list


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """Input limits of a model.

    Attributes:
        k: the number of trained values.
        vocabulary: the number of token ids.
        positions: the length of the longest sequence. None if the config sets no limit.
    """

    k: int
    vocabulary: int
    positions: int | None

    def after(self, tokens: int) -> "ModelLimits":
        """Return the limits of texts that follow this number of tokens."""
        return self if self.positions is None else replace(self, positions=self.positions - tokens)


def check_values(values_VK: NDArray[np.float32], limits: ModelLimits) -> None:
    """Check the values of several variants. NaN and infinite values pass, and lead to NaN or infinite losses.

    Raises:
        InputError: the array is not float32 [variants, k], or it holds no variant.
    """
    if values_VK.dtype != np.float32 or values_VK.ndim != 2 or values_VK.shape[1] != limits.k:
        raise InputError(
            f"expected values float32 [variants, {limits.k}], got {values_VK.dtype} {list(values_VK.shape)}"
        )
    # Without a variant, an engine would reduce over an empty axis.
    if len(values_VK) == 0:
        raise InputError("expected at least one variant of the values, got none")


def check_prompt(prompt_ids: NDArray[np.int64], limits: ModelLimits) -> None:
    """Check the token ids of a prompt.

    Raises:
        InputError: the ids are empty or not int64 [T], an id is outside of the vocabulary, or no position is
            left for a new token.
    """
    if prompt_ids.dtype != np.int64 or prompt_ids.ndim != 1 or len(prompt_ids) == 0:
        raise InputError(
            f"expected prompt_ids int64 [tokens], got {prompt_ids.dtype} {list(prompt_ids.shape)}"
        )
    _check_ids(prompt_ids, limits)
    if limits.positions is not None and len(prompt_ids) >= limits.positions:
        raise InputError(
            f"The prompt has {len(prompt_ids)} tokens, and the model takes {limits.positions} for prompt and "
            "answer together. Shorten the prompt."
        )


def check_key_values(known: KeyValues, limits: ModelLimits, shape: tuple[int, int, int]) -> None:
    """Check keys and values that a text is to follow.

    Args:
        known: the keys and values.
        limits: the limits of the model.
        shape: the numbers of layers, of key-value heads and of numbers in a head.

    Raises:
        InputError: they do not fit the model, or leave no position for a prompt and an answer.
    """
    layers, *head = shape
    for array in (array for pair in known.layers for array in pair):
        if array.dtype != np.float32 or list(array.shape) != [len(known), *head]:
            raise InputError(
                f"The model has keys and values float32 {[len(known), *head]}, not {array.dtype} "
                f"{list(array.shape)}."
            )
    if len(known.layers) != layers:
        raise InputError(f"The model has {layers} layers, not {len(known.layers)} pairs of keys and values.")
    _check_ids(known.id_S, limits)
    if limits.positions is not None and len(known) > limits.positions - 2:
        raise InputError(
            f"The beginning has {len(known)} tokens, and the model takes {limits.positions}. Shorten the "
            "beginning, so that at least 2 can follow it."
        )


def check_batch(batch: Batch, limits: ModelLimits, *, soft: bool = False) -> Batch:
    """Check a batch, and return it without the columns that are padding in every row.

    Args:
        batch: the batch.
        limits: the limits of the model.
        soft: whether the engine supports soft targets.

    Raises:
        InputError: shapes or dtypes do not match, an id is outside of the vocabulary, padding is not on the
            right, a row is empty, a target is at position 0 or in the padding, there is no target, a row has
            more tokens than the model takes, or soft targets are invalid or not supported.
    """
    _check_layout(batch)
    if batch.soft is not None:
        if not soft:
            raise InputError("This engine does not support soft targets. Use the light or the torch engine.")
        _check_soft(batch.soft, int(batch.target_BT.sum()), limits)
    # Padding must be on the right. Attention is causal, so no token attends to padding on its right.
    length_B = batch.attention_BT.sum(axis=1)
    if (batch.attention_BT != (np.arange(batch.attention_BT.shape[1]) < length_B[:, None])).any():
        raise InputError("expected attention to be true from the left, then false (right padding)")
    if length_B.min() == 0:
        raise InputError(f"expected a token in each sequence, got none in row {int(length_B.argmin())}")
    if not batch.target_BT.any():
        raise InputError("The batch has no target token, so it has no loss.")
    # A token at position 0 has no earlier token that could predict it.
    if batch.target_BT[:, 0].any() or (batch.target_BT & ~batch.attention_BT).any():
        raise InputError("expected targets after position 0 and outside the padding")
    columns = int(length_B.max())
    if limits.positions is not None and columns > limits.positions:
        raise InputError(
            f"A sequence has {columns} tokens, and the model takes at most {limits.positions}. "
            "Cut the text into shorter sequences."
        )
    # Ids in the padding change no loss, but an engine looks up their embeddings. Set them to 0, which is
    # always in the vocabulary.
    ids_BT = np.where(batch.attention_BT, batch.input_ids_BT, 0)[:, :columns]
    _check_ids(ids_BT, limits)
    return Batch(
        input_ids_BT=ids_BT,
        attention_BT=batch.attention_BT[:, :columns],
        target_BT=batch.target_BT[:, :columns],
        soft=batch.soft,
    )


def _check_soft(soft: SoftTargets, targets: int, limits: ModelLimits) -> None:
    ids_RN, probability_RN = soft.ids_RN, soft.probability_RN
    shape = ids_RN.shape
    if (
        ids_RN.dtype != np.int64
        or ids_RN.ndim != 2
        or shape[0] != targets
        or not 1 <= shape[1] <= _MOST_NAMED
    ):
        wanted = f"int64 [{targets}, 1 to {_MOST_NAMED}]"
        raise InputError(f"expected ids of soft targets {wanted}, got {ids_RN.dtype} {list(shape)}")
    if probability_RN.dtype != np.float32 or probability_RN.shape != shape:
        got = f"{probability_RN.dtype} {list(probability_RN.shape)}"
        raise InputError(f"expected probabilities float32 {list(shape)}, got {got}")
    _check_ids(ids_RN, limits)
    if (np.diff(np.sort(ids_RN, axis=1), axis=1) == 0).any():
        raise InputError("The ids of a soft target must be distinct.")
    # Compare in this way, because NaN then fails the comparison.
    if not (probability_RN >= 0).all() or not (probability_RN.sum(axis=1) <= 1.001).all():
        raise InputError("The probabilities of a soft target must be at least 0 and add up to at most 1.")


def _check_layout(batch: Batch) -> None:
    ids_BT = batch.input_ids_BT
    if ids_BT.dtype != np.int64 or ids_BT.ndim != 2 or ids_BT.size == 0:
        raise InputError(
            f"expected input_ids int64 [sequences, tokens], got {ids_BT.dtype} {list(ids_BT.shape)}"
        )
    for name, array in (("attention", batch.attention_BT), ("target", batch.target_BT)):
        if array.dtype != np.bool_ or array.shape != ids_BT.shape:
            raise InputError(
                f"expected {name} bool {list(ids_BT.shape)}, got {array.dtype} {list(array.shape)}"
            )


def _check_ids(ids: NDArray[np.int64], limits: ModelLimits) -> None:
    lowest, highest = int(ids.min()), int(ids.max())
    if lowest < 0 or highest >= limits.vocabulary:
        raise InputError(f"expected token ids from 0 to {limits.vocabulary - 1}, got {lowest} to {highest}")

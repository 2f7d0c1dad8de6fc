"""A check that a base model reads public text well, in rows as we make them, before long work begins.

A model that expects BOS reads rows without it badly: Gemma with 5.8 instead of 3.7 nats per token. A mask
from such rows is wrong, and training on them mostly learns to do without BOS. So a mask job measures
the base in three ways: with the rows as they are made, without their first token, and after BOS.

    losses = check_base(model, sequences_NT, bos=2)
    for remark in remarks(losses):
        print(remark)
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeAlias, TypedDict

import numpy as np
from numpy.typing import NDArray

from permille.quantization.perplexity import perplexity, perplexity_by_layer
from permille.sensitivity.streamed import StreamedModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

AnyModel: TypeAlias = "PreTrainedModel | StreamedModel"

CHECKED_SEQUENCES = 4
"""Four sequences of 256 tokens take about an eighth of the time of a mask of 32."""
WORSE_NATS = 0.2
LEAST_TOKENS = 2_000
HIGH_SHARE = 0.9
"""A model that reads text at all is well below the unigram entropy, which a short text lowers."""


class BaseLosses(TypedDict):
    """Losses of a base on public text, in nats per token.

    Attributes:
        loss: of the rows as they are made.
        without_first: of the rows without their first token.
        after_bos: of the rows after BOS. None if the rows begin with it, or the model has none.
        unigram_entropy: the loss of a model that knows the frequencies of this text's tokens and no more.
            None if the text is too short to tell.
    """

    loss: float
    without_first: float
    after_bos: float | None
    unigram_entropy: float | None


def check_base(model: AnyModel, sequences_NT: NDArray[np.int64], *, bos: int | None) -> BaseLosses:
    """Measure the base on a few of the sequences.

    Args:
        model: the base.
        sequences_NT: token ids [N, T] as a mask job draws them, with T of at least 3.
        bos: the model's BOS, also if its texts do not begin with it.

    Raises:
        InputError: a loss is not finite.
    """
    rows_NT = sequences_NT[:CHECKED_SEQUENCES]
    after_bos = None
    if bos is not None and (rows_NT[:, 0] != bos).any():
        # The last token makes room, so that no row is longer than the model can read.
        after_bos = _loss(model, np.insert(rows_NT[:, :-1], 0, bos, axis=1))
    return BaseLosses(
        loss=_loss(model, rows_NT),
        without_first=_loss(model, rows_NT[:, 1:]),
        after_bos=after_bos,
        unigram_entropy=_entropy(sequences_NT) if sequences_NT.size >= LEAST_TOKENS else None,
    )


def remarks(losses: BaseLosses) -> Iterator[str]:
    """Yield a sentence for each finding that an operator should look at before going on.

    Example:
        >>> list(remarks(BaseLosses(loss=3.7, without_first=5.8, after_bos=None, unigram_entropy=6.0)))
        []
    """
    loss = losses["loss"]
    ways = {"without their first token": losses["without_first"], "after BOS": losses["after_bos"]}
    for way, other in ways.items():
        if other is not None and loss - other > WORSE_NATS:
            yield (
                f"The base reads the rows better {way}: {other:.2f} instead of {loss:.2f} nats per token. "
                "Check whether its tokenizer's files say how a text begins."
            )
    entropy = losses["unigram_entropy"]
    if entropy is not None and loss > HIGH_SHARE * entropy:
        yield (
            f"The base's loss is unusually high: {loss:.2f} nats per token, and the frequencies of tokens "
            f"alone give {entropy:.2f}. Check the tokenizer and the language of the text."
        )


def _entropy(tokens_NT: NDArray[np.int64]) -> float:
    _, count_U = np.unique(tokens_NT, return_counts=True)
    share_U = count_U / count_U.sum()
    return float(-(share_U * np.log(share_U)).sum())


def _loss(model: AnyModel, rows_NT: NDArray[np.int64]) -> float:
    if isinstance(model, StreamedModel):
        return perplexity_by_layer(model.stream, rows_NT)["loss"]
    return perplexity(model, rows_NT)["loss"]

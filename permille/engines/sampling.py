"""Choice of the next token: the most likely one, or a random one. numpy only."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from permille.errors import InputError

# The repeat penalty covers this many of the last new tokens, as in llama.cpp (`repeat_last_n`).
REPEATED_TOKENS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSampling:
    """Settings for choosing new tokens.

    For example, `TokenSampling(max_new_tokens=100, temperature=0.7, top_p=0.9)`.

    Attributes:
        max_new_tokens: the largest number of new tokens.
        temperature: the divisor of the logits. 0 takes the most likely token, so `top_p`, `top_k` and `seed`
            have no effect.
        top_p: sample from the smallest set of most likely tokens with this total probability, in (0, 1].
        top_k: sample from this many of the most likely tokens. 0 sets no limit.
        repeat_penalty: makes each of the last 64 new tokens less likely. 1 does nothing. Positive logits are
            divided by the penalty, and negative ones are multiplied by it (Keskar et al. 2019, section 4.1).
            Tokens of the prompt are not penalised, because an answer repeats words of its question, and
            because the prompt contains the token that ends the answer.
        seed: the seed of the random choices. The same arguments give the same tokens on the same machine
            and build.
        stop_ids: tokens that end the text. They are not yielded.

    Raises:
        InputError: a setting is out of range.
    """

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    repeat_penalty: float = 1.0
    seed: int = 0
    stop_ids: Collection[int] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise InputError(f"max_new_tokens must be at least 1, not {self.max_new_tokens}.")
        if not 0 <= self.temperature < float("inf"):
            raise InputError(f"The temperature must be 0 or more and finite, not {self.temperature}.")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p must be above 0 and at most 1, not {self.top_p}.")
        if self.top_k < 0:
            raise InputError(f"top_k must be 0 or more, not {self.top_k}.")
        if not 0 < self.repeat_penalty < float("inf"):
            raise InputError(f"repeat_penalty must be above 0 and finite, not {self.repeat_penalty}.")
        if not 0 <= self.seed < 1 << 64:
            raise InputError(f"The seed must be from 0 to 2**64 - 1, not {self.seed}.")


def generate_tokens(
    next_logits: Callable[[NDArray[np.int64]], NDArray[np.float32]],
    prompt_ids: NDArray[np.int64],
    sampling: TokenSampling,
    room: int,
) -> Iterator[int]:
    """Yield new token ids one by one, up to a stop id.

    Args:
        next_logits: returns the logits [D] of the next token. The first call gets the prompt. Each later call
            gets only the token that was chosen last.
        prompt_ids: int64 [T], the prompt.
        room: the largest number of new tokens.
    """
    # Each text has its own random generator, so that other calls do not change its tokens.
    rng = np.random.Generator(np.random.Philox(sampling.seed))
    written: list[int] = []
    ids = prompt_ids
    for _ in range(room):
        token = next_token(next_logits(ids), sampling, rng, written)
        if token in sampling.stop_ids:
            return
        yield token
        written.append(token)
        # The engine keeps keys and values of earlier tokens, so it needs only the new token.
        ids = np.array([token], dtype=np.int64)


def new_tokens(sampling: TokenSampling, prompt: int, positions: int | None) -> int:
    """Return how many tokens may follow a prompt of this length.

    For example, 8 positions leave room for 3 tokens after a prompt of 5:

        >>> new_tokens(TokenSampling(max_new_tokens=100), 5, 8)
        3
    """
    return sampling.max_new_tokens if positions is None else min(sampling.max_new_tokens, positions - prompt)


def next_token(
    logit_D: NDArray[np.float32],
    sampling: TokenSampling,
    rng: np.random.Generator,
    written: Sequence[int] = (),
) -> int:
    """Return the next token id. Of equally likely tokens, the lowest id wins.

    >>> next_token(np.array([0.1, 0.7], np.float32), TokenSampling(max_new_tokens=1), np.random.default_rng())
    1

    Args:
        logit_D: the logits.
        sampling: the settings.
        rng: the random generator. It is used only if the temperature is above 0.
        written: the new tokens so far, without the prompt.

    Raises:
        InputError: the logits are not finite, so the sparse values cannot be used.
    """
    if not np.isfinite(logit_D).all():
        raise InputError("The logits are not finite: these sparse values break the model.")
    if sampling.repeat_penalty != 1.0 and written:
        logit_D = logit_D.copy()
        recent = np.unique(written[-REPEATED_TOKENS:])
        found = logit_D[recent]
        logit_D[recent] = np.where(
            found > 0, found / sampling.repeat_penalty, found * sampling.repeat_penalty
        )
    if sampling.temperature == 0:
        return int(np.argmax(logit_D))
    return _sampled(logit_D.astype(np.float64) / sampling.temperature, sampling, rng)


def _sampled(logit_D: NDArray[np.float64], sampling: TokenSampling, rng: np.random.Generator) -> int:
    """Sample by inverting the cumulative distribution of the tokens that top_k and then top_p keep."""
    # Sort stably, so that equally likely tokens stay in the order of their ids.
    order_D = np.argsort(-logit_D, kind="stable")[: sampling.top_k or None]
    # Subtract the largest logit, so that no exponential overflows.
    weight_D = np.exp(logit_D[order_D] - logit_D[order_D[0]])
    cumulative_D = np.cumsum(weight_D / weight_D.sum())
    # The token at which the sum reaches top_p belongs to the set.
    kept = min(int(np.searchsorted(cumulative_D, sampling.top_p)) + 1, len(cumulative_D))
    drawn = rng.random() * cumulative_D[kept - 1]
    # `drawn` can round up to the full sum. The index is then one past the last token, so bound it.
    return int(order_D[min(int(np.searchsorted(cumulative_D[:kept], drawn, side="right")), kept - 1)])

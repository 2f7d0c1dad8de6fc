"""Tests of the choice of the next token: the most likely one, or a random one by probability."""

from typing import Any

import numpy as np
import pytest

from permille.engines.sampling import TokenSampling, next_token
from permille.errors import InputError

LOGITS = np.log(np.array([0.1, 0.5, 0.15, 0.25], np.float32))


def sampling(**changes: Any) -> TokenSampling:
    settings: dict[str, Any] = {"max_new_tokens": 1, "temperature": 1.0, "top_p": 1.0, "seed": 0}
    return TokenSampling(**(settings | changes))


def frequencies(draws: int = 4_000, **changes: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    rng = np.random.default_rng(0)
    tokens = [next_token(LOGITS, sampling(**changes), rng) for _ in range(draws)]
    return np.bincount(tokens, minlength=4) / draws


def test_temperature_0_takes_the_most_likely_and_the_first_of_equals() -> None:
    rng = np.random.default_rng(0)
    assert next_token(LOGITS, sampling(temperature=0.0), rng) == 1
    assert next_token(np.zeros(4, np.float32), sampling(temperature=0.0), rng) == 0


def test_tokens_come_with_their_probability_by_temperature_top_p_and_top_k() -> None:
    flat = np.sqrt([0.1, 0.5, 0.15, 0.25])
    np.testing.assert_allclose(frequencies(), [0.1, 0.5, 0.15, 0.25], atol=0.03)
    np.testing.assert_allclose(frequencies(temperature=2.0), flat / flat.sum(), atol=0.03)
    np.testing.assert_allclose(frequencies(top_p=0.7), [0, 2 / 3, 0, 1 / 3], atol=0.03)
    np.testing.assert_allclose(frequencies(draws=200, top_p=0.4), [0, 1, 0, 0])
    np.testing.assert_allclose(frequencies(top_k=2), [0, 2 / 3, 0, 1 / 3], atol=0.03)
    np.testing.assert_allclose(frequencies(top_k=9), [0.1, 0.5, 0.15, 0.25], atol=0.03)
    np.testing.assert_allclose(frequencies(draws=200, top_k=2, top_p=0.6), [0, 1, 0, 0])


def test_what_was_just_written_is_less_likely() -> None:
    penalized = sampling(temperature=0.0, repeat_penalty=2.0)

    def chosen(logits: list[float], *written: int) -> int:
        return next_token(np.array(logits, np.float32), penalized, np.random.default_rng(0), written)

    assert chosen([-1.0, 2.0, 1.5, -1.5]) == 1
    assert chosen([-1.0, 2.0, 1.5, -1.5], 1) == 2
    # Each token is penalized once, which leaves the logits 1 and 0.75.
    assert chosen([-1.0, 2.0, 1.5, -1.5], 1, 2, 2) == 1
    assert chosen([-1.0, 2.0, 1.5, -1.5], 1, *[0] * 64) == 1  # token 1 was written too long ago
    assert chosen([-1.0, -1.5, -9.0, -9.0], 0) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"max_new_tokens": 0},
        *({"temperature": bad} for bad in (-0.1, np.nan, np.inf)),
        *({"top_p": bad} for bad in (0.0, 1.1, np.nan)),
        {"top_k": -1},
        *({"repeat_penalty": bad} for bad in (0.0, -1.0, np.nan, np.inf)),
        *({"seed": bad} for bad in (-1, 1 << 64)),
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="must be"):
        sampling(**changes)


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_refused(broken: float) -> None:
    logits = LOGITS.copy()
    logits[2] = broken
    with pytest.raises(InputError, match="finite"):
        next_token(logits, sampling(), np.random.default_rng(0))

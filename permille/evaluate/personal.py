"""Is it personal? A person's untouched text under the base, their own state, a pooled one and a stranger's.

    domain gain    = loss(base)   - loss(pooled)       what text of the same kind brings
    personal gain  = loss(pooled) - loss(own)          what only the person's own text brings
    swap           = loss(swapped) - loss(own)         a stranger's state on the same text

The pooled state learned equally much text, of other people of the collection. People are the unit: tests are
Wilcoxon's signed-rank test on differences within a person, with Holm's correction over all that are reported
together. The share of people who are worse off stands beside every mean.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from permille.errors import InputError
from permille.evaluate.statistics import UserTest, holm, user_test

Json = dict[str, Any]


class State(StrEnum):
    """Whose log the sparse values come from."""

    BASE = "base"
    OWN = "own"
    POOLED = "pooled"
    SWAPPED = "swapped"


COMPARISONS = (
    (State.OWN, State.BASE),
    (State.POOLED, State.BASE),
    (State.OWN, State.POOLED),
    (State.OWN, State.SWAPPED),
    (State.SWAPPED, State.BASE),
)
"""Which state is compared to which; a gain is the second's loss less the first's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PersonalOutcome:
    """One person's test text under four states.

    Attributes:
        nats: sum of the losses of all test tokens.
        tokens, bytes: of the test text.
        train_tokens, pooled_tokens: what the own and the pooled state learned from.
    """

    user: str
    nats: Mapping[State, float]
    tokens: int
    bytes: int
    train_tokens: int
    pooled_tokens: int

    @classmethod
    def of(cls, record: Json) -> "PersonalOutcome":
        """From a record of plain numbers.

        Raises:
            InputError: a state is missing or its loss no number of at least 0; or there is no text.
        """
        try:
            found = cls(
                user=str(record["user"]),
                nats={state: float(record["nats"][state.value]) for state in State},
                tokens=int(record["tokens"]),
                bytes=int(record["bytes"]),
                train_tokens=int(record["train_tokens"]),
                pooled_tokens=int(record["pooled_tokens"]),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as exc:
            raise InputError(f"expected the outcome of a person under four states, got {exc!r}") from exc
        losses = found.nats.values()
        counts = (found.tokens, found.bytes, found.train_tokens, found.pooled_tokens)
        if not (all(map(math.isfinite, losses)) and min(losses) >= 0 and min(counts) > 0):
            raise InputError(
                f"expected finite losses of at least 0 and some text of {found.user!r}, got others"
            )
        return found

    def loss(self, state: State) -> float:
        """Nats a token."""
        return self.nats[state] / self.tokens

    def perplexity(self, state: State) -> float:
        """Of a token."""
        return math.exp(self.loss(state))

    def bits_per_byte(self, state: State) -> float:
        """Comparable between tokenizers."""
        return self.nats[state] / math.log(2) / self.bytes


def personal_tests(groups: Mapping[str, Sequence[PersonalOutcome]]) -> dict[str, list[UserTest]]:
    """All comparisons of all groups of people (model and collection), corrected together.

    Raises:
        InputError: a group of fewer than two people, or a person twice in one.
    """
    tests = []
    for outcomes in groups.values():
        if len({outcome.user for outcome in outcomes}) < len(outcomes):
            raise InputError("expected each person once in a group, got one twice")
        for first, second in COMPARISONS:
            losses = [np.array([outcome.loss(state) for outcome in outcomes]) for state in (first, second)]
            tests.append(user_test(f"{first.value} against {second.value}", losses[0], losses[1]))
    corrected = iter(holm(tests))
    return {group: [next(corrected) for _ in COMPARISONS] for group in groups}


def markdown(groups: Mapping[str, Sequence[PersonalOutcome]]) -> str:
    """The comparisons of each group, then its people one by one."""
    tests = personal_tests(groups)
    return "\n".join(
        line for group, outcomes in groups.items() for line in _section(group, outcomes, tests[group])
    )


def _section(group: str, outcomes: Sequence[PersonalOutcome], tests: Sequence[UserTest]) -> list[str]:
    lines = [
        f"## {group}: {len(outcomes)} people",
        "",
        "| state | mean loss, nats a token | perplexity (of the mean) | mean bits per byte |",
        "|---|---|---|---|",
    ]
    for state in State:
        loss = float(np.mean([outcome.loss(state) for outcome in outcomes]))
        bits = float(np.mean([outcome.bits_per_byte(state) for outcome in outcomes]))
        lines.append(f"| {state.value} | {loss:.4f} | {math.exp(loss):.2f} | {bits:.4f} |")
    lines += [
        "",
        "| comparison | mean gain, nats a token | interval (95 %) | median gain | people worse off "
        "| p (Wilcoxon, Holm) |",
        "|---|---|---|---|---|---|",
        *(
            f"| {test.name} | {test.gain:+.4f} | {test.interval[0]:+.3f} to {test.interval[1]:+.3f} "
            f"| {test.median:+.4f} | {100 * test.worsened:.0f} % | {test.p_value:.3g} |"
            for test in tests
        ),
        "",
        "| person | tokens: own, pooled, test | perplexity: base, own, pooled, swapped "
        "| bits per byte: base, own, pooled, swapped |",
        "|---|---|---|---|",
    ]
    for outcome in outcomes:
        perplexities = " ".join(f"{outcome.perplexity(state):.2f}" for state in State)
        bits_per_byte = " ".join(f"{outcome.bits_per_byte(state):.3f}" for state in State)
        sizes = f"{outcome.train_tokens} {outcome.pooled_tokens} {outcome.tokens}"
        lines.append(f"| {outcome.user} | {sizes} | {perplexities} | {bits_per_byte} |")
    return [*lines, ""]

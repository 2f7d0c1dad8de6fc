"""Is it personal? A person's untouched text under the base, their own state, a pooled one and a stranger's.

    domain gain    = loss(base)   - loss(pooled)       what text of the same kind brings
    personal gain  = loss(pooled) - loss(own)          what only the person's own text brings
    swap           = loss(swapped) - loss(own)         a stranger's state on the same text
    head start     = loss(own) - loss(pooled-own)      what the own text brings on top of a pooled state

The pooled state learned equally much text, of other people of the collection. People are the unit: tests are
Wilcoxon's signed-rank test on differences within a person, with Holm's correction over all that are reported
together. The share of people who are worse off stands beside every mean.

A head start trains twice as many steps; `own-own`, the own state trained on as long, tells how much of it
that is.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from permille.errors import InputError
from permille_lab.evaluate.statistics import UserTest, holm, user_test

Json = dict[str, Any]


class State(StrEnum):
    """Whose log the sparse values come from."""

    BASE = "base"
    OWN = "own"
    POOLED = "pooled"
    SWAPPED = "swapped"
    POOLED_OWN = "pooled-own"
    OWN_OWN = "own-own"


FURTHER = (State.POOLED_OWN, State.OWN_OWN)
"""Trained on from another state. People who have none of them are compared by the four others."""

FEWEST = 6
"""People of a group that is tested: of five, Wilcoxon's test has no p below 0.05."""

COMPARISONS = (
    (State.OWN, State.BASE),
    (State.POOLED, State.BASE),
    (State.OWN, State.POOLED),
    (State.OWN, State.SWAPPED),
    (State.SWAPPED, State.BASE),
    (State.POOLED_OWN, State.OWN),
    (State.OWN_OWN, State.OWN),
    (State.POOLED_OWN, State.OWN_OWN),
    (State.POOLED_OWN, State.POOLED),
)
"""Which state is compared to which; a gain is the second's loss less the first's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PersonalOutcome:
    """One person's test text under four states, or all six.

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
                nats={
                    state: float(record["nats"][state.value])
                    for state in State
                    if state not in FURTHER or state.value in record["nats"]
                },
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
    """All comparisons of all groups of people (model and collection), corrected together. A comparison is of
    the people who have both states; of fewer than `FEWEST` there is none.

    Raises:
        InputError: a person twice in a group.
    """
    found: dict[str, list[UserTest]] = {}
    for group, outcomes in groups.items():
        if len({outcome.user for outcome in outcomes}) < len(outcomes):
            raise InputError("expected each person once in a group, got one twice")
        found[group] = []
        for first, second in COMPARISONS:
            both = [outcome for outcome in outcomes if {first, second} <= outcome.nats.keys()]
            if len(both) < FEWEST:
                continue
            name = f"{first.value} against {second.value}"
            if len(both) < len(outcomes):
                name += f" ({len(both)} people)"
            losses = [np.array([outcome.loss(state) for outcome in both]) for state in (first, second)]
            found[group].append(user_test(name, *losses))
    corrected = iter(holm([test for tests in found.values() for test in tests]))
    return {group: [next(corrected) for _ in tests] for group, tests in found.items()}


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
    states = [state for state in State if any(state in outcome.nats for outcome in outcomes)]
    for state in states:
        have = [outcome for outcome in outcomes if state in outcome.nats]
        loss = float(np.mean([outcome.loss(state) for outcome in have]))
        bits = float(np.mean([outcome.bits_per_byte(state) for outcome in have]))
        of = "" if len(have) == len(outcomes) else f" ({len(have)} people)"
        lines.append(f"| {state.value}{of} | {loss:.4f} | {math.exp(loss):.2f} | {bits:.4f} |")
    lines += _compared(tests)
    lines += [
        f"| person | tokens: own, pooled, test | perplexity: {', '.join(states)} "
        f"| bits per byte: {', '.join(states)} |",
        "|---|---|---|---|",
    ]
    for outcome in outcomes:
        known = outcome.nats.keys()
        perplexities = " ".join(f"{outcome.perplexity(s):.2f}" if s in known else "-" for s in states)
        bits_per_byte = " ".join(f"{outcome.bits_per_byte(s):.3f}" if s in known else "-" for s in states)
        sizes = f"{outcome.train_tokens} {outcome.pooled_tokens} {outcome.tokens}"
        lines.append(f"| {outcome.user} | {sizes} | {perplexities} | {bits_per_byte} |")
    return [*lines, ""]


def _compared(tests: Sequence[UserTest]) -> list[str]:
    if not tests:
        return ["", f"Fewer than {FEWEST} people: nothing is tested.", ""]
    return [
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
    ]

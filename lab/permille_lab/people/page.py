"""Is it personal? A person's untouched text under the base, their own state, a pooled one and a stranger's.

    domain gain    = loss(base)   - loss(pooled)       what text of the same kind brings
    personal gain  = loss(pooled) - loss(own)          what only the person's own text brings
    swap           = loss(swapped) - loss(own)         a stranger's state on the same text
    head start     = loss(own) - loss(pooled-own)      what the own text brings on top of a pooled state

The pooled state learned equally much text, of other people of the collection. People are the unit: tests are
Wilcoxon's signed-rank test on differences within a person, with Holm's correction over all that are reported
together. A head start trains twice as many steps; `own-own`, the own state trained on as long, tells how much
of it that is.
"""

from enum import StrEnum
from pathlib import Path

import pandas as pd

from permille_lab.evaluate.statistics import UserTest, holm, user_test
from permille_lab.measuring.cells import Cells


class State(StrEnum):
    """Whose log the sparse values come from."""

    BASE = "base"
    OWN = "own"
    POOLED = "pooled"
    SWAPPED = "swapped"
    POOLED_OWN = "pooled-own"
    OWN_OWN = "own-own"


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


def tables(results: Path) -> dict[str, str]:
    """By the name that the template has for them."""
    losses = losses_of(Cells(results / "users.jsonl"))
    return {
        "gains": _markdown(pd.DataFrame(_gain(group, test) for group, test in personal_tests(losses))),
        "speakers": _markdown(_speakers(Cells(results / "personalisation.jsonl"))),
    }


def losses_of(cells: Cells) -> pd.DataFrame:
    """A row for each person and a column for each state: nats a token of the test text, by `group`.

    A group is people of one model, collection and package, trained alike.
    """
    rows = [
        {"group": f"{settings['model']}, {settings['collection']}", "user": person["user"]}
        | {state: nats / person["tokens"] for state, nats in person["nats"].items()}
        for settings, result in cells.of("users")
        for person in result["people"]
    ]
    return pd.DataFrame(rows, columns=["group", "user", *(state.value for state in State)])


def personal_tests(losses: pd.DataFrame) -> list[tuple[str, UserTest]]:
    """All comparisons of all groups of people, corrected together.

    A comparison is of the people who have both states; of fewer than `FEWEST` there is none.
    """
    found = []
    for group, people in losses.groupby("group", sort=False):
        for first, second in COMPARISONS:
            both = people.dropna(subset=[first.value, second.value])
            if len(both) >= FEWEST:
                name = f"{first.value} against {second.value}"
                found.append(
                    (str(group), user_test(name, both[first.value].to_numpy(), both[second.value].to_numpy()))
                )
    corrected = holm([test for _, test in found])
    return [(group, test) for (group, _), test in zip(found, corrected, strict=True)]


def _gain(group: str, test: UserTest) -> dict[str, str]:
    return {
        "people": f"{group}: {test.users}",
        "comparison": test.name,
        "mean gain": f"{test.gain:+.3f}",
        "95 %": f"{test.interval[0]:+.3f} to {test.interval[1]:+.3f}",
        "median": f"{test.median:+.3f}",
        "worse off": f"{100 * test.worsened:.0f} %",
        "p": f"{test.p_value:.2g}",
    }


def _speakers(cells: Cells) -> pd.DataFrame:
    """Runs of the whole agent: what a model gains, mean and range over people and seeds."""
    rows = [{**settings, **result, "swapped": result["swap"]["improvement"]}
            for settings, result in cells.of("personalisation")]  # fmt: skip
    found = []
    for model, runs in pd.DataFrame(rows).groupby("model", sort=False):
        falls, sure = runs["improvement"], runs["improvement"] / runs["standard_error"]
        found.append(
            {
                "model": model,
                "runs": len(runs),
                "base": f"{runs['loss_base'].mean():.3f}",
                "fall": f"{falls.mean():.3f} ({falls.min():.3f} to {falls.max():.3f})",
                "least, in standard errors": f"{sure.min():.1f}",
                "the same state on another speaker's text": f"{runs['swapped'].mean():.3f}",
            }
        )
    return pd.DataFrame(found)


def _markdown(frame: pd.DataFrame) -> str:
    return str(frame.to_markdown(index=False, disable_numparse=True))

"""Tables of docs/results/people.md: losses of people's held-out text under the base and trained states.

    domain gain    = loss(base)   - loss(pooled)       gain by text of the same kind
    personal gain  = loss(pooled) - loss(own)          gain by the person's own text

The pooled state was trained on the same amount of text of other people. The unit is a person, with the mean
over the seeds. Tests are Wilcoxon's signed-rank tests of differences within a person. Holm's correction
covers all tests that are reported together.
"""

from enum import StrEnum
from pathlib import Path

import pandas as pd

from permille_lab.evaluate.statistics import UserTest, holm, user_test
from permille_lab.measuring.cells import Cells
from permille_lab.measuring.tables import markdown


class State(StrEnum):
    """A state of the sparse values."""

    BASE = "base"
    OWN = "own"
    FORWARD = "forward-only"
    POOLED = "pooled"


WORTH = 0.05
"""Nats per token. The table counts runs that kept the base although the own state was better by more."""

FEWEST = 6
"""Least number of people of a tested group. With five people, Wilcoxon's p-value is never below 0.05."""

COMPARISONS = (
    (State.OWN, State.BASE),
    (State.FORWARD, State.BASE),
    (State.POOLED, State.BASE),
    (State.OWN, State.FORWARD),
    (State.OWN, State.POOLED),
)
"""Compared states. A gain is the loss of the second minus that of the first."""


def tables(results: Path) -> dict[str, str]:
    """Return the tables by their names in the template."""
    cells = Cells(results / "people.jsonl")
    losses = losses_of(cells)
    gains = (_gain(group, test) for group, test in personal_tests(people_of(losses)))
    return {"gains": markdown(gains), "counts": markdown(_counts(cells, losses))}


def losses_of(cells: Cells) -> pd.DataFrame:
    """Return the held-out losses in nats per token. Each run is a row, and each state a column."""
    rows = [
        {"group": settings["model"], "user": result["user"], "adopted": result["adopted"]}
        | {state: nats / result["tokens"] for state, nats in result["nats"].items()}
        for settings, result in cells.of("people")
    ]
    return pd.DataFrame(rows, columns=["group", "user", "adopted", *(state.value for state in State)])


def people_of(losses: pd.DataFrame) -> pd.DataFrame:
    """Return each person's losses, averaged over the seeds."""
    states = [state.value for state in State]
    return losses.groupby(["group", "user"], sort=False)[states].mean().reset_index()


def personal_tests(losses: pd.DataFrame) -> list[tuple[str, UserTest]]:
    """Return the tests of all groups of people, with Holm's correction over all of them.

    A group of fewer than `FEWEST` people is not tested.
    """
    found = []
    for group, people in losses.groupby("group", sort=False):
        for first, second in COMPARISONS if len(people) >= FEWEST else ():
            name = f"{first.value} against {second.value}"
            test = user_test(name, people[first.value].to_numpy(), people[second.value].to_numpy())
            found.append((str(group), test))
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


def _counts(cells: Cells, losses: pd.DataFrame) -> pd.DataFrame:
    """Return counts of the agent's runs: adopted, kept, and above the base, and the same of forward-only."""
    rows = []
    seconds = pd.DataFrame([result["seconds"] for _, result in cells.of("people")])
    for group, runs in losses.groupby("group", sort=False):
        gain = runs[State.BASE.value] - runs[State.OWN.value]
        forward = runs[State.BASE.value] - runs[State.FORWARD.value]
        spent = seconds.loc[runs.index].mean()
        rows.append(
            {
                "model": group,
                "runs": len(runs),
                "own state above the base": int((gain < 0).sum()),
                "forward-only above it": int((forward < 0).sum()),
                "adopted": int(runs["adopted"].sum()),
                "adopted and worse": int((runs["adopted"] & (gain < 0)).sum()),
                f"kept the base, {WORTH} lower": int((~runs["adopted"].astype(bool) & (gain > WORTH)).sum()),
                "gain, forward-only's being 1": f"{gain.mean() / forward.mean():.1f}",
                "seconds, forward-only's": f"{spent['own']:.1f}, {spent['forward']:.1f}",
            }
        )
    return pd.DataFrame(rows)

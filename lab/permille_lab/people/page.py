"""Tables of people's losses: a person's untouched text under the base, their own state, and others.

    domain gain    = loss(base)   - loss(pooled)       what text of the same kind brings
    personal gain  = loss(pooled) - loss(own)          what only the person's own text brings

The pooled state learned as much text, of other people. People are the unit. Tests are Wilcoxon's signed-rank
test on differences within a person, from means over the seeds. Holm's correction covers all tests that are
reported together.
"""

from enum import StrEnum
from pathlib import Path

import pandas as pd

from permille_lab.evaluate.statistics import UserTest, holm, user_test
from permille_lab.measuring.cells import Cells
from permille_lab.measuring.tables import markdown


class State(StrEnum):
    """The origin of the sparse values."""

    BASE = "base"
    OWN = "own"
    FORWARD = "forward-only"
    POOLED = "pooled"


WORTH = 0.05
"""Nats a token: whoever keeps the base though the own state is so much lower has kept it wrongly."""

FEWEST = 6
"""People of a group that is tested: of five, Wilcoxon's test has no p below 0.05."""

COMPARISONS = (
    (State.OWN, State.BASE),
    (State.FORWARD, State.BASE),
    (State.POOLED, State.BASE),
    (State.OWN, State.FORWARD),
    (State.OWN, State.POOLED),
)
"""Which state is compared to which; a gain is the second's loss less the first's."""


def tables(results: Path) -> dict[str, str]:
    """Return the tables by the names that the template has for them."""
    cells = Cells(results / "people.jsonl")
    losses = losses_of(cells)
    gains = (_gain(group, test) for group, test in personal_tests(people_of(losses)))
    return {"gains": markdown(gains), "counts": markdown(_counts(cells, losses))}


def losses_of(cells: Cells) -> pd.DataFrame:
    """Return nats per token of the text that was put away, by `group`: runs in rows, states in columns."""
    rows = [
        {"group": settings["model"], "user": result["user"], "adopted": result["adopted"]}
        | {state: nats / result["tokens"] for state, nats in result["nats"].items()}
        for settings, result in cells.of("people")
    ]
    return pd.DataFrame(rows, columns=["group", "user", "adopted", *(state.value for state in State)])


def people_of(losses: pd.DataFrame) -> pd.DataFrame:
    """Return the mean of each person's seeds."""
    states = [state.value for state in State]
    return losses.groupby(["group", "user"], sort=False)[states].mean().reset_index()


def personal_tests(losses: pd.DataFrame) -> list[tuple[str, UserTest]]:
    """Compare all groups of people, corrected together.

    A group of fewer than `FEWEST` people has no test.
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
    """Count runs of the agent: kept and adopted, ends above the base, and forward-only runs beside."""
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

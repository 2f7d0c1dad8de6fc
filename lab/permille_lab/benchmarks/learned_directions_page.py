"""The page of `permille_lab.benchmarks.learned_directions`: tables from its rows, each loss at its own best step size."""

from typing import Any

_STEPS = (0, 10, 25, 50, 100, 200, 400)


def page(document: dict[str, Any]) -> str:
    """Markdown of all that there is."""
    lines = [
        "# Learned directions",
        "",
        "Made by `python -m permille_lab.benchmarks.learned_directions`, whose description says what each setting is;",
        "every run is in `learned_directions.json`. What follows from it is in ADR 0110. Loss in nats per",
        "token on the user's test rows, in brackets the length of a first step that was best by then.",
        "",
        "## Share of a user's mean gradient that lies in a basis",
        "",
        "Of the squared length, for 1, 16, 32 and 64 columns; whitened as the basis is. Random: 32 / k.",
        "",
        "| model | user | random | C4 | Shakespeare, others | tweets, others |",
        "|---|---|---|---|---|---|",
    ]
    for row in document["shares"]:
        cells = [
            " ".join(f"{share:.2f}" for share in row["shares"][source]["whitened"])
            for source in ("c4", "shakespeare", "tweets")
        ]
        lines.append(f"| {row['model']} | {row['user']} | {32 / row['k']:.3f} | {' | '.join(cells)} |")
    for model, user, steps in _groups(document["runs"]):
        runs = [r for r in document["runs"] if (r["model"], r["user"], r["steps"]) == (model, user, steps)]
        lines += ["", f"## {model}, {user}, {steps} steps", "", f"k = {runs[0]['k']}.", ""]
        lines += _table(runs, [step for step in _STEPS if step <= steps])
    return "\n".join(lines) + "\n"


def _groups(runs: list[dict[str, Any]]) -> list[tuple[str, str, int]]:
    """Model, user and number of steps, each once; the shorter runs where there are no longer ones."""
    longest: dict[tuple[str, str], int] = {}
    for run in runs:
        key = (run["model"], run["user"])
        longest[key] = max(longest.get(key, 0), run["steps"])
    return [(model, user, steps) for (model, user), steps in longest.items()]


def _table(runs: list[dict[str, Any]], steps: list[int]) -> list[str]:
    """Test loss after so many steps, each at the step length that was best on the select rows then."""
    lines = [
        "| setting | trials | " + " | ".join(str(step) for step in steps) + " |",
        "|---|---|" + "---|" * len(steps),
    ]
    for setting in dict.fromkeys(run["setting"] for run in runs):
        own = [run for run in runs if run["setting"] == setting]
        cells = [_best(own, step) for step in steps]
        lines.append(f"| {setting} | {len(own)} | {' | '.join(cells)} |")
    return lines


def _best(runs: list[dict[str, Any]], step: int) -> str:
    found = [
        (select, test, run["length"])
        for run in runs
        for at, select, test in run["losses"]
        if at == step and select is not None and test is not None
    ]
    if not found:
        return "-"
    _, test, length = min(found)
    return f"{test:.3f} ({length})" if step else f"{test:.3f}"

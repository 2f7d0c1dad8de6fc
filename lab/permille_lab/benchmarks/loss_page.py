"""The page of time to held-out losses: against MeZO, and against first-order training."""

from collections.abc import Mapping
from typing import Any

from permille_lab.benchmarks.cells import Cells, Result, Settings
from permille_lab.benchmarks.trajectories import BATCH_ROWS, lowest, seconds_to

MEZO, FIRST_ORDER = "time to loss", "first order, evaluated often"
"""Figures of the cells."""
FRACTIONS = (0.5, 0.75, 0.95)
PLAIN = "plain MeZO"
LINEAR = "MeZO, linear weights"
_TRIAL = "trial"
_OF_A_STEP = ("estimator", "queries", "batch_rows")
INT8, LEARNED = "permille, light-int8", "permille, learned directions"
OURS = ("permille", INT8, LEARNED)
_TARGETS = (("MeZO", "0.2"), (PLAIN, "0.1"), (LINEAR, ""), *((name, "") for name in OURS))


Group = tuple[Any, ...]
"""Model, speaker, seed and threads: what is measured side by side."""


def page(cells: Cells, pictures: Mapping[str, str] | None = None) -> str:
    """Markdown of what was measured.

    Args:
        pictures: captions by file.
    """
    shown = [
        line
        for file, caption in (pictures or {}).items()
        for line in (f"![{caption}]({file})", "", f"{caption}.", "")
    ]
    return "\n".join([_HEAD, *shown, *_mezo_tables(cells), *_first_order_tables(cells)])


def mezo_runs(cells: Cells) -> dict[Group, dict[str, Result]]:
    """By group and contender: the run that races, as it was measured."""
    return {
        group: {what: result for what, (_, result) in found.items()}
        for group, found in _mezo_groups(cells)[0].items()
    }


def first_order_runs(cells: Cells) -> dict[Group, dict[str, Result]]:
    """By group and method, with the search of each."""
    groups: dict[Group, dict[str, Result]] = {}
    tuning: dict[Group, float] = {}
    for settings, result in cells.of(FIRST_ORDER):
        key = _group(settings)
        if settings["what"] == _TRIAL:
            of = (*key, settings["method"])
            tuning[of] = tuning.get(of, 0.0) + result["points"][-1]["cpu_s"]
        else:
            groups.setdefault(key, {})[settings["method"]] = result
    for key, methods in groups.items():
        for method, result in methods.items():
            spent = tuning.get((*key, method))
            methods[method] = result if spent is None else result | {"search_cpu_s": spent}
    return groups


_HEAD = """# Time to a held-out loss

`python -m permille_lab.benchmarks.time_to_loss` and `python -m permille_lab.benchmarks.first_order` made this page; all evaluations
are in `time_to_loss.json`. One speaker of Shakespeare's plays is the user; held-out is the select split.
MeZO's learning rate was chosen on it; that of first order on another division of the text. Seconds are the
processor's, of one thread, evaluations not counted: what a clock shows on a core at rest. In brackets with
what finding the step size took: our own search, the trials of the others.
"""


def _group(settings: Settings) -> Group:
    return tuple(settings[name] for name in ("model", "speaker", "seed", "threads"))


def _mezo_groups(
    cells: Cells,
) -> tuple[
    dict[Group, dict[str, tuple[Settings, Result]]],
    dict[Group, list[tuple[Settings, Result]]],
    dict[tuple[Group, str], dict[int, list[float]]],
]:
    """The runs that race, others of the same contenders, and seconds of trials by their length."""
    groups: dict[Group, dict[str, tuple[Settings, Result]]] = {}
    longer: dict[Group, list[tuple[Settings, Result]]] = {}
    tuning: dict[tuple[Group, str], dict[int, list[float]]] = {}
    for settings, result in cells.of(MEZO):
        key = _group(settings)
        if settings["what"] in (_TRIAL, f"{_TRIAL} of {LINEAR}"):
            of = key, settings["what"]
            tuning.setdefault(of, {}).setdefault(settings["steps"], []).append(result["points"][-1]["cpu_s"])
        else:
            found = groups.setdefault(key, {})
            runs = [(settings, result), *filter(None, [found.get(settings["what"])])]
            # Of runs with different numbers of steps the lowest races; the others have a row of their own.
            runs.sort(key=lambda run: float(lowest(run[1]["points"])["loss"]))
            found[settings["what"]] = runs[0]
            longer.setdefault(key, []).extend(runs[1:])
    return groups, longer, tuning


def _mezo_tables(cells: Cells) -> list[str]:
    groups, longer, tuning = _mezo_groups(cells)
    lines: list[str] = []
    for key, found in groups.items():
        found = _by_pace(found)
        model, speaker, seed, threads = key
        lines += [
            f"## {model}, {speaker}, seed {seed}, {threads} threads: against MeZO on all weights",
            "",
            "| method | steps | base | lowest loss | after "
            + "".join(f"| {name} is there after | of theirs " for name in OURS)
            + "| target |",
            "|---" * (6 + 2 * len(OURS)) + "|",
        ]
        rows = [(what, target, found[what]) for what, target in _TARGETS if what in found]
        rows += [(run[0]["what"], "", run) for run in longer.get(key, []) if run[0]["what"] in OURS]
        for what, target, (settings, result) in rows:
            best = lowest(result["points"])
            trial = f"{_TRIAL} of {LINEAR}" if what == LINEAR else _TRIAL
            # Trials of another length are of another, unfinished grid.
            grids = sorted(tuning.get((key, trial), {}).values(), key=len)
            tried = sum(grids[-1]) if grids else 0.0
            spent = result["search_cpu_s"] if what in OURS else tried
            races = " | ".join([""] * 2 * len(OURS)) if what in OURS else _races(found, best)
            after = f"{best['cpu_s']:.1f} ({best['cpu_s'] + spent:.1f}) s"
            lines.append(
                f"| {what} | {settings['steps']} | {result['points'][0]['loss']:.4f} | {best['loss']:.4f} "
                f"| {after} | {races} | {target} |"
            )
        lines += ["", *_when_theirs(found), ""]
    return lines


def _when_theirs(found: dict[str, tuple[Settings, Result]]) -> list[str]:
    """When MeZO is as low as each of our runs ends."""
    lines = []
    for name in OURS:
        if name not in found:
            continue
        best = lowest(found[name][1]["points"])
        others = [
            f"{other} {_reached(_there(found[other][1], best['loss']))}"
            for other in ("MeZO", PLAIN, LINEAR)
            if other in found
        ]
        lines.append(f"- As low as {name} after {best['cpu_s']:.1f} s: {', '.join(others)}.")
    return lines


def _by_pace(found: dict[str, tuple[Settings, Result]]) -> dict[str, tuple[Settings, Result]]:
    """Plain MeZO of fewer steps than MeZO becomes MeZO's losses at plain MeZO's seconds a step."""
    if not {"MeZO", PLAIN} <= found.keys() or found[PLAIN][0]["steps"] >= found["MeZO"][0]["steps"]:
        return found
    settings, result = found[PLAIN]
    last = result["points"][-1]
    points = [
        point | {name: point["step"] * last[name] / last["step"] for name in ("wall_s", "cpu_s")}
        for point in found["MeZO"][1]["points"]
    ]
    steps = f"{found['MeZO'][0]['steps']}, losses of MeZO at the pace of {last['step']} steps"
    return found | {PLAIN: (settings | {"steps": steps}, result | {"points": points})}


def _first_order_tables(cells: Cells) -> list[str]:
    lines: list[str] = []
    for (model, speaker, seed, threads), found in first_order_runs(cells).items():
        reference = found.get("permille")
        if reference is None:
            continue
        estimator, queries, rows = (reference["options"][name] for name in _OF_A_STEP)
        base = reference["points"][0]["loss"]
        fall = base - lowest(reference["points"])["loss"]
        targets = [base - fraction * fall for fraction in FRACTIONS]
        named = " | ".join(f"to {target:.4f}" for target in targets)
        lines += [
            f"## {model}, {speaker}, seed {seed}, {threads} threads: against first-order training",
            "",
            f"The losses are a half, three quarters and 95 % of our fall from {base:.4f}. First order is",
            "evaluated after every step, ours after steps that grow by a fifth. A step of first order is",
            f"{BATCH_ROWS} rows forward and back, one of ours {queries} queries of {rows} rows forward,",
            f"{estimator}. Memory: peak of the process, and what of it no file backs.",
            "",
            f"| method | {named} | peak MB | anonymous MB | lowest loss |",
            "|---|---|---|---|---|---|---|",
        ]
        for method, result in found.items():
            times = " | ".join(_steps_and_time(result, target) for target in targets)
            lines.append(
                f"| {method} | {times} | {result['peak_bytes'] / 1e6:.0f} "
                f"| {result['anonymous_peak_bytes'] / 1e6:.0f} | {lowest(result['points'])['loss']:.4f} |"
            )
        lines.append("")
    return lines


def _steps_and_time(result: Result, loss: float) -> str:
    """Steps over all attempts, and seconds."""
    there = _there(result, loss)
    if there is None:
        return "not reached"
    steps, before = 0, None
    for point in result["points"]:
        if before is not None and point.get("attempt", 0) != before.get("attempt", 0):
            steps += before["step"]
        if point["loss"] <= loss:
            return f"{steps + point['step']} steps, {_reached(there)}"
        before = point
    raise AssertionError("it is there")


def _races(found: dict[str, tuple[Settings, Result]], best: dict[str, Any]) -> str:
    """When each of our runs is as low, and that as a share of their time."""
    columns = []
    for name in OURS:
        there = _there(found[name][1], best["loss"]) if name in found else None
        share = "" if there is None else f"{there[0] / max(best['cpu_s'], 1e-9):.3f}"
        columns += [_reached(there) if name in found else "", share]
    return " | ".join(columns)


def _there(result: Result, loss: float) -> tuple[float, float] | None:
    """Seconds to a loss, without and with the search."""
    seconds = seconds_to(result["points"], loss)
    return None if seconds is None else (seconds, seconds + result.get("search_cpu_s", 0.0))


def _reached(seconds: tuple[float, float] | None) -> str:
    if seconds is None:
        return "not reached"
    whole = f" ({seconds[1]:.1f})" if seconds[1] > seconds[0] else ""
    return f"{seconds[0]:.1f}{whole} s"

"""Tables of the evidence's page, in Markdown."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from permille_lab.benchmarks.evidence_plan import (
    DENSITY,
    DYNAMIC,
    RANK_16,
    REAL_PREFIX,
    REFERENCES,
    SEGMENTS,
    STATIC,
    WITHOUT_MASK,
)
from permille_lab.benchmarks.evidence_records import Progress
from permille_lab.evaluate.claims import MIN_SEEDS, Row, Verdict, counted_tasks, overall
from permille_lab.evaluate.outcomes import Json
from permille_lab.evaluate.paper_claims import CLAIMS, Relation
from permille_lab.evaluate.prompts import Task
from permille_lab.evaluate.report import loss_and_bits
from permille_lab.evaluate.statistics import average_ranks

_UNTRAINED = tuple(name for name in REFERENCES if not name.startswith("fo:"))
_ORDER = (*_UNTRAINED, *STATIC, SEGMENTS, *DYNAMIC, *WITHOUT_MASK, *REAL_PREFIX, *RANK_16, *REFERENCES)
"""Of a table's lines: untrained, sensitive and other masks, other sets, first order."""

_Rows = Mapping[tuple[str, str], Mapping[str, list[Json]]]
"""Records by base and method, by task."""


def verdict_table(rows: Sequence[Row], unfinished: Collection[str]) -> list[str]:
    """One line a comparison, people's text first; the claim's verdict over all of them in its first one.

    Args:
        unfinished: keys of claims that wait for planned cells: one that holds does so far.
    """
    lines = [
        "| claim | over all rows | model, density | comparison | effect | interval | texts, seeds | p | |",
        "|---" * 9 + "|",
    ]
    for claim in CLAIMS:
        own = sorted((row for row in rows if row.claim == claim), key=lambda row: not _is_text(row))
        for number, row in enumerate(own):
            verdict = overall(own)
            so_far = " so far" if verdict is Verdict.HOLDS and claim.key in unfinished else ""
            head = f"{claim.sentence} | **{verdict}**{so_far}" if number == 0 else " | "
            lines.append(f"| {head} | {_row(row)} |")
    return lines


def short_table(rows: Sequence[Row]) -> list[str]:
    """One line a claim, two columns a model: what people's text says and what other tasks say."""
    found = [row for row in rows if row.found is not None]
    models = list(dict.fromkeys(row.model for row in found))
    heads = [f"{model}, {kind}" for model in models for kind in ("text", "tasks")]
    lines = [f"| claim | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for claim in CLAIMS:
        cells = [
            "; ".join(
                _short(row)
                for row in found
                if (row.claim, row.model, _is_text(row)) == (claim, model, kind == "text")
            )
            for model in models
            for kind in ("text", "tasks")
        ]
        lines.append(f"| {claim.sentence} | {' | '.join(cells)} |")
    return lines if found else ["Nothing has been compared yet."]


def budget_table(records: Sequence[Json]) -> list[str]:
    """How much was trained: a line for each model, task and budget."""
    rows: dict[tuple[object, ...], list[Json]] = {}
    for record in sorted(records, key=lambda record: (record["model"], record["task"] != Task.TEXT)):
        keys = ("model", "task", "zo_steps", "fo_steps", "queries", "batch_size", "max_tokens")
        sizes = (record["examples"][part] for part in ("train", "validation", "test"))
        rows.setdefault((*(record[key] for key in keys), *sizes), []).append(record)
    lines = [
        "| model, task | stages | steps by zeroth order | by first | queries a step | rows a step "
        "| tokens a row, at most | examples: train | validation | test | best at the last evaluation |",
        "|---" * 11 + "|",
    ]
    for (model, task, zo, fo, queries, batch, tokens, *examples), own in rows.items():
        stages = ", ".join(dict.fromkeys(record["stage"] for record in own))
        trained = [record for record in own if record["best_step"] is not None]
        last = sum(record["best_step"] == _steps(record) for record in trained)
        counts = " | ".join(map(str, examples))
        lines.append(
            f"| {model}, {task} | {stages} | {zo} | {fo} | {queries} | {batch} | {tokens} | {counts} "
            f"| {last} of {len(trained)} |"
        )
    return lines


def turn_table(rows: Sequence[Row], nothing: str = "No density has been compared yet.") -> list[str]:
    """The same comparisons at other densities or lengths: where a claim turns.

    Claims that only one stage decides have the same rows here as among the verdicts, and are left out.
    """
    decided = [row for row in rows if row.found is not None and row.claim.stage is None]
    lines = [
        "| claim | model, density | verdict | effect | interval | texts, seeds | p | |",
        "|---" * 8 + "|",
    ]
    lines += [f"| {row.claim.sentence} | {_row(row)} |" for row in decided]
    return lines if decided else [nothing]


def method_table(
    records: Sequence[Json], everything: Sequence[Json], prior: Mapping[tuple[str, str], float]
) -> list[str]:
    """Table 1: methods by tasks. A task counts for accuracy, does not (italics), or it is not known yet (?).

    Ranks are over the tasks of which every method has `MIN_SEEDS` seeds, and over the seeds that all have of
    these: a method that is half finished would be ranked by luck.

    Args:
        everything: of the model, to say which tasks count.
        prior: least loss of a guess that is the same for every prompt, by model and task, where it is known.
    """
    rows: dict[tuple[str, str], dict[str, list[Json]]] = {}
    for record in sorted(records, key=_place):
        rows.setdefault((record["base"], record["method"]), {}).setdefault(record["task"], []).append(record)
    tasks = sorted({record["task"] for record in records}, key=lambda task: (task != Task.TEXT, task))
    counted = counted_tasks(everything, records[0]["model"])
    whole = [task for task in tasks if _common(rows, [task])]
    common = _common(rows, whole)
    accuracy_rank = _ranks(common, [task for task in whole if counted.get(task)], "accuracy", 1)
    loss_rank = _ranks(common, whole, "loss", -1)
    model = records[0]["model"]
    heads = [_task_head(records, task, counted.get(task), prior.get((model, task))) for task in tasks]
    lines = [
        "| base | method | " + " | ".join(heads) + " | rank | rank by loss |",
        "|---" * (len(tasks) + 4) + "|",
    ]
    for key, found in rows.items():
        cells = [_cell(found[task]) if task in found else "" for task in tasks]
        ranks = f"{accuracy_rank.get(key, '')} | {loss_rank.get(key, '')}"
        lines.append(f"| {key[0]} | {key[1]} | " + " | ".join(cells) + f" | {ranks} |")
    return lines


def setting_table(records: Sequence[Json], setting: str, heading: str) -> list[str]:
    """Methods by a setting (a density, a number of queries, a base), one table for all models and tasks.

    Numbers stand in their order, under the heading; names as they come.
    """
    settings = list(dict.fromkeys(record[setting] for record in records))
    if heading:
        settings = sorted(settings)
    heads = [f"{heading} {at:g}" if heading else at for at in settings]
    lines = [
        f"| model, task, method | {' | '.join(heads)} |",
        "|---" * (len(settings) + 1) + "|",
    ]
    in_order = sorted(
        records,
        key=lambda record: (record["model"], record["task"] != Task.TEXT, record["task"], _place(record)),
    )
    for key in dict.fromkeys((r["model"], r["task"], r["method"]) for r in in_order):
        of_key = [record for record in records if (record["model"], record["task"], record["method"]) == key]
        cells = [_cell([record for record in of_key if record[setting] == at]) for at in settings]
        lines.append(f"| {', '.join(key)} | {' | '.join(cells)} |")
    return lines


def begun_anew(records: Sequence[Json], setting: str, heading: str) -> str:
    """How many runs of each setting began anew with a smaller step: they took more work than the others."""
    parts = []
    for at in sorted({record[setting] for record in records}):
        attempts = [record["attempts"] for record in records if record[setting] == at]
        trained = [count for count in attempts if count is not None]
        parts.append(f"{heading} {at:g}, {sum(count > 1 for count in trained)} of {len(trained)} runs")
    return "; ".join(parts)


def progress_list(rows: Sequence[Progress], missing: Mapping[str, str]) -> list[str]:
    """What is not there yet, by name; nothing is left to be guessed."""
    lines = [
        f"- `{row.stage}` of {row.model}, {row.task}: {row.done} of {row.planned} cells."
        for row in rows
        if row.done < row.planned
    ]
    return [*lines, *(f"- {name}: {reason}." for name, reason in missing.items())] or ["Nothing."]


def _place(record: Json) -> tuple[bool, int, str]:
    """Of a record's line: 16 bits before 4, then by the method."""
    method: str = record["method"]
    known = _ORDER.index(method) if method in _ORDER else len(_ORDER)
    return record["base"] != "bf16", known, method


def _row(row: Row) -> str:
    where = f"{row.model}, {row.density:g}" if row.found is not None else row.model
    if row.found is None:
        return f"{where} | {row.verdict} | | | | | {row.reason}"
    unit = 1 if row.by_loss else 100
    low, high = row.interval or (0.0, 0.0)
    level = 90 if row.claim.relation is Relation.WITHIN else 95
    kind = f"{'loss' if row.by_loss else 'accuracy'} of {', '.join(row.found.tasks)}"
    digits = 4 if row.by_loss else 1
    p_value = "" if row.p_value is None else f"{row.p_value:.2g}"
    if row.verdict is Verdict.FAILS:
        p_value = f"{row.p_failing:.2g} (fails)"
    verdict = f"{row.verdict.value} ({kind})"
    effect = f"{unit * row.found.effect:+.{digits}f} {'nats' if row.by_loss else 'points'}"
    interval = f"{unit * low:+.{digits}f} to {unit * high:+.{digits}f} ({level}%)"
    counts = f"{row.found.clusters}, {row.found.seeds}"
    return f"{where} | {verdict} | {effect} | {interval} | {counts} | {p_value} | {row.reason}"


def _is_text(row: Row) -> bool:
    return row.found is not None and row.found.tasks == (Task.TEXT,)


def _short(row: Row) -> str:
    assert row.found is not None
    unit, digits, name = (1, 3, "") if row.by_loss else (100, 1, " points")
    task = "" if _is_text(row) else f"{', '.join(row.found.tasks)}: "
    density = "" if row.density == DENSITY else f" at {row.density:g}"
    verdict = "?" if row.verdict is Verdict.UNDECIDED else f"**{row.verdict}**"
    return f"{task}{verdict} {unit * row.found.effect:+.{digits}f}{name}{density}"


def _steps(record: Json) -> int:
    steps: int = record["fo_steps" if record["method"].startswith("fo:") else "zo_steps"]
    return steps


def _common(rows: _Rows, tasks: Sequence[str]) -> _Rows:
    """The records of the seeds that every method has of every task; none where they are too few."""
    of_each = [{r["seed"] for r in found.get(task, ())} for found in rows.values() for task in tasks]
    seeds = set.intersection(*of_each) if of_each else set()
    if len(seeds) < MIN_SEEDS:
        return {}
    return {
        key: {task: [r for r in of_task if r["seed"] in seeds] for task, of_task in found.items()}
        for key, found in rows.items()
    }


def _ranks(rows: _Rows, tasks: Sequence[str], key: str, sign: int) -> dict[tuple[str, str], str]:
    if not rows or not tasks:
        return {}
    scores_MT = np.array([[sign * _mean(found[task], key) for task in tasks] for found in rows.values()])
    return {name: f"{rank:.1f}" for name, rank in zip(rows, average_ranks(scores_MT), strict=True)}


def _task_head(records: Sequence[Json], task: str, counts: bool | None, prior: float | None) -> str:
    if task == Task.TEXT:
        return f"{task} (loss{_cut([record for record in records if record['task'] == task])})"
    own = [record for record in records if record["task"] == task]
    majority = np.mean([record["majority"] for record in own])
    name = {True: task, False: f"*{task}*", None: f"{task}?"}[counts]
    told = "" if prior is None else f"; prior {prior:.3f}"
    return f"{name} (majority {100 * majority:.1f}{told}{_cut(own)})"


def cut_share(records: Sequence[Json]) -> float:
    """Of the test prompts, those that lost their front, where untrained records say so."""
    shares = [r["cut_examples"] / r["examples"]["test"] for r in records if r["method"] == "zero-shot"]
    return max(shares, default=0.0)


def _cut(records: Sequence[Json]) -> str:
    share = cut_share(records)
    return f"; {100 * share:.0f} % cut" if share else ""


def _cell(records: Sequence[Json]) -> str:
    if not records:
        return ""
    seeds = f", {len(records)} seeds" if len(records) != 3 else ""
    mark = ", edge" if any(record["on_edge"] for record in records) else ""
    if records[0]["method"].startswith("icl:"):
        mark += f", {_mean(records, 'shots'):.1f} shots fitted"
    if records[0]["task"] == Task.TEXT:
        return f"({loss_and_bits(records)}{seeds}{mark})"
    accuracy = [100 * record["accuracy"] for record in records]
    varies = records[0]["method"] != "zero-shot"  # items are the same for every seed
    spread = f" ± {np.std(accuracy, ddof=1):.1f}" if varies and len(accuracy) > 1 else ""
    return f"{np.mean(accuracy):.1f}{spread} ({_mean(records, 'loss'):.3f}{seeds}{mark})"


def _mean(records: Sequence[Json], key: str) -> float:
    return float(np.mean([record[key] for record in records]))

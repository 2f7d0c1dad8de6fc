"""A sweep's records as tables: accuracy, deviation over seeds, loss of the right answer, average rank.

A task counts for accuracy only where tuned first-order training beats the majority and zero-shot by five
points with p below 0.01; elsewhere the model cannot do the task at this size, and the loss of the right
answers says more than the accuracy.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from permille.evaluate.cells import Json
from permille.evaluate.statistics import average_ranks, beats_by

REQUIRED_GAIN = 0.05
REQUIRED_P = 0.01

Rows = Mapping[tuple[str, str], Sequence[Json]]
"""Records of one model and base, by (method, task)."""


def markdown(records: Iterable[Json]) -> str:
    """The tables of all models and bases."""
    groups: dict[tuple[str, str], dict[tuple[str, str], list[Json]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        groups[record["model"], record["base"]][record["method"], record["task"]].append(record)
    return "\n".join(_table(model, base, rows) for (model, base), rows in groups.items())


def _table(model: str, base: str, rows: Rows) -> str:
    methods = list(dict.fromkeys(method for method, _ in rows))
    tasks = list(dict.fromkeys(task for _, task in rows))
    counted = {task: countable(rows, task) for task in tasks}
    loss_MT = np.array([[_mean(rows[method, task], "loss") for task in tasks] for method in methods])
    accuracy_MT = np.array([[_mean(rows[method, task], "accuracy") for task in tasks] for method in methods])
    counting = [index for index, task in enumerate(tasks) if counted[task]]
    loss_ranks = average_ranks(-loss_MT)
    accuracy_ranks = average_ranks(accuracy_MT[:, counting]) if counting else None
    lines = [
        f"## {model}, {base}",
        "",
        "Accuracy in percent, mean and deviation over seeds; in brackets the loss of the right answer in "
        "nats a token. A task in *italics* does not count for accuracy (no first-order gain of 5 points over "
        "majority and zero-shot at p < 0.01).",
        "",
        "| method | "
        + " | ".join(_heading(rows, task, counted[task]) for task in tasks)
        + " | rank | rank by loss |",
        "|---" * (len(tasks) + 3) + "|",
    ]
    for number, method in enumerate(methods):
        cells = [_cell(rows[method, task]) for task in tasks]
        rank = "" if accuracy_ranks is None else f"{accuracy_ranks[number]:.1f}"
        lines.append(f"| {method} | " + " | ".join(cells) + f" | {rank} | {loss_ranks[number]:.1f} |")
    return "\n".join(lines) + "\n"


def countable(rows: Rows, task: str) -> bool:
    """Whether accuracies on the task say anything at this size; see the module."""
    first_order = [method for method, name in rows if name == task and method.startswith("fo:")]
    zero_shot = rows.get(("zero-shot", task), [])
    if not first_order or not zero_shot:
        return False
    best = max(first_order, key=lambda method: _mean(rows[method, task], "accuracy"))
    trained_N = _correct(rows[best, task])
    majority = _mean(rows[best, task], "majority")
    over_zero_shot = _beats(rows[best, task], zero_shot)
    over_majority = beats_by(trained_N, np.full(len(trained_N), majority), REQUIRED_GAIN)[1]
    return over_zero_shot < REQUIRED_P and over_majority < REQUIRED_P


def paired(first: Sequence[Json], second: Sequence[Json]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Outcomes of two methods on the items that both were tested on, pooled over the seeds they share."""
    one: list[int] = []
    other: list[int] = []
    by_seed = {record["seed"]: record for record in second}
    for record in first:
        if record["seed"] not in by_seed:
            continue
        answers = dict(zip(by_seed[record["seed"]]["items"], by_seed[record["seed"]]["correct"], strict=True))
        for item, right in zip(record["items"], record["correct"], strict=True):
            if item in answers:
                one.append(int(right))
                other.append(int(answers[item]))
    return np.array(one, dtype=np.float64), np.array(other, dtype=np.float64)


def _beats(first: Sequence[Json], second: Sequence[Json]) -> float:
    return beats_by(*paired(first, second), REQUIRED_GAIN)[1]


def _correct(records: Sequence[Json]) -> NDArray[np.float64]:
    return np.array([int(right) for record in records for right in record["correct"]], dtype=np.float64)


def _mean(records: Sequence[Json], key: str) -> float:
    return float(np.mean([record[key] for record in records]))


def _heading(rows: Rows, task: str, counts: bool) -> str:
    majority = np.mean(
        [record["majority"] for (_, name), found in rows.items() if name == task for record in found]
    )
    name = task if counts else f"*{task}*"
    return f"{name} (majority {100 * majority:.1f})"


def _cell(records: Sequence[Json]) -> str:
    accuracy = [100 * record["accuracy"] for record in records]
    deviation = f" ± {np.std(accuracy, ddof=1):.1f}" if len(accuracy) > 1 else ""
    return f"{np.mean(accuracy):.1f}{deviation} ({_mean(records, 'loss'):.3f})"

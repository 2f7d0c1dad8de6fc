"""Tables of a sweep: accuracy, standard deviation over seeds, loss of the right answer, average rank.

A task counts for accuracy only if tuned first-order training beats majority and zero-shot by five points,
with p below 0.01. Otherwise the model is too small for the task, and the loss of the right answers says more
than the accuracy. Language modelling (`text`) has no accuracy.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from permille.errors import InputError
from permille_lab.evaluate.contrasts import clusters
from permille_lab.evaluate.outcomes import Json
from permille_lab.evaluate.statistics import average_ranks, beats_by
from permille_lab.tasks.examples import Task

REQUIRED_GAIN = 0.05
REQUIRED_P = 0.01
MIN_CLUSTERS = 30
"""Least number of clusters (test items that share no passage or text) for a statement on a task."""

Rows = Mapping[tuple[str, str], Sequence[Json]]
"""Records of one model and base, by (method, task)."""


def markdown(
    records: Iterable[Json],
    left_out: Sequence[str] = (),
    failed: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> str:
    """Return the tables of all models and bases.

    Args:
        left_out: bad rows of the task files with their reasons, as in the results file.
        failed: keys of the cells that could not be measured, by reason.
    """
    groups: dict[tuple[str, str], dict[tuple[str, str], list[Json]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        groups[record["model"], record["base"]][record["method"], record["task"]].append(record)
    tables = [_table(model, base, rows) for (model, base), rows in groups.items()]
    if left_out:
        count = f"{len(left_out)}, such as {left_out[0]:.300}"
        tables.append(f"Rows of the files that were left out: {count}. The results name all.\n")
    if failed:
        reasons = [f"- {' '.join(why.split())}: {', '.join(keys)}" for why, keys in failed.items()]
        tables.append("\n".join(["Cells that could not be measured:", "", *reasons, ""]))
    return "\n".join(tables)


def _table(model: str, base: str, rows: Rows) -> str:
    methods = list(dict.fromkeys(method for method, _ in rows))
    tasks = list(dict.fromkeys(task for _, task in rows))
    counted = {task: countable(rows, task) for task in tasks}
    counting = [task for task in tasks if counted[task]]
    seeds = max(len(found) for found in rows.values())
    # A method with an unmeasured cell has no rank, because an average rank needs all tasks.
    ranked = [m for m in methods if all(len(rows.get((m, task), ())) == seeds for task in tasks)]
    loss_ranks = _ranks(rows, ranked, tasks, "loss", -1)
    accuracy_ranks = _ranks(rows, ranked, counting, "accuracy", 1)
    lines = [
        f"## {model}, {base}",
        "",
        "Accuracy in percent, mean and standard deviation over seeds. In brackets: the loss of the right "
        "answer in nats per token. A task in *italics* does not count for accuracy (first order is not 5 "
        "points better than majority and zero-shot with p < 0.01). A question mark: not known (these "
        f"methods were not measured, or there are fewer than {MIN_CLUSTERS} passages). *Prior*: the lowest "
        "loss of a guess that is the same for every prompt. For free text (squad), accuracy is exact match, "
        "and F1 follows. Language modelling (text) has a loss, the mean over documents, and bits per byte of "
        "the scored bytes. If no document is cut, bits per byte can be compared between tokenizers.",
        "",
        "| method | "
        + " | ".join(_heading(rows, task, counted[task]) for task in tasks)
        + " | rank | rank by loss |",
        "|---" * (len(tasks) + 3) + "|",
    ]
    for method in methods:
        cells = [_cell(rows[method, task]) if (method, task) in rows else "not measured" for task in tasks]
        ranks = f"{accuracy_ranks.get(method, '')} | {loss_ranks.get(method, '')}"
        lines.append(f"| {method}{_notes(rows, method)} | " + " | ".join(cells) + f" | {ranks} |")
    return "\n".join(lines) + "\n"


def _ranks(rows: Rows, methods: Sequence[str], tasks: Sequence[str], key: str, sign: int) -> dict[str, str]:
    if not methods or not tasks:
        return {}
    scores_MT = np.array([[sign * _mean(rows[method, task], key) for task in tasks] for method in methods])
    return {name: f"{rank:.1f}" for name, rank in zip(methods, average_ranks(scores_MT), strict=True)}


def countable(rows: Rows, task: str) -> bool | None:
    """Return True if the task counts for accuracy (see the module), and None if that is not known."""
    if task == Task.TEXT:
        return False
    first_order = [method for method, name in rows if name == task and method.startswith("fo:")]
    zero_shot = rows.get(("zero-shot", task), [])
    if not first_order or not zero_shot:
        return None
    # Choose by validation loss. A choice by test items would favour a method that was lucky on them.
    best = min(first_order, key=lambda method: _mean(rows[method, task], "validation_loss"))
    trained_N, base_N, cluster_N = paired(rows[best, task], zero_shot)
    if len(np.unique(cluster_N)) < MIN_CLUSTERS:
        return None
    majority_N = np.full(len(trained_N), _mean(rows[best, task], "majority"))
    return all(
        beats_by(trained_N, other_N, REQUIRED_GAIN, cluster_N)[1] < REQUIRED_P
        for other_N in (base_N, majority_N)
    )


def paired(
    first: Sequence[Json], second: Sequence[Json]
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.str_]]:
    """Return each item's mean outcome over seeds, for both methods, and its cluster.

    Only items count that both methods were tested on. Outcomes of one item with several seeds are not
    independent, since an easy item is easy with every seed. Clusters of items are independent.

    Raises:
        InputError: a record names an item twice.
    """
    one, other = _by_item(first), _by_item(second)
    shared = [item for item in one if item in other]
    of_item = clusters([*first, *second])
    return (
        np.array([one[item] for item in shared]),
        np.array([other[item] for item in shared]),
        np.array([of_item[item] for item in shared], dtype=np.str_),
    )


def _by_item(records: Sequence[Json]) -> dict[str, float]:
    outcomes: dict[str, list[int]] = defaultdict(list)
    for record in records:
        if len(set(record["items"])) < len(record["items"]):
            raise InputError(f"expected test items of different names in {record['method']}, got one twice")
        for item, right in zip(record["items"], record["correct"], strict=True):
            outcomes[item].append(int(right))
    return {item: sum(found) / len(found) for item, found in outcomes.items()}


def _notes(rows: Rows, method: str) -> str:
    """Return notes on shots that did not fit, cut examples, and a best step size on the grid's edge."""
    notes = []
    for task, records in ((task, found) for (name, task), found in rows.items() if name == method):
        if method.startswith("icl:"):
            notes.append(f"{task}: {_mean(records, 'shots'):.1f} shots fitted")
        if cut := round(_mean(records, "cut_examples")):
            notes.append(f"{task}: {cut} of {len(records[0]['items'])} cut")
        if any(record["on_edge"] for record in records):
            notes.append(f"{task}: step size on the grid's edge")
    return f" ({', '.join(notes)})" if notes else ""


def _mean(records: Sequence[Json], key: str) -> float:
    return float(np.mean([record[key] for record in records]))


def loss_and_bits(records: Sequence[Json]) -> str:
    """Return the cell of language modelling: nats per token with its deviation over seeds, bits per byte."""
    losses = [record["loss"] for record in records]
    deviation = f" ± {np.std(losses, ddof=1):.3f}" if len(losses) > 1 else ""
    # Older results have no bits per byte.
    known = all(record.get("bits_per_byte") is not None for record in records)
    told = f"; {_mean(records, 'bits_per_byte'):.3f} bits per byte" if known else ""
    return f"{np.mean(losses):.3f}{deviation}{told}"


def _heading(rows: Rows, task: str, counts: bool | None) -> str:
    if task == Task.TEXT:
        return task
    own = [record for (_, name), found in rows.items() if name == task for record in found]
    # Older results have no prior loss.
    priors = [record["prior_loss"] for record in own if record.get("prior_loss") is not None]
    prior = f"; prior {np.mean(priors):.3f}" if priors else ""
    name = {True: task, False: f"*{task}*", None: f"{task}?"}[counts]
    return f"{name} (majority {100 * _mean(own, 'majority'):.1f}{prior})"


def _cell(records: Sequence[Json]) -> str:
    if records[0]["task"] == Task.TEXT:
        return f"({loss_and_bits(records)})"
    accuracy = [100 * record["accuracy"] for record in records]
    deviation = f" ± {np.std(accuracy, ddof=1):.1f}" if len(accuracy) > 1 else ""
    overlap = f", F1 {100 * _mean(records, 'f1'):.1f}" if "f1" in records[0] else ""
    return f"{np.mean(accuracy):.1f}{deviation}{overlap} ({_mean(records, 'loss'):.3f})"

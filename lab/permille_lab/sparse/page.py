"""Tables of docs/results/sparse.md from finished cells, and verdicts on the paper's claims.

Two ways are compared by the difference of their losses, in nats per token, paired by seed. Intervals are
Student's 95 % intervals over the seeds. A claim is undecided if the interval contains 0.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from permille_lab.evaluate.statistics import user_test
from permille_lab.measuring.cells import Cells
from permille_lab.measuring.tables import markdown
from permille_lab.sparse.ways import ABLATED, ONE_SHOT, TABLE, Way

UNPRUNED = "pruned"
"""State of a one-shot cell before its recovery."""
RECOVERED = "recovered"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Key of a measured loss: a model, a target, a way, its state, and the text that judges it."""

    model: str
    target: str
    way: Way
    state: str
    text: str


Losses = Mapping[Place, Mapping[int, float]]
"""Losses in nats per token, by seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A claim of the paper. It holds if the loss of `first` is below that of `second`.

    Attributes:
        words: the claim, as the page prints it.
        first, second: a way and its state.
    """

    words: str
    first: tuple[Way, str]
    second: tuple[Way, str]
    targets: tuple[str, ...] = (ABLATED,)


_MERGED = (Way.WANDA_DENSE, Way.DENSE)
_ITERATIVE = (Way.ITERATIVE, RECOVERED)
CLAIMS = (
    Claim(
        words="better than Wanda with LoRA (tables 1, 2)",
        first=_ITERATIVE,
        second=(Way.WANDA, RECOVERED),
        targets=("0.5", "0.6", "0.7", "2:4"),
    ),
    Claim(
        words="better than SparseGPT with LoRA (tables 1, 2)",
        first=_ITERATIVE,
        second=(Way.SPARSEGPT, RECOVERED),
        targets=("0.5", "0.6", "0.7", "2:4"),
    ),
    Claim(
        words="on SparseGPT's masks, better than SparseGPT with LoRA (table 1)",
        first=(Way.SPARSEGPT_ITERATIVE, RECOVERED),
        second=(Way.SPARSEGPT, RECOVERED),
    ),
    Claim(
        words="pooling better than LoRA, one-shot (3.3.3)",
        first=(Way.WANDA_POOLING, RECOVERED),
        second=(Way.WANDA, RECOVERED),
    ),
    Claim(
        words="pooling better than LoRA, in rounds (3.3.3)", first=_ITERATIVE, second=(Way.LORA, RECOVERED)
    ),
    Claim(
        words="rounds better than one turn (3.4, 4.4)", first=_ITERATIVE, second=(Way.ONE_ROUND, RECOVERED)
    ),
    Claim(
        words="a longer last round better than equal ones (1)",
        first=_ITERATIVE,
        second=(Way.EQUAL_ROUNDS, RECOVERED),
    ),
    Claim(
        words="rates by CKA better than equal ones (4.3.1)", first=_ITERATIVE, second=(Way.UNIFORM, RECOVERED)
    ),
    Claim(
        words="rates as (21) is printed better than equal ones",
        first=(Way.PRINTED, RECOVERED),
        second=(Way.UNIFORM, RECOVERED),
    ),
    Claim(
        words="sizes by loss better than equal ones (4.3.2)",
        first=_ITERATIVE,
        second=(Way.EQUAL_SIZES, RECOVERED),
    ),
    Claim(
        words="norm control at 0.001 better than none (4.2, table 3)",
        first=_ITERATIVE,
        second=(Way.NO_NORM, RECOVERED),
    ),
    Claim(
        words="an adapter that is dense while it trains loses to one that is masked (2, 3)",
        first=(Way.WANDA, RECOVERED),
        second=(Way.WANDA_DENSE, RECOVERED),
    ),
    Claim(
        words="the same in rounds, with pooling",
        first=_ITERATIVE,
        second=(Way.DENSE, RECOVERED),
    ),
)


def tables(results: Path) -> dict[str, str]:
    """Return the tables by their names in the template."""
    cells = Cells(results / "sparse.jsonl")
    found, dense = losses_of(cells), dense_of(cells)
    return {
        "perplexities": markdown(_perplexities(found, dense)),
        "claims": markdown(claim_rows(found, dense)),
        "ablations": markdown(_ablations(found)),
        "rounds": markdown(_rounds(cells)),
        "merging": markdown(_merging(cells)),
        "tasks": markdown(_tasks(cells)),
        "device": markdown(_device(cells)),
        "bytes": markdown(_bytes(cells)),
        "people": markdown(_people(cells)),
    }


def losses_of(cells: Cells) -> Losses:
    """Return the losses of all finished cells."""
    found: dict[Place, dict[int, float]] = defaultdict(dict)
    for settings, result in cells.of("sparse"):
        for state in (UNPRUNED, RECOVERED):
            for text, loss in result.get(state, {}).items():
                place = Place(
                    model=settings["model"],
                    target=settings["target"],
                    way=Way(settings["way"]),
                    state=state,
                    text=text,
                )
                found[place][settings["seed"]] = loss
    return found


def dense_of(cells: Cells) -> dict[tuple[str, str], float]:
    """Return the loss of each unpruned model on each text."""
    return {
        (settings["model"], text): loss
        for settings, result in cells.of("dense")
        for text, loss in result["losses"].items()
    }


def difference(first: Mapping[int, float], second: Mapping[int, float]) -> tuple[float, float, int]:
    """Return the mean of first minus second, half the width of its interval, and the number of seeds.

    Only seeds count that both have.
    """
    from scipy import stats

    seeds = sorted(first.keys() & second.keys())
    less_S = np.array([first[seed] - second[seed] for seed in seeds])
    if len(seeds) < 2:
        return (float(less_S.mean()) if seeds else math.nan), math.inf, len(seeds)
    reach = float(stats.t.ppf(0.975, len(seeds) - 1) * stats.sem(less_S))
    return float(less_S.mean()), reach, len(seeds)


def verdict(mean: float, reach: float) -> str:
    """Return the verdict on the claim that the difference is below 0."""
    if mean + reach < 0:
        return "holds"
    return "fails" if mean - reach > 0 else "undecided"


def claim_rows(found: Losses, dense: Mapping[tuple[str, str], float]) -> list[dict[str, str]]:
    """Return a row for each claim and target that has cells. Each model and text is a column."""
    rows = []
    for claim in CLAIMS:
        for target in claim.targets:
            row = {"claim": claim.words, "zeros": _target(target)}
            for model, text in dense:
                first, second = (
                    found.get(Place(model=model, target=target, way=way, state=state, text=text), {})
                    for way, state in (claim.first, claim.second)
                )
                row[f"{model}, {text}"] = _judged(first, second)
            rows.append(row)
    row = {"claim": "50 % without loss (abstract): not above the dense model", "zeros": "50%"}
    for (model, text), loss in dense.items():
        own = found.get(Place(model=model, target="0.5", way=Way.ITERATIVE, state=RECOVERED, text=text), {})
        row[f"{model}, {text}"] = _judged(own, dict.fromkeys(own, loss))
    rows.append(row)
    return [
        row for row in rows if any(value for name, value in row.items() if name not in ("claim", "zeros"))
    ]


def _judged(first: Mapping[int, float], second: Mapping[int, float]) -> str:
    """Return the difference, its interval and the verdict. With one seed, return only the difference."""
    mean, reach, seeds = difference(first, second)
    if seeds < 2:
        return f"{mean:+.3f} (one seed)" if seeds else ""
    told = "" if seeds == 3 else f" ({seeds} seeds)"
    return f"{mean:+.3f} ± {reach:.3f}{told}: {verdict(mean, reach)}"


def _perplexities(found: Losses, dense: Mapping[tuple[str, str], float]) -> pd.DataFrame:
    rows = []
    for model, text in dense:
        targets = sorted({place.target for place in found if place.model == model})
        for target in targets:
            row = {
                "model, text": f"{model}, {text}",
                "zeros": _target(target),
                "dense": f"{math.exp(dense[model, text]):.2f}",
            }
            for way in TABLE:
                for state in (UNPRUNED, RECOVERED) if way in ONE_SHOT else (RECOVERED,):
                    place = Place(model=model, target=target, way=way, state=state, text=text)
                    name = way.value if state == UNPRUNED or way not in ONE_SHOT else "with LoRA"
                    row[f"{name}{' ' * list(TABLE).index(way)}"] = _perplexity(found.get(place, {}))
            rows.append(row)
    return pd.DataFrame(rows)


def _perplexity(by_seed: Mapping[int, float]) -> str:
    """Return the exponential of the mean loss, and half the width of its interval to first order."""
    if not by_seed:
        return ""
    mean, reach, seeds = difference(by_seed, dict.fromkeys(by_seed, 0.0))
    middle = math.exp(mean)
    return f"{middle:.2f} ± {middle * reach:.2f}" if seeds > 1 else f"{middle:.2f}"


def _ablations(found: Losses) -> pd.DataFrame:
    """Return the loss of every way minus that of `Way.ITERATIVE`, at the target `ABLATED`."""
    rows = []
    for place, losses in found.items():
        if place.target != ABLATED or place.state != RECOVERED or place.way is Way.ITERATIVE:
            continue
        base = Place(model=place.model, target=ABLATED, way=Way.ITERATIVE, state=RECOVERED, text=place.text)
        mean, reach, seeds = difference(losses, found.get(base, {}))
        if seeds:
            rows.append(
                {
                    "way": place.way.value + (" with LoRA" if place.way in TABLE else ""),
                    "column": f"{place.model}, {place.text}",
                    "cell": f"{mean:+.3f} ± {reach:.3f}" if seeds > 1 else f"{mean:+.3f}",
                }
            )
    frame = pd.DataFrame(rows, columns=["way", "column", "cell"])
    return frame.pivot(index="way", columns="column", values="cell").fillna("").reset_index()


def _rounds(cells: Cells) -> pd.DataFrame:
    """Return the perplexity of the selection windows before and after the steps of each round.

    Losses are averaged over the seeds.
    """
    kept: dict[tuple[str, str, int], list[Sequence[float]]] = defaultdict(list)
    for settings, result in cells.of("sparse"):
        if settings["way"] == Way.ITERATIVE.value:
            for number, report in enumerate(result["rounds"], start=1):
                kept[settings["model"], settings["target"], number].append(report["loss"])
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for (model, target, number), pairs in kept.items():
        before, after = np.exp(np.mean(pairs, axis=0))
        row = rows.setdefault((model, target), {"model": model, "zeros": _target(target)})
        row[f"round {number}"] = f"{before:.2f} → {after:.2f}"
    return pd.DataFrame(list(rows.values()))


def _merging(cells: Cells) -> pd.DataFrame:
    """Return the increase of the loss by a dense adapter's last merge, and the change at pruned weights.

    The norm of the change at pruned weights is divided by that at kept weights.
    """
    kept: dict[tuple[str, str], list[tuple[float, float, float]]] = defaultdict(list)
    for settings, result in cells.of("sparse"):
        for last in result["rounds"][-1:] if settings["way"] in _MERGED else ():
            at_kept, at_pruned = last["norms"]
            lost = last["loss"][1] - last["loss_dense"]
            kept[settings["model"], settings["way"]].append((last["loss_dense"], lost, at_pruned / at_kept))
    rows = []
    for (model, way), found in kept.items():
        dense, lost, ratio = np.mean(found, axis=0)
        rows.append(
            {
                "model": model,
                "way": way,
                "loss with the adapter": f"{dense:.3f}",
                "merging adds": f"{lost:+.3f}",
                "norm of the change at pruned places, at kept ones being 1": f"{ratio:.2f}",
            }
        )
    return pd.DataFrame(rows)


def _tasks(cells: Cells) -> pd.DataFrame:
    """Return the number of right answers of each way.

    In brackets: the answers that only this way has right, and those that only the dense model has right.
    """
    found = {settings["way"]: result["right"] for settings, result in cells.of("tasks")}
    rows = []
    for way, right in found.items():
        row = {"reference-7M, 60 %": way + (" with LoRA" if way in TABLE and way in ONE_SHOT else "")}
        for task, answers in right.items():
            won = lost = 0
            for own, dense in zip(answers, found["dense"][task], strict=True):
                won, lost = won + (own > dense), lost + (own < dense)
            row[task] = f"{answers.count('1')} of {len(answers)} (+{won} -{lost})"
        rows.append(row)
    return pd.DataFrame(rows)


def _device(cells: Cells) -> pd.DataFrame:
    """Return the perplexity of the 2:4 model and that of the dense model, both in NF4."""
    rows = []
    for settings, result in cells.of("device"):
        for text, dense in result["nf4"]["dense"].items():
            row = {"model, text": f"{settings['model']}, {text}", "rate": str(settings["rate"])}
            row["dense NF4"] = f"{math.exp(dense):.2f}"
            for name in ("pruned", "recovered"):
                loss = result["nf4"][name][text]
                row[f"2:4 NF4, {name}"] = f"{math.exp(loss):.2f} ({math.expm1(loss - dense):+.1%})"
            row["recovered, float32"] = f"{math.exp(result['float32']['recovered'][text]):.2f}"
            rows.append(row)
    return pd.DataFrame(rows)


def _bytes(cells: Cells) -> pd.DataFrame:
    """Return the bytes of the dense and the sparse package, and their ratio."""
    rows = []
    for settings, result in cells.of("device bytes"):
        row = {"model": settings["model"]}
        for name in ("dense", "sparse"):
            layers = result[name]
            row[f"{name}: codes"], row[f"{name}: all"] = f"{layers['dense']:,}", f"{sum(layers.values()):,}"
        for what, taken in (("codes", ("dense",)), ("all", tuple(result["dense"]))):
            own, other = (sum(result[name][role] for role in taken) for name in ("sparse", "dense"))
            row[f"share, {what}"] = f"{own / other:.3f}"
        rows.append(row)
    return pd.DataFrame(rows)


def _people(cells: Cells) -> pd.DataFrame:
    """Return people's gains on the sparse and the dense model, and their paired difference."""
    rows = []
    for settings, result in cells.of("device people"):
        losses = {name: np.array(result[name]["losses"]) for name in ("dense", "sparse")}
        gains = {name: loss_P2[:, 0] - loss_P2[:, 1] for name, loss_P2 in losses.items()}
        # `user_test` takes losses. Negated gains make its result positive if the sparse model gains more.
        test = user_test("sparse less dense", -gains["sparse"], -gains["dense"])
        rows.append(
            {
                "model": settings["model"],
                "people": str(test.users),
                "gain, dense": f"{gains['dense'].mean():.3f}",
                "gain, 2:4": f"{gains['sparse'].mean():.3f}",
                "2:4 less dense": f"{test.gain:+.3f}",
                "95 %": f"{test.interval[0]:+.3f} to {test.interval[1]:+.3f}",
                "ends at, dense": f"{losses['dense'][:, 1].mean():.3f}",
                "ends at, 2:4": f"{losses['sparse'][:, 1].mean():.3f}",
            }
        )
    return pd.DataFrame(rows)


def _target(target: str) -> str:
    return target if ":" in target else f"{float(target):.0%}"

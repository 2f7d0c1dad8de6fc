"""Tables of real-model.md and zeroth-order.md in docs/results, from finished cells."""

from enum import StrEnum
from pathlib import Path

import pandas as pd

from permille_lab.measuring.cells import Cells, Settings
from permille_lab.measuring.tables import markdown

STRENGTHS = (8, 4, 2)
"""Strengths of a state in the frontier, in eighths."""


class State(StrEnum):
    """A contender: a state, and the text in the prompt."""

    BASE = "base"
    OWN = "own state"
    OTHER = "another person's state"
    POOLED = "state of other people's text"
    PROMPT = "own text in the prompt"
    CONTROL = "another person's text in the prompt"
    BOTH = "own text in the prompt and own state"
    LORA = "LoRA of peft, rank 8"


class Trainable(StrEnum):
    """The numbers that a frontier run trains."""

    SPARSE = "sparse"
    LORA_FA_1 = "lora-fa-1"
    LORA_1 = "lora-1"
    LORA_8 = "lora-8"


def tables(results: Path) -> dict[str, str]:
    """Return the tables of real-model.md by their names in the template."""
    cells = Cells(results / "real.jsonl")
    controls = {result["user"]: result["nats"] for _, result in cells.of("control")}
    people = pd.DataFrame(
        [
            result | {"nats": result["nats"] | {State.CONTROL.value: controls[result["user"]]}}
            for _, result in cells.of("people")
            if result["user"] in controls
        ]
    )
    return {
        "people": markdown(_states(people[people["user"] != "gardener"])),
        "gardener": markdown(_states(people[people["user"] == "gardener"])),
        "numbers": markdown(_numbers(people)),
        "tasks": markdown(_tasks(cells)),
        "frontier": markdown(_frontier(cells)),
        "learn": markdown(_learn(cells)),
        "decode": markdown(_decode(cells)),
        "shapes": markdown(_shapes(cells)),
        "memory": markdown(_memory(cells)),
        "second": markdown(_second(cells)),
        "facts": markdown(_facts(cells)),
    }


def zeroth_order_tables(results: Path) -> dict[str, str]:
    """Return the table of zeroth-order.md by its name in the template."""
    rows = [
        {
            "values": " of ".join([f"{result['k']:,}", *filter(None, [settings.get("adapter")])]),
            "steps": ", ".join([settings["kind"].replace("_", "-"), *_changes(settings)]),
            "number of steps": result["steps"],
            "loss before": f"{result['loss_before']:.3f}",
            "loss after": f"{result['loss_after']:.3f}",
            "fall": f"{result['loss_before'] - result['loss_after']:.3f}",
            "general rise": f"{result['general_rise']:+.3f}" if "general_rise" in result else "",
            "seconds": f"{result['cpu_s']:.0f}",
        }
        for settings, result in Cells(results / "zeroth-order.jsonl").of("zeroth order")
        if settings["normalised"] and not settings["first_layer"]
    ]
    table = pd.DataFrame(rows)
    return {"contenders": markdown(table.loc[:, (table != "").any()])}


def _changes(settings: Settings) -> list[str]:
    """Return the settings of a contender that differ from the first comparison, as text."""
    directions, momentum = settings.get("directions"), settings.get("momentum")
    found = [] if directions is None else [f"{' then '.join(map(str, directions))} directions"]
    found += [] if momentum is None else [f"momentum {momentum:g}"]
    return found + ([settings["person"]] if "person" in settings else [])


def _states(people: pd.DataFrame) -> pd.DataFrame:
    nats, general = (pd.DataFrame(list(people[name])) for name in ("nats", "general"))
    rows = []
    for state in State:
        gain = nats[State.BASE.value] - nats[state.value]
        rows.append(
            {
                "": state.value,
                "people": len(people),
                "held-out loss": f"{nats[state.value].mean():.3f}",
                "gain": f"{gain.mean():+.3f}",
                "least and most": f"{gain.min():+.3f}, {gain.max():+.3f}",
                "general rise": f"{(general[state.value] - general[State.BASE.value]).mean():+.3f}"
                if state.value in general
                else "",
            }
        )
    return pd.DataFrame(rows)


def _numbers(people: pd.DataFrame) -> pd.DataFrame:
    return pd.DataFrame(
        [
            {
                "person": row["user"],
                "tokens that train": row["train_tokens"],
                "that judge": row["test_tokens"],
                "strength": f"{row['strength']}/8",
                "seconds, own": row["seconds"]["own"],
                "seconds, LoRA": row["seconds"]["lora"],
            }
            for _, row in people.iterrows()
        ]
    )


def _tasks(cells: Cells) -> pd.DataFrame:
    found: dict[str, dict[str, str]] = {}
    for settings, result in cells.of("tasks"):
        row = found.setdefault(
            settings["task"], {"task": settings["task"], "items": str(len(result["correct"]))}
        )
        accuracy = 100 * sum(result["correct"]) / len(result["correct"])
        row["base" if settings["user"] is None else f"state of {settings['user']}"] = f"{accuracy:.1f} %"
    return pd.DataFrame(list(found.values()))


def _frontier(cells: Cells) -> pd.DataFrame:
    """Return the mean held-out and general losses over people.

    The table has losses and not gains, because packages have different losses before training.
    """
    rows = [
        {"trainable": settings["trainable"], "method": settings["method"], "user": settings["user"], **result}
        for settings, result in cells.of("frontier")
    ]
    table = pd.DataFrame(rows, columns=["trainable", "method", "user", "points", "k", "seconds"])
    # Keep people that all contenders of a method have, since losses differ between people.
    contenders = table.groupby("method")["trainable"].transform("nunique")
    table = table[table.groupby(["method", "user"])["trainable"].transform("nunique") == contenders]
    out = []
    for (trainable, method), group in table.groupby(["trainable", "method"], sort=False):
        row = {
            "trained": trainable,
            "method": method,
            "numbers": f"{int(group['k'].iloc[0]):,}",
            "people": len(group),
        }
        for eighths in (0, *reversed(STRENGTHS)):
            points = [points[str(eighths)] for points in group["points"]]
            nats, general = (sum(column) / len(points) for column in zip(*points, strict=True))
            row[f"{eighths}/8" if eighths else "before"] = f"{nats:.3f}, {general:.3f}"
        row["seconds"] = f"{group['seconds'].mean():.0f}"
        out.append(row)
    return pd.DataFrame(out)


def _learn(cells: Cells) -> pd.DataFrame:
    rows = []
    for settings, result in cells.of("learn"):
        before, after = result["nats"]["before"], result["nats"]["after"]
        row = {"--learn": settings["learn"], "tokens that train": result["train_tokens"]}
        for side in after:
            row[f"{side}'s turns"] = f"{before[side]:.3f} -> {after[side]:.3f}"
        row["general rise"] = f"{result['general']['after'] - result['general']['before']:+.3f}"
        row["strength"] = f"{result['strength']}/8"
        rows.append(row)
    return pd.DataFrame(rows)


def _decode(cells: Cells) -> pd.DataFrame:
    rows = []
    for settings, result in cells.of("decode"):
        rates = result["tokens_per_s"]
        rows.append(
            {"threads": settings["threads"]} | {f"{name}, tokens a second": rates[name] for name in rates}
        )
    return pd.DataFrame(rows)


def _shapes(cells: Cells) -> pd.DataFrame:
    return pd.DataFrame(
        [
            {
                "shape": settings["shape"],
                "row": f"{settings['tokens']} tokens",
                "package": f"{result['package_bytes'] / 1e6:.0f} MB",
                "seconds of a step": result["gradient_s"],
                "of a forward pass": result["forward_s"],
                "resident above the package": f"{result['above_package_bytes'] / 1e6:.0f} MB",
            }
            for settings, result in cells.of("shapes")
        ]
    )


def _second(cells: Cells) -> pd.DataFrame:
    rows = []
    for settings, result in cells.of("second"):
        losses = {name: f"{nats:.3f}" for name, nats in result["nats"].items()}
        general = {name: f"{base:.3f} -> {own:.3f}" for name, (base, own) in result["general"].items()}
        row = {
            "model": settings["model"],
            "person": settings["user"],
            "tokens that train": result["train_tokens"],
        }
        rows.append(row | losses | general | {"strength": f"{result['strength']}/8"})
    return pd.DataFrame(rows)


def _facts(cells: Cells) -> pd.DataFrame:
    rows: dict[str, dict[str, str]] = {}
    for settings, result in cells.of("facts"):
        row = rows.setdefault(settings["text"], {"text": settings["text"]})
        row |= {recall: f"{sum(right)} of {len(right)}" for recall, right in result["right"].items()}
    return pd.DataFrame(list(rows.values())).fillna("")


def _memory(cells: Cells) -> pd.DataFrame:
    return pd.DataFrame(
        [
            {
                "person": settings["user"],
                "own state": f"{result['own_bytes'] / 1e6:.0f} MB",
                State.LORA.value: f"{result['lora_bytes'] / 1e6:.0f} MB",
            }
            for settings, result in cells.of("memory")
        ]
    )

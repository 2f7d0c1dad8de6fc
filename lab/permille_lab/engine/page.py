"""The tables of the pages about engines, from finished cells."""

from pathlib import Path

import pandas as pd

from permille_lab.measuring.cells import Cells, Result, Settings


def tables(results: Path) -> dict[str, str]:
    """By the name that the template has for them."""
    cells = Cells(results / "engine.jsonl")
    steps = [
        {
            "batch": _batch(settings) + (", upper half masked" if figure == "lower layers" else ""),
            "step": name,
            "s": f"{found['wall_s']:.2f}",
            "against dense": f"{found['wall_s'] / result['steps'][dense]['wall_s']:.2f}",
            "not forward": f"{100 * found['not_forward']:.2f} %" if "not_forward" in found else "",
        }
        for figure, dense in (("step", "dense float32"), ("lower layers", "dense"))
        for settings, result in cells.of(figure)
        for name, found in result["steps"].items()
    ]
    loops = [
        {
            "batch": f"{_shape(settings)}, {name}",
            "both signs, s": f"{found['both signs']:.2f}",
            "sign by sign": f"{found['inner']:.2f}",
            "four queries, s": f"{found['all queries']:.2f}",
            "query by query": f"{found['outer']:.2f}",
        }
        for settings, result in cells.of("loops")
        for name, found in result["loops"].items()
    ]
    memory = [
        {
            "batch": _batch(settings),
            "step": name,
            "peak, MB": f"{found['peak_bytes'] / 1e6:.0f}",
            "above the package": f"{found['above_package_bytes'] / 1e6:.0f}",
            "anonymous": f"{found['anonymous_peak_bytes'] / 1e6:.0f}",
        }
        for figure in ("memory", "first order")
        for settings, result in cells.of(figure)
        for name, found in result["contenders"].items()
    ]
    decoding = [
        {
            "shape": f"{_shape(settings)}, {settings['threads']} threads",
            "tokens/s": result["tokens_per_s"]["overlay"],
            "without overlay": result["tokens_per_s"]["bare"],
            "ratio": f"{result['ratio']:.3f}",
        }
        | {name: str(result["tokens_per_s"].get(name, "")) for name in ("int4", "llama.cpp")}
        for settings, result in cells.of("decode")
    ]
    token = [
        {"part of a token": name, "ms": f"{milliseconds:.1f}"}
        for _, result in cells.of("decode")
        for name, milliseconds in result["token_ms"].items()
        if milliseconds >= 0.05
    ]
    packages = {
        figure: [
            {
                "shape": _batch(settings),
                "package": name,
                "bytes": _ratio(found, first, "package_bytes"),
                "dense layer": _ratio(found, first, "dense_layer_bytes"),
            }
            | {what: f"{ratio:.2f}" for what, ratio in found["against_first"].items()}
            for settings, result in cells.of(figure)
            for first in [next(iter(result["contenders"].values()))]
            for name, found in result["contenders"].items()
        ]
        for figure in ("sparse", "schemes")
    }
    replay = [
        {
            "kernels": name,
            "one thread, s": f"{way['replay_s']['1']:.2f}",
            "two threads, s": f"{way['replay_s']['2']:.2f}",
            "step by step, s": way["one_by_one_s"],
        }
        for _, result in Cells(results / "replay.jsonl").of("replay")
        for name, way in result["ways"].items()
    ]
    groups = [
        f"{of['steps']:,} steps of {of['groups']:,} groups take {result['replay_s']['1, processor']:.1f} s"
        for of, result in Cells(results / "replay.jsonl").of("replay of groups")
    ]
    named = {
        "steps": steps,
        "loops": loops,
        "gradients": [_gradient(settings, result) for settings, result in cells.of("gradient")],
        "memory": memory,
        "decoding": decoding,
        "token": token,
        "replay": replay,
    } | packages
    tables = {
        name: str(pd.DataFrame(rows).to_markdown(index=False, disable_numparse=True))
        for name, rows in named.items()
    }
    return tables | {"groups": "; ".join(groups)}


def inference_tables(results: Path) -> dict[str, str]:
    """Those of the page about inference engines."""
    cells = Cells(results / "inference.jsonl")
    found = cells.of("step")
    rows = [
        {
            "batch": _batch(settings),
            "step": name,
            "ms": f"{1e3 * step['cpu_s']:.0f}",
            "against dense": f"{step['cpu_s'] / result['steps'][result['against']]['cpu_s']:.2f}",
            "peak, MB": f"{step['peak_bytes'] / 1e6:.0f}" if "peak_bytes" in step else "",
        }
        for settings, result in found
        for name, step in result["steps"].items()
    ]
    machine = found[0][1]["machine"]["before"]
    sizes = cells.of("installed")[0][1]
    return {
        "steps": str(pd.DataFrame(rows).to_markdown(index=False, disable_numparse=True)),
        "rounds": str(found[0][0]["rounds"]),
        "processor": f"{machine['processor']}, {', '.join(machine['instructions'])}",
        "installed": ", ".join(f"{name} {size / 1e6:.0f}" for name, size in sizes.items()),
    }


def _gradient(settings: Settings, result: Result) -> dict[str, str]:
    """A step along the gradient; without rounds its memory alone was measured."""
    found = {"batch": _batch(settings)}
    forward = result.get("forward_s")
    found["gradient, forward passes"] = f"{result['gradient_s'] / forward:.2f}" if forward else ""
    for groups in ("0", "1024", "4096"):
        rest = f"{100 * result['rest_s'][groups] / result['gradient_s']:.2f} %" if forward else ""
        found["state adds" if groups == "0" else f"{int(groups):,} groups add"] = rest
    return found | {
        "peak, MB": f"{result['peak_bytes'] / 1e6:.0f}",
        "above the package": f"{result['above_package_bytes'] / 1e6:.0f}",
    }


def _ratio(found: Result, dense: Result, what: str) -> str:
    return f"{found[what] / dense[what]:.3f}"


def _shape(settings: Settings) -> str:
    layers = settings["layers"]
    return str(settings["shape"]) if layers is None else f"{settings['shape']}/{layers}"


def _batch(settings: Settings) -> str:
    return f"{_shape(settings)}, {settings['sequences']}x{settings['tokens']}"

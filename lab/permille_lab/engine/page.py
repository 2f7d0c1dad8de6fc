"""Tables of the pages engine.md, inference.md and device.md in docs/results, from finished cells."""

from collections.abc import Iterator
from pathlib import Path

from permille_lab.measuring.cells import Cells, Result, Settings
from permille_lab.measuring.random_packages import SHAPES
from permille_lab.measuring.tables import markdown

Row = dict[str, str]
Rows = Iterator[Row]


def tables(results: Path) -> dict[str, str]:
    """Return the tables of engine.md by their names in the template."""
    cells, replays = Cells(results / "engine.jsonl"), Cells(results / "replay.jsonl")
    rows = {
        "steps": _steps(cells),
        "loops": _loops(cells),
        "gradients": (_gradient(settings, result) for settings, result in cells.of("gradient")),
        "memory": _memory(cells),
        "decoding": (_decoding(settings, result) for settings, result in cells.of("decode")),
        "token": _token(cells),
        "replay": _replays(replays),
        "sparse": _packages(cells, "sparse"),
        "schemes": _packages(cells, "schemes"),
    }
    groups = (
        f"{of['steps']:,} steps of {of['groups']:,} groups take {result['replay_s']['1, processor']:.1f} s"
        for of, result in replays.of("replay of groups")
    )
    return {name: markdown(found) for name, found in rows.items()} | {"groups": "; ".join(groups)}


def _steps(cells: Cells) -> Rows:
    for figure, dense in (("step", "dense float32"), ("lower layers", "dense")):
        for settings, result in cells.of(figure):
            for name, found in result["steps"].items():
                yield {
                    "batch": _batch(settings) + (", upper half masked" if figure == "lower layers" else ""),
                    "step": name,
                    "s": f"{found['wall_s']:.2f}",
                    "against dense": f"{found['wall_s'] / result['steps'][dense]['wall_s']:.2f}",
                    "not forward": f"{100 * found['not_forward']:.2f} %" if "not_forward" in found else "",
                }


def _loops(cells: Cells) -> Rows:
    for settings, result in cells.of("loops"):
        for name, found in result["loops"].items():
            yield {
                "batch": f"{_shape(settings)}, {name}",
                "both signs, s": f"{found['both signs']:.2f}",
                "sign by sign": f"{found['inner']:.2f}",
                "four queries, s": f"{found['all queries']:.2f}",
                "query by query": f"{found['outer']:.2f}",
            }


def _memory(cells: Cells) -> Rows:
    for figure in ("memory", "first order"):
        for settings, result in cells.of(figure):
            for name, found in result["contenders"].items():
                yield {
                    "batch": _batch(settings),
                    "step": name,
                    "peak, MB": f"{found['peak_bytes'] / 1e6:.0f}",
                    "above the package": f"{found['above_package_bytes'] / 1e6:.0f}",
                    "anonymous": f"{found['anonymous_peak_bytes'] / 1e6:.0f}",
                }


def _decoding(settings: Settings, result: Result) -> Row:
    row = {
        "shape": f"{_shape(settings)}, {settings['threads']} threads",
        "tokens/s": result["tokens_per_s"]["overlay"],
        "without overlay": result["tokens_per_s"]["bare"],
        "ratio": f"{result['ratio']:.3f}",
    }
    return row | {name: str(result["tokens_per_s"].get(name, "")) for name in ("int4", "llama.cpp")}


def _token(cells: Cells) -> Rows:
    for _, result in cells.of("decode"):
        for name, milliseconds in result["token_ms"].items():
            if milliseconds >= 0.05:
                yield {"part of a token": name, "ms": f"{milliseconds:.1f}"}


def _packages(cells: Cells, figure: str) -> Rows:
    for settings, result in cells.of(figure):
        first = next(iter(result["contenders"].values()))
        for name, found in result["contenders"].items():
            yield {
                "shape": _batch(settings),
                "package": name,
                "bytes": _ratio(found, first, "package_bytes"),
                "dense layer": _ratio(found, first, "dense_layer_bytes"),
            } | {what: f"{ratio:.2f}" for what, ratio in found["against_first"].items()}


def _replays(cells: Cells) -> Rows:
    for _, result in cells.of("replay"):
        for name, way in result["ways"].items():
            yield {
                "kernels": name,
                "one thread, s": f"{way['replay_s']['1']:.2f}",
                "two threads, s": f"{way['replay_s']['2']:.2f}",
                "step by step, s": way["one_by_one_s"],
            }


def inference_tables(results: Path) -> dict[str, str]:
    """Return the tables of inference.md by their names in the template."""
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
        "steps": markdown(rows),
        "rounds": str(found[0][0]["rounds"]),
        "processor": f"{machine['processor']}, {', '.join(machine['instructions'])}",
        "installed": ", ".join(f"{name} {size / 1e6:.0f}" for name, size in sizes.items()),
    }


def device_tables(results: Path) -> dict[str, str]:
    """Return the tables of device.md by their names in the template."""
    cells = Cells(results / "device.jsonl")
    steps = cells.of("step")
    return {
        "checks": markdown(_checks(cells)),
        "steps": markdown(row for settings, result in steps for row in _device_steps(settings, result)),
        "memory": markdown(_device_memory(settings, result) for settings, result in steps),
        "whole": markdown(_whole(steps)),
    }


def _checks(cells: Cells) -> Rows:
    for settings, result in cells.of("conformance"):
        passed = result["tests"] - result["failures"] - result["errors"]
        found = f"{passed} of {result['tests']} tests pass"
        yield {"device": settings["device"], "check": "conformance", "result": found}
    for settings, result in cells.of("quantization"):
        equal = all(
            each["codes"] and each["scales"] and each["decoded"] for each in result["matrices"].values()
        )
        found = "the same bits" if equal else "bits differ"
        yield {"device": settings["device"], "check": "NF4 codes, scales, decoding", "result": found}
    for settings, result in cells.of("fisher"):
        found = f"{result['difference']:.1e} of the norm, {100 * result['mask_in_common']:.2f} % of the mask"
        yield {"device": settings["device"], "check": f"Fisher scores, {settings['shape']}", "result": found}


def _device_steps(settings: Settings, result: Result) -> Rows:
    """Yield the times of steps. On a CPU they are processor seconds, since other load disturbs these less."""
    unit = "cpu_s" if settings["device"] == "cpu" else "wall_s"
    seconds = {name: step[unit] for name, step in result["steps"].items()}
    for name in seconds:
        alone = seconds.get(f"{name}, one by one")
        if name == "gradient" or alone is not None:
            yield _on_device(settings) | {
                "step": name,
                "s": f"{seconds[name]:.3f}",
                "one by one": f"{alone:.3f}" if alone else "",
                "ratio": f"{seconds[name] / alone:.2f}" if alone else "",
            }


def _device_memory(settings: Settings, result: Result) -> Row:
    held, overlay = result["resident_bytes"], ("decoded_C", "column_C", "row_C", "order_C")
    megabytes = {
        "codes": held["packed"],
        "scales": held["scales"],
        "tables": held["codes"],
        "sparse values": sum(held[name] for name in overlay),
        "all": sum(held.values()),
        "above, 2 variants": result["steps"]["2 variants"]["above_bytes"],
        "above, gradient": result["steps"]["gradient"]["above_bytes"],
    }
    return _on_device(settings) | {f"{name}, MB": f"{size / 1e6:.0f}" for name, size in megabytes.items()}


def _whole(steps: list[tuple[Settings, Result]]) -> Rows:
    """Yield the memory of all layers, computed from the measurements with one and two layers."""
    found = {settings["layers"]: (settings, result) for settings, result in steps if settings["layers"]}
    if not found.keys() >= {1, 2}:
        return
    (settings, one), (_, two) = found[1], found[2]
    first, second = (sum(each["resident_bytes"].values()) for each in (one, two))
    layers = SHAPES[settings["shape"]].layers
    held = first + (layers - 1) * (second - first)
    above = max(each["steps"]["2 variants"]["above_bytes"] for each in (one, two))
    yield {
        "shape": f"{settings['shape']}, {layers} layers, 1x{settings['tokens']}",
        "sparse values": f"{layers * (two['k'] - one['k']):,}",
        "held, GiB": f"{held / 2**30:.2f}",
        "above, 2 variants, GiB": f"{above / 2**30:.2f}",
        "together, GiB": f"{(held + above) / 2**30:.2f}",
    }


def _on_device(settings: Settings) -> Row:
    return {"batch": _batch(settings), "device": f"{settings['device']}, {settings['dtype']}"}


def _gradient(settings: Settings, result: Result) -> dict[str, str]:
    """Return the row of a gradient step. Without rounds, only its memory was measured."""
    found = {"batch": _batch(settings)}
    forward = result.get("forward_s")
    found["gradient, forward passes"] = f"{result['gradient_s'] / forward:.2f}" if forward else ""
    if forward:
        found["state adds"] = f"{100 * result['rest_s']['0'] / result['gradient_s']:.2f} %"
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

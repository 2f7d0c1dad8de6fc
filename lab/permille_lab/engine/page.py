"""The tables of the engine's page, from finished cells."""

from pathlib import Path

import pandas as pd

from permille_lab.measuring.cells import Cells, Settings


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
    memory = [
        {
            "batch": _batch(settings),
            "step": name,
            "peak, MB": f"{found['peak_bytes'] / 1e6:.0f}",
            "above the package": f"{found['above_package_bytes'] / 1e6:.0f}",
            "anonymous": f"{found['anonymous_peak_bytes'] / 1e6:.0f}",
        }
        for settings, result in cells.of("memory")
        for name, found in result["contenders"].items()
    ]
    decoding = [
        {
            "shape": _shape(settings),
            "tokens/s": result["tokens_per_s"]["overlay"],
            "without overlay": result["tokens_per_s"]["bare"],
            "ratio": f"{result['ratio']:.3f}",
        }
        for settings, result in cells.of("decode")
    ]
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
    named = {"steps": steps, "memory": memory, "decoding": decoding, "replay": replay}
    return {
        name: str(pd.DataFrame(rows).to_markdown(index=False, disable_numparse=True))
        for name, rows in named.items()
    }


def _shape(settings: Settings) -> str:
    layers = settings["layers"]
    return str(settings["shape"]) if layers is None else f"{settings['shape']}/{layers}"


def _batch(settings: Settings) -> str:
    return f"{_shape(settings)}, {settings['sequences']}x{settings['tokens']}"

"""The page of the engine benchmarks, from finished cells: figures with their targets, then all rows."""

import math
import statistics
from typing import Any

from permille_lab.benchmarks.cells import Cells, Result, Settings
from permille_lab.benchmarks.memory_limit import SLOWEST_RATIO, ratio

MIB = 1 << 20
Cell = tuple[Settings, Result]


def page(cells: Cells) -> str:
    """Markdown. Figures that were not measured are left out of the tables, and named at the end."""
    parts = [_HEAD, _machine(cells), "## Against the targets", "", *_summary(cells), ""]
    for title, rows in (
        ("Steps", _step_tables(cells)),
        ("How near the hardware's limit", _limits_tables(cells)),
        ("Eight queries a step", _query_tables(cells)),
        ("Upper half masked, states below kept", _prefix_tables(cells)),
        ("Memory of one step in a fresh process", _memory_tables(cells)),
        ("Under a memory limit that counts page cache", _limit_table(cells)),
        ("Decoding", _decode_table(cells)),
    ):
        if rows:
            parts += [f"## {title}", "", *rows, ""]
    known = {figure for figure, _, _ in cells}
    missing = [what for figure, what in _FIGURES.items() if figure not in known]
    if missing:
        parts += ["## Not measured here", "", *(f"- {what}" for what in missing), ""]
    return "\n".join(parts)


_FIGURES = {
    "step": "steps beside dense passes",
    "queries": "steps of eight queries",
    "prefix": "steps with the upper half masked",
    "limits": "how near the hardware's limit the steps are (`python -m permille_lab.benchmarks.limits`)",
    "memory": "memory of a step",
    "memory limit": "the 7B shape under a memory limit (`python -m permille_lab.benchmarks.memory_limit`)",
    "decode": "decoding",
}


_HEAD = """# The engines beside dense passes, bitsandbytes and MeZO

`make bench-engine` made this page and `engine.json`, which has every number (`python -m permille_lab.benchmarks.engine
--full` takes the full depths). Packages are random in the shape of real models. Seconds are wall time,
medians of interleaved rounds in one process; ratios are within a cell. Processor seconds count all
threads: where they disagree with wall time, others used the machine. Shapes with fewer layers than the
real model's are named with their depth: 1.1B/4 has the widths of TinyLlama and 4 of its 22 layers. Cells may
have been measured one by one; `engine.json` has the rounds and the load of each.
"""


def _machine(cells: Cells) -> str:
    loads = []
    described = ""
    for _, _, result in cells:
        if "machine" not in result:  # of a page of its own
            continue
        before, after = result["machine"]["before"], result["machine"]["after"]
        loads += [before["load_1m"], after["load_1m"]]
        versions = ", ".join(f"{name} {version}" for name, version in after["versions"].items())
        described = (
            f"Machine: {after['processor']}, {after['cores']} cores, {', '.join(after['instructions'])}, "
            f"{after['memory_bytes'] / 1e9:.0f} GB; {versions}."
        )
        if not {"avx512_bf16", "amx_bf16", "bf16"} & set(after["instructions"]):
            described += " It has no bf16 instructions: ratios are against dense float32."
    return f"{described} Load between {min(loads, default=0)} and {max(loads, default=0)}.\n"


def _summary(cells: Cells) -> list[str]:
    lines = ["| figure | target | measured |", "|---|---|---|"]
    for settings, result in cells.of("step"):
        base = result["steps"][result["against"]]["wall_s"]
        for engine, target in (("torch", "1.0"), ("light", "0.75"), ("light-int8", "0.75")):
            found = _best(result["steps"], f"permille {engine} ")
            if found is not None:
                lines.append(
                    f"| step, {_batch(settings)}, {engine}, against two dense passes | at most {target} "
                    f"| {found['wall_s'] / base:.2f} ({settings['rounds']} rounds) |"
                )
    for settings, result in cells.of("prefix"):
        for name, found in result["steps"].items():
            if name.endswith("warm"):
                share = found["wall_s"] / result["steps"]["dense"]["wall_s"]
                lines.append(
                    f"| the same, upper half, {_batch(settings)}, {name} | at most 0.57 "
                    f"| {share:.2f} ({settings['rounds']} rounds) |"
                )
    for settings, result in cells.of("step"):
        for name, found in result["steps"].items():
            if "not_forward" in found:
                target = "5%" if settings["shape"] == "30M" else "0.5%"
                lines.append(
                    f"| not forward, {_batch(settings)}, {name} | at most {target} "
                    f"| {100 * found['not_forward']:.2f}% |"
                )
    for settings, result in cells.of("memory"):
        for name, found in result["contenders"].items():
            if name.startswith("permille") and "failed" not in found:
                above = "above_package_bytes" if "light" in name else "above_imports_bytes"
                what = "the package" if "light" in name else "package and imports"
                lines.append(
                    f"| peak above {what}, {_batch(settings)}, {name} | at most 150 MB "
                    f"| {found[above] / 1e6:.0f} MB (one run) |"
                )
    lines += _limit_summary(cells)
    for settings, result in cells.of("decode"):
        lines += [
            f"| decode with the overlay against without, {_shape(settings)}, {name} | at least 0.95 "
            f"| {found['ratio']:.4f} |"
            for name, found in result["engines"].items()
        ]
    return lines


def _step_tables(cells: Cells) -> list[str]:
    lines: list[str] = []
    for settings, result in cells.of("step"):
        base = result["steps"][result["against"]]
        lines += [
            f"{_batch(settings)} tokens, {settings['threads']} threads, {result['k']} sparse values:",
            "",
            f"| step | seconds | against {result['against']} | processor s | against | not forward | loss |",
            "|---|---|---|---|---|---|---|",
        ]
        for name, found in result["steps"].items():
            rest = f"{100 * found['not_forward']:.2f}%" if "not_forward" in found else ""
            loss = result["losses"].get(name)
            lines.append(
                f"| {name} | {found['wall_s']:.2f} | {found['wall_s'] / base['wall_s']:.2f} "
                f"| {found['cpu_s']:.2f} | {found['cpu_s'] / base['cpu_s']:.2f} "
                f"| {rest} | {'' if loss is None else f'{loss:.4f}'} |"
            )
        lines.append("")
    return lines


def _limits_tables(cells: Cells) -> list[str]:
    """Processor seconds of steps beside those of their products alone, at each library's best rate."""
    lines: list[str] = []
    for settings, result in cells.of("limits"):
        bound = result["products_s"]
        names = list(result["gflops"]["torch"])
        lines += [
            f"{_batch(settings)} tokens: GFLOP/s of one thread on the products of a step, float32, and the "
            "processor seconds of all of them, twice:",
            "",
            f"| library of | {' | '.join(names)} | products of a step, s | against torch's |",
            "|---|" + "---|" * (len(names) + 2),
        ]
        for library, rates in result["gflops"].items():
            shown = " | ".join(f"{rates[name]:.0f}" for name in names)
            ratio_to_dense = bound[library] / bound["torch"]
            lines.append(f"| {library} | {shown} | {bound[library]:.1f} | {ratio_to_dense:.2f} |")
        lines += ["", *_beside_limit(cells, settings, bound), ""]
    return lines


def _beside_limit(cells: Cells, settings: Settings, bound: dict[str, float]) -> list[str]:
    """The float32 steps of the same size; a bound above the step was measured on a busier machine."""
    keys = ("shape", "layers", "sequences", "tokens")
    lines = ["| step | processor s | of its library's products | share |", "|---|---|---|---|"]
    for step_settings, result in cells.of("step"):
        if any(step_settings[key] != settings[key] for key in keys):
            continue
        for name, found in result["steps"].items():
            library = "light" if "light" in name else "torch"
            if name in ("permille torch float32", "permille light float32", "dense float32"):
                share = bound[library] / found["cpu_s"]
                lines.append(f"| {name} | {found['cpu_s']:.1f} | {bound[library]:.1f} | {share:.2f} |")
    return lines if len(lines) > 2 else []


def _query_tables(cells: Cells) -> list[str]:
    lines: list[str] = []
    for settings, result in cells.of("queries"):
        lines += [
            f"{_batch(settings)} tokens, {result['queries']} queries a step:",
            "",
            "| step | seconds | of one query |",
            "|---|---|---|",
        ]
        for name, found in result["steps"].items():
            queries = 1 if name.endswith("1 query") else result["queries"]
            lines.append(f"| {name} | {found['wall_s']:.2f} | {found['wall_s'] / queries:.2f} |")
        lines.append("")
    return lines


def _prefix_tables(cells: Cells) -> list[str]:
    lines: list[str] = []
    for settings, result in cells.of("prefix"):
        dense = result["steps"]["dense"]["wall_s"]
        lines += [
            f"{_batch(settings)} tokens, masked from layer {result['masked_from']} up:",
            "",
            "| step | seconds | against two dense passes | seconds of the fill | MiB kept |",
            "|---|---|---|---|---|",
        ]
        for name, found in result["steps"].items():
            cache = result["caches"].get(name.removeprefix("permille ").removesuffix(", warm"))
            is_warm = cache is not None and name.endswith("warm")
            kept = f"{cache['fill_s']:.2f} | {cache['memory_bytes'] / MIB:.0f}" if is_warm else " | "
            lines.append(f"| {name} | {found['wall_s']:.2f} | {found['wall_s'] / dense:.2f} | {kept} |")
        lines.append("")
    return lines


def _memory_tables(cells: Cells) -> list[str]:
    lines: list[str] = []
    for settings, result in cells.of("memory"):
        lines += [
            f"{_batch(settings)} tokens, a package of {result['package_bytes'] / 1e6:.0f} MB; megabytes:",
            "",
            "| step of | peak | imports | above package | and above imports | anonymous peak | seconds |",
            "|---|---|---|---|---|---|---|",
        ]
        for name, found in result["contenders"].items():
            if "failed" in found:
                lines.append(f"| {name} | failed ({found['failed']}) | | | | | |")
                continue
            numbers = " | ".join(
                f"{found[field] / 1e6:.0f}"
                for field in (
                    "peak_bytes",
                    "imports_bytes",
                    "above_package_bytes",
                    "above_imports_bytes",
                    "anonymous_peak_bytes",
                )
            )
            lines.append(f"| {name} | {numbers} | {found['step_s'][0]:.1f} |")
        lines.append("")
    return lines


def _limit_summary(cells: Cells) -> list[str]:
    lines = []
    for (shape, contender), found in _limit_groups(cells).items():
        free = found.get(None)
        held = [
            limit
            for limit, result in found.items()
            if limit is not None and free is not None and _held_share(limit, result, free) <= SLOWEST_RATIO
        ]
        if held:
            lines.append(
                f"| smallest limit with a step of at most 1.1x, {shape}, {contender} | at most 4.6 GiB "
                f"| {min(held)} GiB |"
            )
    return lines


def _held_share(limit: float, result: Result, free: Result) -> float:
    """A step's time against that without a limit; in processor seconds where the limit is above the peak
    without one, so that nothing is read twice and wall time differs by what others do."""
    if "failed" not in result and limit * (1 << 30) > free["peak_bytes"]:
        return _processor_share(result, free)
    return ratio(result, free) or math.inf


def _processor_share(result: Result, free: Result) -> float:
    slow, fast = (float(statistics.median(found["step_cpu_s"][1:])) for found in (result, free))
    return slow / fast


def _limit_table(cells: Cells) -> list[str]:
    lines: list[str] = []
    for (shape, contender), found in _limit_groups(cells).items():
        free = found.get(None)
        lines += [
            f"{shape}, {contender}; a limit above the peak without one binds nothing: then processor seconds",
            "are what a step costs, and wall time is what others did meanwhile.",
            "",
            "| limit, GiB | peak, GiB | seconds a step | against no limit | in processor seconds |",
            "|---|---|---|---|---|",
        ]
        for limit, result in found.items():
            share = None if free is None else ratio(result, free)
            steps = "ended by the kernel" if "failed" in result else _list(result["step_s"][1:])
            peak = "" if "failed" in result else f"{result['peak_bytes'] / (1 << 30):.2f}"
            against = "" if share is None else f"{share:.2f}"
            failed = free is None or "failed" in result or "failed" in free
            spent = "" if failed or free is None else f"{_processor_share(result, free):.2f}"
            lines.append(f"| {limit or 'none'} | {peak} | {steps} | {against} | {spent} |")
        lines.append("")
    return lines


def _limit_groups(cells: Cells) -> dict[tuple[str, str], dict[float | None, Result]]:
    groups: dict[tuple[str, str], dict[float | None, Result]] = {}
    for settings, result in cells.of("memory limit"):
        if "failed" in result or result["there"]:
            key = (_batch(settings), settings["contender"])
            groups.setdefault(key, {})[settings["limit_gib"]] = result
    return groups


def _decode_table(cells: Cells) -> list[str]:
    lines = ["| shape | engine | with overlay, tokens/s | without | ratio |", "|---|---|---|---|---|"]
    for settings, result in cells.of("decode"):
        for name, found in result["engines"].items():
            rates = found["tokens_per_s"]
            lines.append(
                f"| {_shape(settings)} | {name} | {rates['overlay']:.2f} | {rates['bare']:.2f} "
                f"| {found['ratio']:.4f} |"
            )
    return lines if len(lines) > 2 else []


def _best(steps: dict[str, Any], prefix: str) -> dict[str, Any] | None:
    """The fastest compute type of an engine."""
    found = [step for name, step in steps.items() if name.startswith(prefix)]
    return min(found, key=lambda step: float(step["wall_s"]), default=None)


def _shape(settings: Settings) -> str:
    layers = settings["layers"]
    return f"{settings['shape']}" if layers is None else f"{settings['shape']}/{layers}"


def _batch(settings: Settings) -> str:
    return f"{_shape(settings)}, {settings['sequences']}x{settings['tokens']}"


def _list(seconds: list[float]) -> str:
    return ", ".join(f"{value:.1f}" for value in seconds)

"""Tables of docs/results/service.md, from finished cells."""

from pathlib import Path

from permille_lab.measuring.cells import Cells
from permille_lab.measuring.tables import markdown

_WAYS = {"nginx": "nginx alone", "accel": "the API's, sent by nginx", "uvicorn": "the API's, sent by itself"}


def tables(results: Path) -> dict[str, str]:
    """Return the tables of downloads, polls and statements, and the machine as text."""
    cells = Cells(results / "service.jsonl")
    machines = [result["machine"] for _, _, result in cells if "machine" in result]
    return {
        "downloads": markdown(
            {
                "of": words,
                "MB a second": f"{result[name]['bytes_per_s'] / 1e6:,.0f}",
                "ratio": f"{result[name]['bytes_per_s'] / result['nginx']['bytes_per_s']:.2f}",
                "processor s a GB": f"{result[name]['cpu_s_a_gb']:.2f}",
            }
            for _, result in cells.of("downloads")
            for name, words in _WAYS.items()
        ),
        "polls": markdown(
            {
                "database": settings["database"],
                "devices": f"{result['devices']:,}",
                "polls": f"{result['requests']:,}",
                "failed": result["failed"],
                "seconds": result["seconds"],
                "processor us a poll": result["cpu_us"],
            }
            for settings, result in cells.of("polls")
        ),
        "statements": markdown(
            {"database": settings["database"], **result} for settings, result in cells.of("statements")
        ),
        "machine": f"{machines[0]['cores']} cores of {machines[0]['processor']}, load "
        f"{min(one['load_1m'] for one in machines):g} to {max(one['load_1m'] for one in machines):g}"
        if machines
        else "",
    }

"""The tables of the page on the service's speed, from finished cells."""

from pathlib import Path
from typing import Any

from permille_lab.measuring.cells import Cells
from permille_lab.measuring.tables import markdown

_READS = {
    "async": "bare route, in the event loop",
    "sync": "bare route, in a thread",
    "job": "a job, in the event loop",
    "package": "a package, in the event loop",
    "alias": "an alias, by a device, in the event loop",
}
_WAYS = {"nginx": "nginx alone", "accel": "the API's, sent by nginx", "uvicorn": "the API's, sent by itself"}


def tables(results: Path) -> dict[str, str]:
    """Reads, downloads, polls and statements, and the machine."""
    cells = Cells(results / "service.jsonl")
    machines = [result["machine"] for _, _, result in cells if "machine" in result]
    return {
        "reads": markdown(
            row
            for settings, result in cells.of("reads")
            for row in _rows(result, {"database": settings["database"]})
        ),
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


def _rows(result: Any, first: dict[str, str]) -> list[dict[str, str]]:
    thread, loop = result["sync"], result["async"]
    return [
        {
            **first,
            "of": words,
            "a second": f"{result[name]['per_s']:,.0f}",
            "of the thread": f"{result[name]['per_s'] / thread['per_s']:.2f}",
            "of the loop": f"{result[name]['per_s'] / loop['per_s']:.2f}",
            "p50 ms": f"{1e3 * result[name]['p50_s']:.1f}",
            "p99 ms": f"{1e3 * result[name]['p99_s']:.1f}",
            "processor us": f"{result[name]['cpu_us']:,.0f}",
            "of the thread's": f"{thread['cpu_us'] / result[name]['cpu_us']:.2f}",
            "of the loop's": f"{loop['cpu_us'] / result[name]['cpu_us']:.2f}",
        }
        for name, words in _READS.items()
    ]

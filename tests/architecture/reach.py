"""Count the modules behind a module: `python -m tests.architecture.reach [MODULE ...]`.

These are the project's modules that it imports, directly or not.

Imports within functions count, imports for types only do not. The program reads the sources and imports
nothing. Without arguments, it prints the two numbers of `docs/explanation/architecture.md`.
"""

import ast
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = (".", "service", "workers", "edge_agent", "personal", "lab", "extensions")
TRAINING = "permille_agent.cli.train"
BUILD = "permille_service.work.routes"


def sources() -> dict[str, Path]:
    """Return the files of all modules of the project by name. A package stands for its `__init__`."""
    found = {}
    for room in ROOMS:
        for package in (ROOT / room).glob("permille*/"):
            for path in package.rglob("*.py"):
                name = ".".join(path.relative_to(package.parent).with_suffix("").parts)
                found[name.removesuffix(".__init__")] = path
    return found


def imported(path: Path, known: Mapping[str, Path]) -> set[str]:
    """Return the modules of `known` that a file imports. Blocks of `if TYPE_CHECKING` are ignored."""
    names: set[str] = set()
    waiting: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            waiting += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names & known.keys()


def reached(start: str) -> set[str]:
    """Return all modules of the project that `start` imports, directly or not, and itself."""
    known = sources()
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += imported(known[name], known)
    return seen


def main() -> int:
    """Print the counts, by package."""
    for start in sys.argv[1:] or (TRAINING, BUILD):
        counts = Counter(name.split(".")[0] for name in reached(start))
        print(start, counts.total(), dict(sorted(counts.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())

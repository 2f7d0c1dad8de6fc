"""What an agent without torch weighs: megabytes by distribution, and the time until its engine is open.

    python -m permille_lab.benchmarks.light_size [--install extra] [--out FILE]

Installs this project into an environment of its own, then measures that environment: by default with the
pinned distributions of `requirements/light-agent.txt` and nothing else; with `--install extra` as pip
resolves the extra `agent`. Python itself and pip are not counted; the bytecode that Python writes from the
installed files is counted apart. Times are of fresh processes, the median of several:
`import` is until the agent and the engine's code are imported, `open` until a package is open in the engine.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from permille.quantization import Scheme
from permille_lab.benchmarks.random_packages import Shape, random_package

ROOT = Path(__file__).resolve().parents[3]
PINNED = ROOT / "requirements" / "light-agent.txt"
SHAPE = Shape(hidden=256, inner=704, layers=4, heads=8, kv_heads=4, vocabulary=4096)
NOT_COUNTED = frozenset({"pip", "setuptools"})
RUNS = 7

_SIZES = """
import json
from importlib.metadata import distributions
sizes = {}
for found in distributions():
    paths = {file.locate().resolve() for file in found.files or ()}
    paths = {path for path in paths if path.is_file()}
    bytecode = sum(path.stat().st_size for path in paths if path.suffix == ".pyc")
    every = sum(path.stat().st_size for path in paths)
    sizes[found.metadata["Name"]] = [every - bytecode, bytecode]
print(json.dumps(sizes))
"""

_TIMES = """
import sys, time
begin = time.perf_counter()
import permille_agent.cli.main
from permille.engines.factory import open_engine
from permille.engines.light.engine import LightEngine
imported = time.perf_counter()
from pathlib import Path
from permille.package.blobs import BlobFolder
from permille.package.reader import Package
engine = open_engine(Package.open(BlobFolder(Path(sys.argv[1])), sys.argv[2]))
opened = time.perf_counter()
assert engine.info()["name"] == "light" and "torch" not in sys.modules
print(imported - begin, opened - begin, len(sys.modules))
"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="also write the result here")
    parser.add_argument("--install", choices=["pinned", "extra"], default="pinned")
    arguments = parser.parse_args()
    out: Path | None = arguments.out
    with tempfile.TemporaryDirectory(prefix="permille-light-") as name:
        folder = Path(name)
        python = _installed(folder / "environment", arguments.install)
        package = random_package(folder / "package", SHAPE, density=0.001, scheme=Scheme.NF4, seed=0)
        result = (
            {"install": arguments.install}
            | _sizes(python)
            | _times(python, package.blobs.root, package.digest)
        )
    text = json.dumps(result, indent=2) + "\n"
    print(text, end="")
    if out is not None:
        out.write_text(text)


def _installed(environment: Path, install: str) -> Path:
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    python = environment / "bin" / "python"
    pip: list[Any] = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    if install == "pinned":
        subprocess.run([*pip, "--no-deps", "-r", PINNED, ROOT], check=True)
    else:
        subprocess.run([*pip, "-c", ROOT / "constraints.txt", f"{ROOT}[agent]"], check=True)
    return python


def _sizes(python: Path) -> dict[str, Any]:
    sizes = json.loads(_output([python, "-c", _SIZES]))
    counted = {name: pair for name, pair in sizes.items() if name not in NOT_COUNTED}
    heaviest = sorted(counted.items(), key=lambda item: -item[1][0])
    files, bytecode = (sum(column) / 1e6 for column in zip(*counted.values(), strict=True))
    return {
        "megabytes": round(files, 1),
        "bytecode_megabytes": round(bytecode, 1),
        "by_distribution": {name: round(pair[0] / 1e6, 2) for name, pair in heaviest},
    }


def _times(python: Path, blobs: Path, digest: str) -> dict[str, Any]:
    command = [python, "-c", _TIMES, blobs, digest]
    _output(command)  # Bytecode is written and files come into the page cache.
    runs = [[float(word) for word in _output(command).split()] for _ in range(RUNS)]
    imported, opened, modules = (statistics.median(column) for column in zip(*runs, strict=True))
    return {"import_s": round(imported, 3), "open_s": round(opened, 3), "modules": int(modules), "runs": RUNS}


def _output(command: list[Any]) -> str:
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tempfile.gettempdir())
    return done.stdout


if __name__ == "__main__":
    main()

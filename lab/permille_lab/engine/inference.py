"""How fast and large is a step by an inference engine? Beside ours, torch and plain passes, in one run.

    python -m permille_lab.engine.inference     the 30M shape, 4 layers of the 1.1B one; mostly exporting

A step is the losses of two variants (SPSA, one query). *Dual* makes one pass over the weights, *sequential*
one for each variant; dense float32 is two plain passes of torch without sparse values. Times are medians of
interleaved rounds in one process, processor time of one thread where the machine is busy; memory is the peak
of a fresh process, its mapped package or program included. Needs what `make test-executorch` installs.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import asdict
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from permille.engines.executorch.build import LIBRARY, build
from permille.engines.executorch.program import ProgramShape
from permille.engines.factory import EXECUTORCH, LIGHT, LIGHT_INT8, open_engine
from permille.engines.interface import Engine
from permille.package.blobs import BlobFolder
from permille.package.build import write_manifest
from permille.package.reader import Package
from permille.quantization.types import Scheme
from permille_lab.engine.sizes import Sizes
from permille_lab.measuring.cells import Cells, Result
from permille_lab.measuring.machine import Step, interleaved, machine, resident

_DENSE = "torch, dense float32, two passes"
_TORCH_DUAL = "torch, dual, float32"
_WEIGHTS = ("float32", "int4")
_WAYS = ("dual", "sequential")


def measure(folder: Path, sizes: Sizes) -> Result:
    """Times of all contenders, then memory of those that a device may run."""
    from permille_lab.measuring.dense import batch_loss, dense_model

    before, package = machine(), sizes.package(folder, Scheme.INT4)
    digests = _export(folder, sizes, package)
    batch, values_VK = sizes.batch(package), _variants(package)
    dense = dense_model(package, prepacked=True)
    steps: dict[str, Step] = {
        _DENSE: lambda: [batch_loss(dense, batch) for _ in range(2)],
        _TORCH_DUAL: _torch_dual(package, sizes),
    }
    engines = {name: _opened(folder, sizes, name, digest) for name, digest in digests.items()}
    steps |= {name: partial(engine.losses, values_VK, batch) for name, engine in engines.items()}
    found = interleaved(steps, rounds=sizes.rounds)
    for name in engines:
        found[name]["losses"] = engines[name].losses(values_VK, batch).tolist()
        found[name] |= _memory(folder, sizes, digests[name], name)
    return {"steps": found, "against": _DENSE, "machine": {"before": before, "after": machine()}}


def _export(folder: Path, sizes: Sizes, package: Package) -> dict[str, str]:
    """Packages by the engine that computes with them; each program is made once."""
    from permille.engines.executorch.exporting import export_program

    digests = {LIGHT: package.digest, LIGHT_INT8: package.digest}
    for weights in _WEIGHTS:
        for way in _WAYS:
            name, variants = f"{EXECUTORCH}, {way}, {weights}", 2 if way == "dual" else 1
            known = folder / "programs" / f"{package.digest[7:23]}-{sizes.sequences}x{sizes.tokens}, {name}"
            if not known.exists():
                shape = ProgramShape(variants=variants, rows=variants * sizes.sequences, tokens=sizes.tokens)
                layer = export_program(package, shape, weights=weights)
                manifest = package.manifest.with_addition(layer, {"weights": weights})
                known.parent.mkdir(parents=True, exist_ok=True)
                known.write_text(write_manifest(package.blobs, manifest))
            digests[name] = known.read_text()
    return digests


def _opened(folder: Path, sizes: Sizes, name: str, digest: str) -> Engine:
    package = Package.open(BlobFolder(folder / "blobs"), digest)
    return open_engine(package, name.partition(",")[0], threads=sizes.threads)


def _torch_dual(package: Package, sizes: Sizes) -> Step:
    import torch

    from permille.engines.dual.sparse import dual_model

    torch.set_num_threads(sizes.threads)
    module, batch = dual_model(package), sizes.batch(package)
    values_VK = torch.from_numpy(_variants(package))
    variant_R = torch.arange(2).repeat_interleave(sizes.sequences)
    ids_RT = torch.from_numpy(batch.input_ids_BT).repeat(2, 1)

    def step() -> object:
        with torch.no_grad():
            return module(values_VK, variant_R, ids_RT)

    return step


def _variants(package: Package) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    values_K = package.values()
    moved_K = np.where(
        np.arange(len(values_K)) % 2, values_K * np.float32(1e-2), -values_K * np.float32(1e-2)
    )
    return np.stack([values_K + moved_K, values_K - moved_K])


def _memory(folder: Path, sizes: Sizes, digest: str, name: str) -> dict[str, Any]:
    order = {**asdict(sizes), "folder": str(folder), "digest": digest, "name": name}
    command = [sys.executable, "-m", "permille_lab.engine.inference", "--child", json.dumps(order)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _child(order: dict[str, Any]) -> None:
    folder, digest, name = Path(order.pop("folder")), order.pop("digest"), order.pop("name")
    sizes = Sizes(**order)
    package = Package.open(BlobFolder(folder / "blobs"), digest)
    engine = _opened(folder, sizes, name, digest)
    for _ in range(2):
        engine.losses(_variants(package), sizes.batch(package))
    print(json.dumps({"peak_bytes": resident()["VmHWM"], "torch": "torch" in sys.modules}))


def installed_bytes() -> dict[str, int]:
    """What the distributions that an engine needs take on the disk, without what they depend on."""
    found = {name: _size(metadata.distribution(name)) for name in ("torch", "executorch", "bitsandbytes")}
    wheel = Path(str(metadata.distribution("executorch").locate_file("executorch")))
    found["executorch's runtime"] = sum(path.stat().st_size for path in (wheel / "lib").glob("*.so"))
    return found


def _size(distribution: metadata.Distribution) -> int:
    paths = (Path(str(distribution.locate_file(file))) for file in distribution.files or ())
    return sum(path.stat().st_size for path in paths if path.is_file())


def main() -> int:
    """Measure what is missing and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, default=Path("build/bench"))
    parser.add_argument("--cells", type=Path, default=Path("lab/results/inference.jsonl"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sequences", type=int, action="append", help="of 64 tokens; default 1 and 4")
    parser.add_argument("--shape", choices=("30M", "1.1B"), action="append")
    options = parser.parse_args()
    if options.child:
        _child(json.loads(options.child))
        return 0
    build(LIBRARY)
    cells = Cells(options.cells)
    cells.once("installed", {}, installed_bytes)
    for shape in options.shape or ("30M", "1.1B"):
        for sequences in options.sequences or (1, 4):
            sizes = Sizes(
                shape=shape,
                layers=4 if shape == "1.1B" else None,
                sequences=sequences,
                threads=options.threads,
                rounds=options.rounds,
            )
            cells.once("step", sizes.settings(), partial(measure, options.folder, sizes))
    for settings, result in cells.of("step"):
        base = result["steps"][result["against"]]["cpu_s"]
        for name, found in result["steps"].items():
            print(
                f"| {settings['shape']}, {settings['sequences']}x{settings['tokens']} | {name} "
                f"| {1e3 * found['cpu_s']:.0f} | {found['cpu_s'] / base:.2f} "
                f"| {found.get('peak_bytes', 0) / 2**20:.0f} |"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())

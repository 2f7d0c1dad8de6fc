"""Compare ExecuTorch's time and memory of a step with our engine, torch and dense passes.

    python -m permille_lab.engine.inference     25 minutes for random packages, mostly for exports
    python -m permille_lab.engine.inference --shape SmolLM2-135M

For SmolLM2, the package is of the real model, with a mask by Fisher scores. It needs PERMILLE_DATA and `make
smollm2`. All shapes need the installation of `make test-executorch`.

A step computes the losses of two variants (SPSA, one query). *Dual* programs make one pass over the weights,
*sequential* ones a pass for each variant. Dense float32 means two passes of torch without sparse values, and
bitsandbytes two passes over 4-bit codes.

Times are medians of interleaved rounds in one process. They are processor seconds of one thread, since other
load on the machine disturbs these less. Memory is the peak of a fresh process, with its mapped package or
program.
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

from permille.choices import Embeddings
from permille.engines.executorch.build import LIBRARY, build
from permille.engines.executorch.program import ProgramShape
from permille.engines.factory import EXECUTORCH, LIGHT, LIGHT_INT8, open_engine
from permille.package.blobs import BlobFolder
from permille.package.build import write_manifest
from permille.package.reader import Package
from permille.quantization.types import Scheme
from permille_lab.engine.sizes import Sizes
from permille_lab.measuring.cells import Cells, Result, settings_parser
from permille_lab.measuring.machine import Step, interleaved, machine, resident
from permille_lab.measuring.model_packages import (
    SMOLLM2_FILE,
    Sources,
    folder_from_environment,
    model_package,
)

DENSE, TORCH_DUAL, BITSANDBYTES = "dense float32, two passes", "torch, dual", "bitsandbytes, two passes"
_PROGRAMS = (("float32", "dual", 2), ("float32", "sequential", 1), ("int4", "dual", 2))
SMOLLM2 = "SmolLM2-135M"
# Shape, layers, sequences, tokens. Memory limits the speed with 8 tokens, and arithmetic with 64.
_CELLS: tuple[tuple[str, int | None, int, int], ...] = (
    ("1.1B", 1, 1, 8),
    ("30M", 2, 1, 64),
    ("1.1B", 1, 1, 64),
    *((SMOLLM2, None, sequences, tokens) for sequences in (1, 4) for tokens in (64, 128)),
)


def measure(folder: Path, sizes: Sizes, *, memory: bool) -> Result:
    """Measure the time of each contender and, if `memory`, its memory."""
    before = machine()
    digests = _packages(folder, sizes)
    steps = {name: _step(folder, sizes, name, digest) for name, digest in digests.items()}
    found = interleaved(steps, rounds=sizes.rounds)
    for name, digest in digests.items() if memory else ():
        found[name] |= _memory(folder, sizes, name, digest)
    return {"steps": found, "against": DENSE, "machine": {"before": before, "after": machine()}}


def _packages(folder: Path, sizes: Sizes) -> dict[str, str]:
    """Return the digest of each contender's package. Programs are exported once and then reused."""
    from permille.engines.executorch.exporting import export_program

    package = _package(folder, sizes, Scheme.INT4)
    digests = dict.fromkeys((DENSE, TORCH_DUAL, LIGHT, LIGHT_INT8), package.digest)
    digests[BITSANDBYTES] = _package(folder, sizes, Scheme.NF4).digest
    for weights, way, variants in _PROGRAMS:
        name = f"{EXECUTORCH} {weights}, {way}"
        known = folder / "programs" / f"{package.digest[7:23]}-{sizes.sequences}x{sizes.tokens}-{name}"
        if not known.exists():
            sys.stderr.write(f"  exporting {name}\n")
            shape = ProgramShape(variants=variants, rows=variants * sizes.sequences, tokens=sizes.tokens)
            layer = export_program(package, shape, weights=weights)
            manifest = package.manifest.with_program(layer, {"weights": weights})
            known.parent.mkdir(parents=True, exist_ok=True)
            known.write_text(write_manifest(package.blobs, manifest))
        digests[name] = known.read_text()
    return digests


def _package(folder: Path, sizes: Sizes, scheme: Scheme) -> Package:
    if sizes.shape != SMOLLM2:
        return sizes.package(folder, scheme)
    # Imported here, because it must not count in the memory of a process that only runs a step.
    from permille.models.gguf.folder import model_folder

    model = model_folder(SMOLLM2_FILE, folder)
    return model_package(
        Sources(models=model.parent, data=folder_from_environment("PERMILLE_DATA")),
        model.name,
        folder,
        scheme=scheme,
        # bitsandbytes cannot read embeddings in 8 bits.
        embeddings=Embeddings.SOURCE if scheme is Scheme.NF4 else Embeddings.Q8_0,
    )


def _step(folder: Path, sizes: Sizes, name: str, digest: str) -> Step:
    """Open what a contender needs, and return its step."""
    package = Package.open(BlobFolder(folder / "blobs"), digest)
    batch, values_VK = sizes.batch(package), _variants(package)
    if name == TORCH_DUAL:
        return _torch_dual(package, sizes)
    if name not in (DENSE, BITSANDBYTES):
        engine = open_engine(package, name.partition(" ")[0], threads=sizes.threads)
        return partial(engine.losses, values_VK, batch)
    import torch

    from permille_lab.measuring.dense import batch_loss, bitsandbytes_model, dense_model

    torch.set_num_threads(sizes.threads)
    if name == DENSE:
        model = dense_model(package, prepacked=True)
    else:
        model = bitsandbytes_model(package, folder / "linked" / package.digest[7:23])
    return lambda: [batch_loss(model, batch) for _ in range(2)]


def _torch_dual(package: Package, sizes: Sizes) -> Step:
    import torch

    from permille.engines.executorch.exporting import dual_model

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


def _memory(folder: Path, sizes: Sizes, name: str, digest: str) -> dict[str, Any]:
    order = {**asdict(sizes), "folder": str(folder), "digest": digest, "name": name}
    command = [sys.executable, "-m", "permille_lab.engine.inference", "--child", json.dumps(order)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _child(order: dict[str, Any]) -> None:
    folder, digest, name = Path(order.pop("folder")), order.pop("digest"), order.pop("name")
    step = _step(folder, Sizes(**order), name, digest)
    for _ in range(2):
        step()
    print(json.dumps({"peak_bytes": resident()["VmHWM"], "torch": "torch" in sys.modules}))


def installed_bytes() -> dict[str, int]:
    """Return the disk space of the distributions that engines need, without their dependencies."""
    found = {name: _size(metadata.distribution(name)) for name in ("torch", "executorch", "bitsandbytes")}
    wheel = Path(str(metadata.distribution("executorch").locate_file("executorch")))
    found["executorch's runtime"] = sum(path.stat().st_size for path in (wheel / "lib").glob("*.so"))
    found["numpy"] = _size(metadata.distribution("numpy"))
    return found


def _size(distribution: metadata.Distribution) -> int:
    paths = (Path(str(distribution.locate_file(file))) for file in distribution.files or ())
    return sum(path.stat().st_size for path in paths if path.is_file())


def main() -> int:
    """Measure the missing cells."""
    parser = settings_parser(__doc__, "inference")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--shape", choices=sorted({cell[0] for cell in _CELLS}), help="measure only this shape"
    )
    options = parser.parse_args()
    if options.child:
        _child(json.loads(options.child))
        return 0
    build(LIBRARY)
    cells = Cells(options.cells)
    cells.once("installed", {}, installed_bytes)
    shapes = set[str]()
    for shape, layers, sequences, tokens in _CELLS:
        if options.shape not in (None, shape):
            continue
        sizes = Sizes(
            shape=shape, layers=layers, sequences=sequences, tokens=tokens, threads=1, rounds=options.rounds
        )
        first = shape not in shapes
        shapes.add(shape)
        cells.once("step", sizes.settings(), partial(measure, options.folder, sizes, memory=first))
    return 0


if __name__ == "__main__":
    sys.exit(main())

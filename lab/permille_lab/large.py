"""Check that a mask and a package of a 7B model can be made in the memory of a small machine.

    make bench-large
    python -m permille_lab.large --layers 8        # 8 of the 32 layers, for less disk space

A checkpoint of random float16 weights is written tensor by tensor. Each part of a build then runs in a fresh
process: scores (one decoder layer at a time), the mask and its report, the codes, and the package. The check
fails if the peak of a part is above `--memory` bytes. The peak is `ru_maxrss`, which includes mapped files.
Scoring uses few and short sequences. Its time is proportional to the number of passes over the model.

Disk space in bytes per weight: 2 for the checkpoint, 4 for the scores, 1 for the package. `--folder` is
deleted at the end.
"""

import argparse
import json
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from permille.digests import JSON, canonical_json
from permille.errors import InputError
from permille.models.checkpoint import Checkpoint
from permille.models.families import expected_tensors, scoped_tensors
from permille.package.blobs import BlobFolder
from permille.package.build import ChosenMask, plain_tensors, write_package
from permille.package.layers import write_dense, write_mask, write_plain
from permille.package.limits import Role
from permille.package.manifest import Layer, Quantization
from permille.package.reader import verify_package
from permille.quantization import default_group_size, quantize
from permille.quantization.types import Scheme
from permille_lab.measuring.random_packages import SHAPES

_POOL = 1 << 23
_GIB = 1 << 30


def write_checkpoint(folder: Path, config: dict[str, JSON]) -> None:
    """Write a model folder of random float16 weights.

    Each tensor is cut from one pool of random numbers, at a random offset, since drawing all would be slow.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    shapes = expected_tensors(config)
    entries: dict[str, JSON] = {}
    at = 0
    for name, shape in shapes.items():
        entries[name] = {"dtype": "F16", "shape": list(shape), "data_offsets": [at, at + 2 * prod(shape)]}
        at += 2 * prod(shape)
    header = canonical_json(entries)
    rng = np.random.default_rng(0)
    pool = (rng.standard_normal(_POOL, np.float32) * np.float32(0.02)).astype("<f2")
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for name, shape in shapes.items():
            if name.endswith("norm.weight"):
                file.write(np.ones(shape, "<f2").tobytes())
                continue
            for part in _parts(pool, prod(shape), int(rng.integers(_POOL))):
                file.write(part.data)


def _parts(pool: NDArray[np.float16], size: int, start: int) -> Iterator[NDArray[np.float16]]:
    while size:
        part = pool[start : start + size]
        yield part
        size, start = size - part.size, 0


def _scores(options: argparse.Namespace) -> None:
    """Compute Fisher scores layer by layer, and store them as a blob."""
    from permille.models.layerwise import LayerStream
    from permille.sensitivity.fisher import fisher_scores
    from permille.sensitivity.scores import put_scores
    from permille.sensitivity.streamed import StreamedModel

    stream = LayerStream(Checkpoint(options.folder / "model"))
    model = StreamedModel(stream=stream, hidden_bytes=options.memory // 4)
    vocabulary = SHAPES[options.shape].vocabulary
    tokens_NT = np.random.default_rng(1).integers(0, vocabulary, (options.sequences, options.length))
    scores = fisher_scores(model, tokens_NT, spill_dir=options.folder / "spill", progress=_progress)
    _note(options, "scores", put_scores(_blobs(options), scores))


def _mask(options: argparse.Namespace) -> None:
    """Select the mask and compute its report."""
    from permille.sensitivity.coverage import mask_report
    from permille.sensitivity.masks import select_mask
    from permille.sensitivity.scores import load_scores

    blobs, checkpoint = _blobs(options), Checkpoint(options.folder / "model")
    scores = load_scores(blobs.path(_read_note(options, "scores")))
    mask = select_mask(scores, "fisher", 0.001)
    mask_report(scores, mask)
    np.savez(options.folder / "mask.npz", allow_pickle=False, **mask)
    write_mask(blobs, mask, [name for name, _ in scoped_tensors(checkpoint.config)])


def _codes(options: argparse.Namespace) -> None:
    """Quantize every linear to NF4, and store the other tensors unchanged."""
    blobs, checkpoint = _blobs(options), Checkpoint(options.folder / "model")
    how = _scheme()
    names = [name for name, _ in scoped_tensors(checkpoint.config)]
    coded = (
        (name, quantize(checkpoint.float32(name), how.name, how.group_size, name=name)) for name in names
    )
    layers = (write_dense(blobs, coded, how), write_plain(blobs, plain_tensors(checkpoint)))
    for layer in layers:
        _note(options, layer.role.value, f"{layer.digest} {layer.size_bytes}")


def _package(options: argparse.Namespace) -> None:
    """Write the masked values and the manifest, and verify the package."""
    blobs, checkpoint = _blobs(options), Checkpoint(options.folder / "model")
    with np.load(options.folder / "mask.npz", allow_pickle=False) as found:
        chosen = ChosenMask(indices=dict(found), method="fisher", density="0.001", scope="all")
    layers = (_layer(options, Role.DENSE), _layer(options, Role.PLAIN))
    manifest = write_package(blobs, checkpoint, chosen, layers, _scheme())
    verify_package(blobs, manifest.digest)


_PARTS: dict[str, Callable[[argparse.Namespace], None]] = {
    "scores": _scores,
    "mask": _mask,
    "codes": _codes,
    "package": _package,
}


def _scheme() -> Quantization:
    return Quantization(name=Scheme.NF4, group_size=default_group_size(Scheme.NF4))


def _layer(options: argparse.Namespace, role: Role) -> Layer:
    digest, size = _read_note(options, role.value).split()
    return Layer(role=role, digest=digest, size_bytes=int(size))


def _blobs(options: argparse.Namespace) -> BlobFolder:
    return BlobFolder(options.folder / "blobs")


def _note(options: argparse.Namespace, name: str, text: str) -> None:
    (options.folder / f"{name}.note").write_text(text)


def _read_note(options: argparse.Namespace, name: str) -> str:
    return str((options.folder / f"{name}.note").read_text())


def _progress(done: int, total: int) -> None:
    print(f"{time.strftime('%H:%M:%S')} sequence {done}/{total}", file=sys.stderr)


@contextmanager
def _removed(folder: Path) -> Iterator[None]:
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(options: argparse.Namespace, arguments: list[str]) -> None:
    config = SHAPES[options.shape].with_layers(options.layers).config()
    begun = time.monotonic()
    write_checkpoint(options.folder / "model", config)
    size = (options.folder / "model" / "model.safetensors").stat().st_size
    print(f"checkpoint: {size / _GIB:.1f} GiB, written in {time.monotonic() - begun:.0f} s", flush=True)
    for part in _PARTS:
        command = [sys.executable, "-m", "permille_lab.large", *arguments, "--part", part]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
        if found["peak_bytes"] > options.memory:
            raise InputError(f"The part {part} used {found['peak_bytes']} of {options.memory} bytes.")
        print(
            f"{part}: peak {found['peak_bytes'] / _GIB:.2f} GiB resident, "
            f"{found['cpu_s']:.0f} s of processors in {found['wall_s']:.0f} s",
            flush=True,
        )


def main() -> int:
    """Run all parts in child processes, or with `--part` one part in this process."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="7B")
    parser.add_argument("--layers", type=int, default=None, help="fewer decoder layers of the same width")
    parser.add_argument("--sequences", type=int, default=2)
    parser.add_argument("--length", type=int, default=16)
    parser.add_argument("--memory", type=int, default=12 * _GIB)
    parser.add_argument("--folder", type=Path, default=Path("build/large"))
    parser.add_argument("--part", choices=sorted(_PARTS))
    options = parser.parse_args()
    if options.part is None:
        with _removed(options.folder):
            _run(options, sys.argv[1:])
        return 0
    begun = time.monotonic()
    _PARTS[options.part](options)
    used = resource.getrusage(resource.RUSAGE_SELF)
    figures = {
        "peak_bytes": used.ru_maxrss * 1024,
        "cpu_s": used.ru_utime + used.ru_stime,
        "wall_s": time.monotonic() - begun,
    }
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())

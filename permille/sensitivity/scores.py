"""Scores: one float32 a weight in scope, in one flat array that is memory or a mapped file; and their file.

Sequences are summed in shards by their number; the sums of the shards are added in their order, in float32.
It needs neither torch nor a model.

The file is safetensors with float32 tensors [N, K] in tensor_id order (FORMAT 4.1), so any safetensors
library reads it. Scores are the input of every mask: with the same file, every machine selects the same
weights.
"""

import math
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from permille.errors import InputError
from permille.files import fsync_folder
from permille.package.blobs import BlobFolder
from permille.package.safetensors_io import SafetensorsFile
from permille.tensors import release, safetensors_header

Shapes = Sequence[tuple[str, tuple[int, int]]]

_CHUNK = 1 << 22
IN_MEMORY_BYTES = 4 << 30
SHARD_SEQUENCES = 16
_MOST_SHARDS = 64  # each leaves an array as large as the scores, until they are added
_FLOPS = 8  # a token and weight: forward 2, backward 4, the forward again for recomputed activations 2


class Scores(Mapping[str, NDArray[np.float32]]):
    """Scores [N, K] by tensor name, in tensor_id order: views of `flat`."""

    def __init__(self, shapes: Shapes, flat: NDArray[np.float32], file: BinaryIO | None = None) -> None:
        """
        Args:
            file: an open file without a name that `flat` maps, header included: `put_scores` stores it.

        Raises:
            InputError: `flat` is not float32 of the size that the shapes add up to.
        """
        self.shapes = tuple(shapes)
        self.flat = flat
        self.file = file
        size = sum(math.prod(shape) for _, shape in self.shapes)
        if flat.shape != (size,) or flat.dtype != np.float32:
            raise InputError(f"expected {size} float32 scores, got {flat.dtype} {flat.shape}")
        self._views: dict[str, NDArray[np.float32]] = {}
        start = 0
        for name, shape in self.shapes:
            self._views[name] = flat[start : start + math.prod(shape)].reshape(shape)
            start += math.prod(shape)

    def __getitem__(self, name: str) -> NDArray[np.float32]:
        release(self.flat)  # whoever goes from tensor to tensor holds one in memory
        return self._views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)

    def freeze(self) -> None:
        """Make all of them read-only."""
        for array in (self.flat, *self._views.values()):
            array.flags.writeable = False


def zero_scores(shapes: Shapes, *, spill_dir: Path | None = None) -> Scores:
    """Scores of 0: in memory, or in an unnamed mapped file of `spill_dir` if larger than 4 GiB.

    The file has no name: it goes away with the scores, also if the process is killed. It begins with the
    header of FORMAT 4.1, so that `put_scores` need not write it again.
    """
    size = sum(math.prod(shape) for _, shape in shapes)
    if spill_dir is None or size * 4 <= IN_MEMORY_BYTES:
        return Scores(shapes, np.zeros(size, np.float32))
    spill_dir.mkdir(parents=True, exist_ok=True)
    file = _unnamed_file(spill_dir)
    header = _header(shapes)
    file.write(header)
    file.truncate(len(header) + size * 4)
    flat = np.memmap(file, dtype="<f4", mode="r+", offset=len(header), shape=(size,))
    return Scores(shapes, flat, file)


def _unnamed_file(folder: Path) -> BinaryIO:
    try:
        descriptor = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
    except OSError:  # a file system that knows no such files
        return tempfile.TemporaryFile(dir=folder, buffering=0)
    return os.fdopen(descriptor, "r+b", buffering=0)


def save_scores(path: Path, scores: Scores) -> None:
    """Write the file: temporary in the same folder, fsync, rename. `path` is whole or as it was before."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.writelines(_file_parts(scores))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def put_scores(blobs: BlobFolder, scores: Scores) -> str:
    """Store the same bytes as a blob; returns its digest. Scores of a mapped file are frozen by it."""
    if scores.file is not None:
        scores.freeze()
        return blobs.put_unnamed(scores.file)
    with blobs.writer() as writer:
        for part in _file_parts(scores):
            writer.write(part)
        digest: str = writer.commit()
    return digest


def load_scores(path: Path) -> Scores:
    """Scores mapped from a file: read-only, and in memory only as far as they are touched.

    Raises:
        PackageError: the file breaks a rule of FORMAT 4.1.
        InputError: it holds anything but matrices.
    """
    file = SafetensorsFile(path, dtypes=["F32"])
    shapes: list[tuple[str, tuple[int, int]]] = []
    for name, spec in file.specs.items():
        if len(spec.shape) != 2 or 0 in spec.shape:
            raise InputError(f"{name}: expected a matrix of scores, got shape {spec.shape}")
        shapes.append((name, (spec.shape[0], spec.shape[1])))
    size = sum(math.prod(shape) for _, shape in shapes)
    start = path.stat().st_size - size * 4
    return Scores(shapes, np.memmap(path, dtype="<f4", mode="r", offset=start, shape=(size,)))


@dataclass(frozen=True, slots=True)
class PartialSums:
    """Sum of the finished shards that a stopped Fisher job leaves, under a name that says of what.

    One file `<fingerprint>-<shards>.safetensors` a job; a new one is whole before the old one goes. A sum of
    anything else (another model, other sequences) has another fingerprint, and is neither used nor touched.
    `folder` None keeps nothing.
    """

    folder: Path | None
    fingerprint: str

    @classmethod
    def open(cls, folder: Path | None, *, fingerprint: str) -> "PartialSums":
        """Make the folder where it is missing."""
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        return cls(folder, fingerprint)

    def load_into(self, total: Scores) -> int:
        """Copy the newest sum into `total`; returns how many shards it holds (0: none, `total` is untouched).

        Raises:
            PackageError, InputError: the file is not what was saved.
        """
        found = self._found()
        if not found:
            return 0
        shards, path = max(found.items())
        saved = load_scores(path)
        if saved.shapes != total.shapes:
            raise InputError(
                f"expected the sums of {len(total.shapes)} tensors in {path.name}, got other ones"
            )
        for name in total:
            np.copyto(total[name], saved[name])
        return shards

    def save(self, total: Scores, shards: int) -> None:
        """Keep the sum of the first `shards` shards, then drop the older one."""
        if self.folder is None:
            return
        older = self._found()
        save_scores(self.folder / f"{self.fingerprint}-{shards}.safetensors", total)
        for number, path in older.items():
            if number != shards:
                path.unlink()

    def _found(self) -> dict[int, Path]:
        if self.folder is None:
            return {}
        pattern = re.compile(re.escape(self.fingerprint) + r"-(\d{1,9})\.safetensors")
        matches = ((pattern.fullmatch(path.name), path) for path in self.folder.iterdir())
        return {int(match[1]): path for match, path in matches if match}


def _file_parts(scores: Scores) -> Iterator[bytes]:
    yield _header(scores.shapes)
    for start in range(0, scores.flat.size, _CHUNK):
        yield scores.flat[start : start + _CHUNK].astype("<f4", copy=False).tobytes()
        release(scores.flat)


def _header(shapes: Shapes) -> bytes:
    return safetensors_header({name: ("F32", shape) for name, shape in shapes})


def fisher_work(tokens: int, parameters: int) -> float:
    """Floating-point operations that scoring takes, roughly."""
    return float(_FLOPS) * tokens * parameters


def shard_ranges(sequences: int) -> list[range]:
    """The shards of a job of so many sequences: a function of the number alone, not of who does the work.

    Shards of 16 sequences; of more than 1,024 sequences, 64 shards of a multiple of 16.

    Raises:
        InputError: no sequence.
    """
    if sequences < 1:
        raise InputError(f"Scores need at least 1 sequence, got {sequences}.")
    size = SHARD_SEQUENCES * max(1, -(-sequences // (SHARD_SEQUENCES * _MOST_SHARDS)))
    return [range(start, min(start + size, sequences)) for start in range(0, sequences, size)]


def join_shards(paths: Sequence[Path], sequences: int, *, spill_dir: Path | None = None) -> Scores:
    """Scores of the sums in files, one a shard and in their order: the bits of `fisher_scores`.

    Raises:
        PackageError, InputError: a file holds no such sums, or those of other tensors.
    """
    total = zero_scores(load_scores(paths[0]).shapes, spill_dir=spill_dir)
    for path in paths:
        partial = load_scores(path)
        if partial.shapes != total.shapes:
            raise InputError(f"expected sums of {len(total.shapes)} tensors in {path.name}, got other ones")
        merge(total, partial)
    divide(total, sequences)
    return total


def merge(total: Scores, partial: Scores) -> None:
    """total += partial, in float32; call it in the order of the shards, the first onto zeros."""
    for name in total:
        sum_NK = total[name]
        np.add(sum_NK, partial[name], out=sum_NK)


def divide(total: Scores, sequences: int) -> None:
    """The sum of squares becomes their mean: one float32 division a score."""
    for name in total:
        mean_NK = total[name]
        np.divide(mean_NK, np.float32(sequences), out=mean_NK)

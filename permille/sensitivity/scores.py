"""Scores: one float32 for each weight in scope, in a flat array in memory or in a mapped file.

The score of a weight is its mean squared gradient over sequences (`permille.sensitivity.fisher`). The squares
are summed in shards of sequences, and the sums of the shards are added in their order, in float32. This
module needs neither torch nor a model.

The file is safetensors with float32 tensors [N, K] in tensor_id order (FORMAT 4.1), so any safetensors
library reads it. With the same file, every machine selects the same weights.
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
from permille.files import write_atomic_parts
from permille.package.blobs import BlobFolder
from permille.package.safetensors_io import SafetensorsFile
from permille.tensors import release, safetensors_header

Shapes = Sequence[tuple[str, tuple[int, int]]]

_CHUNK = 1 << 22
IN_MEMORY_BYTES = 4 << 30
# The number of sequences in a shard. It affects the result, because float32 sums depend on how their terms
# are grouped.
SHARD_SEQUENCES = 16
# The sum of a shard is as large as the scores, and is stored until all sums are added. So limit the number of
# shards.
_MOST_SHARDS = 64
_FLOPS = 8  # per token and weight: forward 2, backward 4, recomputed forward 2


class Scores(Mapping[str, NDArray[np.float32]]):
    """Scores [N, K] by tensor name, in tensor_id order: views of `flat`."""

    def __init__(self, shapes: Shapes, flat: NDArray[np.float32], file: BinaryIO | None = None) -> None:
        """Divide `flat` into the scores of single tensors, without a copy.

        Args:
            flat: float32, of the size that the shapes add up to.
            file: the open file without a name that `flat` maps, or None if `flat` is in memory. The file also
                has the header, so `put_scores` can store it as it is.
        """
        self.shapes = tuple(shapes)
        self.flat = flat
        self.file = file
        self._views: dict[str, NDArray[np.float32]] = {}
        start = 0
        for name, shape in self.shapes:
            self._views[name] = flat[start : start + math.prod(shape)].reshape(shape)
            start += math.prod(shape)

    def __getitem__(self, name: str) -> NDArray[np.float32]:
        release(self.flat)  # so a caller that goes from tensor to tensor holds only one in memory
        return self._views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)

    def freeze(self) -> None:
        """Make all scores read-only."""
        for array in (self.flat, *self._views.values()):
            array.flags.writeable = False


def zero_scores(shapes: Shapes, *, spill_dir: Path | None = None) -> Scores:
    """Return scores of 0: in memory, or in an unnamed mapped file of `spill_dir` if larger than 4 GiB.

    The file disappears with the scores, even if the process is killed. It starts with the header of FORMAT
    4.1, so `put_scores` need not write it again.
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
    except OSError:  # the file system has no unnamed files
        return tempfile.TemporaryFile(dir=folder, buffering=0)
    return os.fdopen(descriptor, "r+b", buffering=0)


def save_scores(path: Path, scores: Scores) -> None:
    """Write the scores to a file atomically and durably."""
    write_atomic_parts(path, _file_parts(scores), mode=0o600)


def put_scores(blobs: BlobFolder, scores: Scores) -> str:
    """Store the scores as a blob and return its digest. Scores in a mapped file become read-only."""
    if scores.file is not None:
        scores.freeze()
        return blobs.put_unnamed(scores.file)
    with blobs.writer() as writer:
        for part in _file_parts(scores):
            writer.write(part)
        digest: str = writer.commit()
    return digest


def load_scores(path: Path) -> Scores:
    """Map the scores of a file. They are read-only, and only the touched parts are in memory.

    Raises:
        PackageError: the file breaks a rule of FORMAT 4.1.
        InputError: a tensor is not a matrix.
    """
    file = SafetensorsFile(path, dtypes=["F32"])
    shapes: list[tuple[str, tuple[int, int]]] = []
    for name, spec in file.specs.items():
        if len(spec.shape) != 2 or 0 in spec.shape:
            raise InputError(f"{name}: expected a matrix of scores, got shape {spec.shape}")
        shapes.append((name, (spec.shape[0], spec.shape[1])))
    size = sum(math.prod(shape) for _, shape in shapes)
    # The tensors fill the rest of the file after the header.
    start = path.stat().st_size - size * 4
    return Scores(shapes, np.memmap(path, dtype="<f4", mode="r", offset=start, shape=(size,)))


@dataclass(frozen=True, slots=True)
class PartialSums:
    """The sum of a stopped job, in a folder.

    A sum has one file `<fingerprint>-<done>.safetensors`, where `done` counts shards, or sequences of a
    shard. A new file is whole before the old one is removed. The sum of another job has another fingerprint,
    and is neither used nor touched. Without a folder, nothing is kept.
    """

    folder: Path | None
    fingerprint: str

    @classmethod
    def open(cls, folder: Path | None, *, fingerprint: str) -> "PartialSums":
        """Create the folder if it is missing."""
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        return cls(folder, fingerprint)

    def within(self, shard: int) -> "PartialSums":
        """Return the sums of the sequences of a shard, which is not finished yet."""
        return PartialSums(self.folder, f"{self.fingerprint}-{shard}")

    def load_into(self, total: Scores) -> int:
        """Copy the newest sum into `total`, and return what it counts.

        If there is no sum, return 0 and leave `total` unchanged.

        Raises:
            PackageError, InputError: the file is not what was saved.
        """
        found = self._found()
        if not found:
            return 0
        done, path = max(found.items())
        saved = load_scores(path)
        if saved.shapes != total.shapes:
            raise InputError(f"{path} has the sums of other tensors. Remove it to begin again.")
        for name in total:
            np.copyto(total[name], saved[name])
        return done

    def save(self, total: Scores, done: int) -> None:
        """Store the sum, then remove the older ones, also those `within` a shard."""
        if self.folder is None:
            return
        # The new sum is durable before the old one goes, so a kill at any moment leaves one of them.
        new = self.folder / f"{self.fingerprint}-{done}.safetensors"
        save_scores(new, total)
        for path in self.folder.glob(f"{self.fingerprint}-*.safetensors"):
            if path != new:
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
    """Estimate the floating-point operations of scoring."""
    return float(_FLOPS) * tokens * parameters


def shard_ranges(sequences: int) -> list[range]:
    """Return the shards of a job with this number of sequences.

    A shard has 16 sequences. If there are more than 1,024 sequences, there are at most 64 shards, and the
    size of a shard is a multiple of 16. The last shard may be smaller:

        >>> shard_ranges(20)
        [range(0, 16), range(16, 20)]

    Raises:
        InputError: the number is below 1.
    """
    if sequences < 1:
        raise InputError(f"Scores need at least 1 sequence, got {sequences}.")
    size = SHARD_SEQUENCES * max(1, -(-sequences // (SHARD_SEQUENCES * _MOST_SHARDS)))
    return [range(start, min(start + size, sequences)) for start in range(0, sequences, size)]


def join_shards(paths: Sequence[Path], sequences: int, *, spill_dir: Path | None = None) -> Scores:
    """Add up the sums of all shards, and return the scores.

    The scores have the same bits as in `fisher_scores`.

    Args:
        paths: the files with the sums, in the order of the shards.
        sequences: the number of sequences of all shards.
        spill_dir: the folder for scores larger than 4 GiB, which are mapped. None keeps them in memory.

    Raises:
        PackageError, InputError: a file does not hold sums, or holds sums of other tensors.
    """
    total = zero_scores(load_scores(paths[0]).shapes, spill_dir=spill_dir)
    # Shards may end in any order; their sums are added in the order of the sequences.
    for path in paths:
        partial = load_scores(path)
        if partial.shapes != total.shapes:
            raise InputError(f"expected sums of {len(total.shapes)} tensors in {path.name}, got other ones")
        merge(total, partial)
    divide(total, sequences)
    return total


def merge(total: Scores, partial: Scores) -> None:
    """Add `partial` to `total` in float32. Call it in the order of the shards, starting from zeros."""
    for name in total:
        sum_NK = total[name]
        np.add(sum_NK, partial[name], out=sum_NK)


def divide(total: Scores, sequences: int) -> None:
    """Turn the sum of squares into their mean, by one float32 division for each score."""
    for name in total:
        mean_NK = total[name]
        np.divide(mean_NK, np.float32(sequences), out=mean_NK)

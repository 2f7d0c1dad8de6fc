"""Hidden states before the first masked layer, kept from step to step. numpy only, for every engine.

No sparse value reaches those layers, so a sequence has the same hidden states there whatever the variant, the
sign, the query or the epoch. One entry a sequence; the least recently used one leaves memory first, to a file
where a folder is given, else for good.

An entry is a function of the token ids and of the scope that the engine names: package, first masked
layer, dtype and engine. A file that is gone, cut or changed is a miss; the engine computes again. Files hold
what can be turned back into a user's text: they are readable by their owner alone, `close` deletes them, and
a cache that is made on a folder deletes what a killed process left in it. That is all that this module does:
whoever names a folder that is not used again removes it (the agent does at the end of a run and at the
beginning of any). Deleting does not overwrite: what the files held stays on the medium until the file system
uses the room again. A folder belongs to one cache.
"""

import hashlib
import io
import os
import shutil
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from permille.errors import InputError

Hidden = NDArray[np.generic]

_SUFFIX = ".hidden"
_DIGEST_BYTES = 32
_FREE_BYTES = 512 << 20
"""Left free on the file system: a cache that fills a disk takes the room of what must be stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCounters:
    """What a cache has done since it was made.

    Attributes:
        hits: rows found, in memory or in a file.
        misses: rows not found.
        spilled: rows written to files.
        rejected: files that could not be written, or were gone, cut or changed when read.
        memory_bytes, disk_bytes: held now.
        fill_s: seconds that engines spent on computing what was put.
    """

    hits: int = 0
    misses: int = 0
    spilled: int = 0
    rejected: int = 0
    memory_bytes: int = 0
    disk_bytes: int = 0
    fill_s: float = 0.0


class PrefixCache:
    """A bounded store of arrays by key. Safe to use from several threads."""

    def __init__(
        self,
        memory_bytes: int,
        *,
        folder: Path | None = None,
        disk_bytes: int = 0,
        rows_alone: bool = False,
    ) -> None:
        """
        Args:
            memory_bytes: bound on arrays in memory; one larger than it is not kept there.
            rows_alone: engines compute each missing row by itself, so that its bits are a function of the row
                and not of the batch in which it was first met: a resumed run then has the bits of one that
                was not interrupted. Filling costs some more.
            folder: where rows go that memory has no room for; made if need be, for its owner alone.
            disk_bytes: bound on the files. None is written that would leave less than 512 MiB free.

        Raises:
            InputError: a negative bound, or a bound on files without a folder.
            OSError: the folder cannot be made or read.
        """
        if memory_bytes < 0 or disk_bytes < 0 or (disk_bytes and folder is None):
            raise InputError(
                "expected bounds of 0 bytes or more, and a folder for files, "
                f"got memory_bytes {memory_bytes}, disk_bytes {disk_bytes}, folder {folder}"
            )
        self.rows_alone = rows_alone
        self._memory_bytes = memory_bytes
        self._lock = threading.Lock()
        self._rows: OrderedDict[bytes, Hidden] = OrderedDict()
        self._held = 0
        self._files = None if folder is None or not disk_bytes else _Files(folder, disk_bytes)
        self._hits = self._misses = 0
        self._fill_s = 0.0

    def get(self, key: bytes) -> Hidden | None:
        """The array that was put under this key, read-only, or None; never another array."""
        with self._lock:
            row = self._rows.get(key)
            if row is not None:
                self._rows.move_to_end(key)
            elif self._files is not None:
                row = self._files.read(key)
                if row is not None:
                    self._keep(key, row)
            if row is None:
                self._misses += 1
            else:
                self._hits += 1
            return row

    def put(self, key: bytes, hidden: Hidden, *, fill_s: float = 0.0) -> None:
        """Keep a copy of `hidden`, any shape and plain dtype; `fill_s` is what it took to compute."""
        row = np.array(hidden, order="C", copy=True)
        row.setflags(write=False)
        with self._lock:
            self._fill_s += fill_s
            self._keep(key, row)

    def together(self, missing: list[int]) -> list[list[int]]:
        """Which of the missing rows an engine computes in one pass."""
        if self.rows_alone:
            return [[row] for row in missing]
        return [missing] if missing else []

    def counters(self) -> PrefixCounters:
        """What happened so far, and what is held now."""
        with self._lock:
            files = self._files
            return PrefixCounters(
                hits=self._hits,
                misses=self._misses,
                spilled=files.spilled if files else 0,
                rejected=files.rejected if files else 0,
                memory_bytes=self._held,
                disk_bytes=files.held if files else 0,
                fill_s=self._fill_s,
            )

    def close(self) -> None:
        """Forget everything and delete the files. The cache is empty afterwards, and may be used on."""
        with self._lock:
            self._rows.clear()
            self._held = 0
            if self._files is not None:
                self._files.clear()

    def _keep(self, key: bytes, row: Hidden) -> None:
        replaced = self._rows.pop(key, None)
        self._held += row.nbytes - (0 if replaced is None else replaced.nbytes)
        self._rows[key] = row
        while self._held > self._memory_bytes:
            oldest, out = self._rows.popitem(last=False)
            self._held -= out.nbytes
            if self._files is not None:
                self._files.write(oldest, out)


def row_key(token_ids: NDArray[np.int64], scope: str) -> bytes:
    """The key of a sequence without its padding: sha256 over the scope and the token ids.

    Args:
        scope: everything else that the hidden states depend on: package, layer, dtype, engine and version.
    """
    ids = np.ascontiguousarray(token_ids, dtype="<i8")
    # The scope's own digest has a fixed length, so no scope and ids run into one another.
    return hashlib.sha256(hashlib.sha256(scope.encode()).digest() + ids.tobytes()).digest()


class _Files:
    """Arrays in a folder, oldest use deleted first. Each file is a digest, then what `np.save` writes."""

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder = folder
        self._limit = limit
        self._sizes: OrderedDict[bytes, int] = OrderedDict()
        self.held = self.spilled = self.rejected = 0
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for left in [*folder.glob(f"*{_SUFFIX}"), *folder.glob(f".*{_SUFFIX}.tmp")]:
            left.unlink(missing_ok=True)

    def write(self, key: bytes, row: Hidden) -> None:
        if key in self._sizes:  # Written when it left memory before; entries do not change.
            self._sizes.move_to_end(key)
            return
        saved = io.BytesIO()
        np.save(saved, row, allow_pickle=False)
        body = saved.getvalue()
        size = _DIGEST_BYTES + len(body)
        if size > self._limit or not self._has_room(size):
            return
        while self.held + size > self._limit:
            self._drop(next(iter(self._sizes)))
        if self._attempt(lambda: self._write(key, body)) is None:
            return
        self._sizes[key] = size
        self.held += size
        self.spilled += 1

    def read(self, key: bytes) -> Hidden | None:
        if key not in self._sizes:
            return None
        row: Hidden | None = self._attempt(lambda: self._read(key))
        if row is None:
            self._drop(key)
        else:
            self._sizes.move_to_end(key)
        return row

    def clear(self) -> None:
        for key in list(self._sizes):
            self._drop(key)

    def _has_room(self, size: int) -> bool:
        free: int | None = self._attempt(lambda: shutil.disk_usage(self._folder).free)
        return free is not None and free - size >= _FREE_BYTES

    def _attempt(self, action: Callable[[], Any]) -> Any:
        """What a disk does wrong costs an entry, never a run."""
        try:
            return action()
        except (OSError, ValueError):
            self.rejected += 1
            return None

    def _write(self, key: bytes, body: bytes) -> bool:
        """No fsync: what a crash tears is found by the digest, and deleted at the next start anyway."""
        descriptor, name = tempfile.mkstemp(dir=self._folder, prefix=".", suffix=f"{_SUFFIX}.tmp")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(_digest(key, body))
                file.write(body)
            Path(name).replace(self._path(key))
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        return True

    def _read(self, key: bytes) -> Hidden:
        content = self._path(key).read_bytes()
        body = content[_DIGEST_BYTES:]
        if len(content) != self._sizes[key] or content[:_DIGEST_BYTES] != _digest(key, body):
            raise ValueError(f"expected the file of {key.hex()} as it was written, got another")
        row: Hidden = np.load(io.BytesIO(body), allow_pickle=False)
        row.setflags(write=False)
        return row

    def _drop(self, key: bytes) -> None:
        self.held -= self._sizes.pop(key)
        self._attempt(lambda: self._path(key).unlink(missing_ok=True))

    def _path(self, key: bytes) -> Path:
        return self._folder / f"{key.hex()}{_SUFFIX}"


def _digest(key: bytes, body: bytes) -> bytes:
    """Over the key too: a file that was renamed is not another sequence's."""
    return hashlib.sha256(key + body).digest()

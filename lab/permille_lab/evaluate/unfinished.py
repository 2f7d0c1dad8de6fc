"""The state of an unfinished run, in a file. A killed run continues from it, with the same result."""

import hashlib
import io
import time
from pathlib import Path
from typing import Any

import torch

from permille.files import write_atomic

EVERY_S = 30.0
"""Seconds between two writes of the state. A killed run loses the steps since the last one."""


class Unfinished:
    """The state of one run: numbers, lists and tensors by name.

    Args:
        folder: folder of such files. None keeps the state in memory only.
        run: all that decides the result of the run. Each run has a file of its own.
    """

    def __init__(self, folder: Path | None, run: str) -> None:
        name = hashlib.sha256(run.encode()).hexdigest()[:16]
        self._path = None if folder is None else folder / f"{name}.pt"
        self._written = time.monotonic()
        self.state: dict[str, Any] = {}
        if self._path is not None and self._path.exists():
            self.state = torch.load(self._path, weights_only=True)

    def keep(self, *, now: bool = False) -> None:
        """Write the state if the last write was `EVERY_S` ago or earlier.

        Args:
            now: write it in any case.
        """
        if self._path is None or not (now or time.monotonic() - self._written >= EVERY_S):
            return
        buffer = io.BytesIO()
        torch.save(self.state, buffer)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(self._path, buffer.getvalue())
        self._written = time.monotonic()

"""What a stopped Fisher job leaves: the sum of its finished shards, under a name that says of what.

One file `<fingerprint>-<shards>.safetensors` a job; a new one is whole before the old one goes. A sum of
anything else (another model, other sequences) has another fingerprint, and is neither used nor touched.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from permille.errors import InputError
from permille.sensitivity.scores import Scores, load_scores, save_scores


@dataclass(frozen=True, slots=True)
class PartialSums:
    """`folder` None keeps nothing."""

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
        np.copyto(total.flat, saved.flat)
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

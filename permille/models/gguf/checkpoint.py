"""A GGUF file that is read as the folder of its conversion, without a copy of the weights in float32.

    checkpoint = GgufCheckpoint(Path("model.gguf"), Path("texts"))
    checkpoint.float32("model.norm.weight")

All contents and the digest are those of the folder that `convert` writes. That folder would be some five
times as large as a file of 4 bits. Each access decodes the tensor again (ADR 41).
"""

import hashlib
import math
from pathlib import Path

import numpy as np

from permille.models.checkpoint import WEIGHTS_FILE, Checkpoint, Entry, read_config
from permille.models.families import expected_tensors, family_of
from permille.models.gguf.config import read_model
from permille.models.gguf.file import GgufFile
from permille.models.gguf.folder import finite, shapes_of, write_texts
from permille.tensors import RawTensor, safetensors_header


class GgufCheckpoint(Checkpoint):
    """A checked GGUF file. Its folder holds the config and the tokenizer, and no weights."""

    has_weights = False

    def __init__(self, path: Path, folder: Path) -> None:
        """Read the file, and write its config and its tokenizer.

        Args:
            path: the GGUF file.
            folder: a folder for this file alone. It is made if it is missing, and its files are replaced.

        Raises:
            InputError: the file is malformed, or has an unsupported family or type.
            OSError: a file cannot be read or written.
        """
        self._model = read_model(GgufFile(path))
        folder.mkdir(parents=True, exist_ok=True)
        write_texts(self._model, folder)
        self.folder, self.config = folder, read_config(folder)
        self.family = family_of(self.config)
        self._header = safetensors_header(
            {name: ("F32", shape) for name, shape in shapes_of(self._model).items()}
        )
        # The positions that the tensors would have in the converted file.
        begin, placed = len(self._header), dict[str, Entry]()
        for name, shape in shapes_of(self._model).items():
            size = 4 * math.prod(shape)
            placed[name] = Entry(file=WEIGHTS_FILE, dtype="F32", shape=shape, begin=begin, size=size)
            begin += size
        self._entries = {name: placed[name] for name in expected_tensors(self.config)}

    def raw(self, name: str) -> RawTensor:
        """Decode a tensor. Raises InputError if a number is not finite."""
        data = finite(self._model, name).view(np.uint8).reshape(-1)
        return RawTensor(name=name, dtype="F32", shape=self.shape(name), data=data)

    def _digest_of(self, name: str) -> str:
        if name != WEIGHTS_FILE:
            return super()._digest_of(name)
        digest = hashlib.sha256(self._header)
        for tensor in self._model.names:
            digest.update(finite(self._model, tensor).data)
        return f"sha256:{digest.hexdigest()}"

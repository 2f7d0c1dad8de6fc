"""The folder of a converted model and its GGUF file, from which a package takes quantized codes.

model = KeptModel(Checkpoint(folder), Path("model.gguf"))
model.codes("model.layers.0.mlp.up_proj.weight")
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType

from permille.models.checkpoint import Checkpoint
from permille.models.families import scoped_tensors, table_names
from permille.models.gguf.config import GgufModel, read_model
from permille.models.gguf.file import GgufFile
from permille.quantization.gguf_blocks import TYPES, codes_of
from permille.quantization.types import QuantizedTensor
from permille.tensors import Q8_0, RawTensor


class KeptModel:
    """A model for `permille.package.build`. Embedding and head keep their codes if the file has Q8_0."""

    def __init__(self, checkpoint: Checkpoint, path: Path) -> None:
        """Read the file.

        Args:
            checkpoint: the folder that was made from the file.
            path: the GGUF file.

        Raises:
            InputError: as for `read_model`.
        """
        self._checkpoint = checkpoint
        self._model = read_model(GgufFile(path))
        self._tables = frozenset(table_names(checkpoint.config))

    @property
    def config(self) -> Mapping[str, Any]:
        """The model's `config.json`."""
        return self._checkpoint.config

    @property
    def names(self) -> tuple[str, ...]:
        """The canonical names of all tensors."""
        return self._checkpoint.names

    def raw(self, name: str) -> RawTensor:
        """Return a tensor of the folder, float32. If embedding or head is Q8_0, return the file's codes."""
        # For embedding and head, a package can store only codes of Q8_0 (FORMAT 4.3). Other types become
        # float32.
        if name not in self._tables or self._model.type(name) is not GGMLQuantizationType.Q8_0:
            return self._checkpoint.raw(name)
        data = self._model.raw(name).reshape(-1)
        return RawTensor(name=name, dtype=Q8_0, shape=self._checkpoint.shape(name), data=data)

    def file(self, name: str, *, limit: int) -> bytes | None:
        """Return the bytes of a small file, or None if the folder does not have it."""
        return self._checkpoint.file(name, limit=limit)

    def check_codes(self) -> None:
        """Check that scheme `source` can keep the codes of all linear layers. Raises InputError."""
        check_kept(self._model)

    def codes(self, name: str) -> QuantizedTensor:
        """Return the codes of a linear layer, bit for bit, with rows in the order of transformers.

        Raises:
            InputError: scheme `source` cannot keep codes of the layer's type, or a scale is not finite.
        """
        return codes_of(self._model.raw(name), self._checkpoint.shape(name)[1])


def check_kept(model: GgufModel) -> None:
    """Check that scheme `source` can keep the codes of all linear layers. Raises InputError."""
    for name, _ in scoped_tensors(model.config):
        kind = model.type(name).name
        if kind not in TYPES:
            raise model.file.refused(
                f"has {model.names[name]!r} as {kind}. Scheme source keeps only {', '.join(TYPES)}. Choose "
                "--scheme nf4"
            )

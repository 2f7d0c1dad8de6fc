"""GGUF files for tests: exported, converted to folders, and rewritten with changes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, quantize

from permille.engines.gguf.export import export_gguf
from permille.models.checkpoint import Checkpoint
from permille.models.families import scoped_tensors
from permille.models.gguf.folder import convert
from permille.package.blobs import BlobFolder
from permille.package.build import ChosenMask, pack_model
from permille.package.reader import Package
from permille.quantization.types import Scheme
from tests.unit.engines.gguf_packages import exported_package


def written(package: Package, folder: Path) -> Path:
    """Write the package as a GGUF file in float32."""
    export_gguf(package, None, folder, kind="f32")
    return folder / "model.gguf"


def coded_file(folder: Path, kinds: Sequence[str], family: str = "llama") -> Path:
    """Write a random model's file. Its linear layers have these types in turn, the tables are Q8_0."""
    package = exported_package(folder / "blobs", family, changes={"intermediate_size": 64})
    return coded(written(package, folder / "float32"), folder / "coded.gguf", kinds)


def coded(path: Path, target: Path, kinds: Sequence[str]) -> Path:
    """Write a file again, with the types of `coded_file`."""
    reader = GGUFReader(path)
    matrices = [tensor for tensor in reader.tensors if len(tensor.shape) == 2]
    names = [tensor.name for tensor in matrices if tensor.name.startswith("blk.")]
    tensors = {}
    for tensor in matrices:
        name = tensor.name
        kind = GGMLQuantizationType[kinds[names.index(name) % len(kinds)] if name in names else "Q8_0"]
        tensors[name] = (quantize(np.array(tensor.data), kind), kind)
    return rewritten(reader, target, tensors)


def packed(path: Path, folder: Path) -> Package:
    """Convert a file, and pack the model with a mask of every eleventh weight."""
    folder.mkdir()
    checkpoint = converted(path, folder / "model")
    indices = {
        name: np.arange(0, rows * columns, 11, dtype=np.uint32)
        for name, (rows, columns) in scoped_tensors(checkpoint.config)
    }
    blobs = BlobFolder(folder / "blobs")
    blobs.root.mkdir()
    mask = ChosenMask(indices=indices, method="random", density=1 / 11)
    return Package.open(blobs, pack_model(blobs, checkpoint, mask, Scheme.INT8))


def converted(path: Path, folder: Path) -> Checkpoint:
    folder.mkdir()
    convert(path, folder)
    return Checkpoint(folder)


def rewritten(
    reader: GGUFReader,
    path: Path,
    tensors: dict[str, tuple[Any, GGMLQuantizationType]],
    keys: dict[str, Any] | None = None,
) -> Path:
    """Write the file again. Tensors and keys are added or replace those of the file.

    A key's value may be a tuple: the value, its type, and for a list that of its items.
    """
    own = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    own |= keys or {}
    writer = GGUFWriter(path, own.pop("general.architecture"))
    writer.data_alignment = own.get("general.alignment", writer.data_alignment)
    for name, value in own.items():
        match value:
            case bool():
                writer.add_bool(name, value)
            case int():
                writer.add_uint32(name, value)
            case float():
                writer.add_float32(name, value)
            case str():
                writer.add_string(name, value)
            case list():
                writer.add_array(name, value)
            case tuple():
                writer.add_key_value(name, *value)
    for tensor in reader.tensors:
        data, kind = tensors.get(tensor.name, (tensor.data, tensor.tensor_type))
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    for name in tensors.keys() - {tensor.name for tensor in reader.tensors}:
        data, kind = tensors[name]
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path

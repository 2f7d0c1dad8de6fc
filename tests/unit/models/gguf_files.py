"""GGUF files for tests: exported, converted to folders, and written again with some parts changed."""

from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter

from permille.engines.gguf.export import export_gguf
from permille.models.checkpoint import Checkpoint
from permille.models.gguf.folder import convert
from permille.package.reader import Package


def written(package: Package, folder: Path) -> Path:
    """The package as a GGUF file of float32."""
    export_gguf(package, None, folder, kind="f32")
    return folder / "model.gguf"


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
    """The same file with some tensors and keys added, or in place of its own."""
    own = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    own |= keys or {}
    writer = GGUFWriter(path, own.pop("general.architecture"))
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

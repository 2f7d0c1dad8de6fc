"""Export of a personal change as a LoRA adapter of llama.cpp, which is loaded beside the base model's file.

    exported = export_gguf_adapter(package, personal_K, Path("mine"))
    # llama-cli --model model.gguf --lora mine/adapter.gguf

The adapter of sparse values is exact (`permille.engines.low_rank`). The base model's file stays as it is. The
folder appears only when it is complete. A failed export leaves no folder.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGUFType, GGUFWriter, Keys
from numpy.typing import NDArray

from permille.choices import choice_of
from permille.engines.export import checked_values, new_folder
from permille.engines.gguf.blocks import BlockType
from permille.engines.low_rank import low_rank_changes
from permille.errors import InputError
from permille.models.gguf.description import describe
from permille.package.reader import Package

ADAPTER_FILE = "adapter.gguf"


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufAdapter:
    """Result of an export.

    Attributes:
        kind: the type of the matrices.
        size_bytes: the size of the file.
        linears: the number of changed linear layers.
        largest_rank: the largest rank of a layer.
        kept: the share of the change that the file keeps. It is `1 - e / c`, where `e` is the squared error
            of the stored matrices, and `c` is their squared numbers, unit vectors left out. 1 for float32.
    """

    kind: BlockType
    size_bytes: int
    linears: int
    largest_rank: int
    kept: float


def export_gguf_adapter(
    package: Package,
    values_K: NDArray[np.float32] | None,
    folder: Path,
    *,
    kind: BlockType | str = BlockType.F32,
) -> GgufAdapter:
    """Write a folder with `adapter.gguf`, for the GGUF file of the package's model.

    For a package of scheme `source`, this is the file that the package was made from. For others, it is a
    GGUF export of the package without values.

    Args:
        package: the package.
        values_K: float32 [package.k], the masked weights or the adapter's numbers.
        folder: a new or empty folder. Its parent folder must exist.
        kind: `f32`, which is exact, or `f16`, which is half as large.

    Raises:
        InputError: no masked weight has changed, llama.cpp does not support the model, the values or the type
            are invalid, or the folder is not empty.
        OSError: the file system failed. No folder is left.
    """
    kind = choice_of(BlockType, kind, "a type")
    if kind not in (BlockType.F32, BlockType.F16):
        raise InputError(f"An adapter is f32 or f16, not {kind}. Choose one of these types.")
    dtype = np.float32 if kind is BlockType.F32 else np.float16
    values_K, description = checked_values(package, values_K), describe(package.config)
    adapter = package.manifest.adapter
    squared = lost = 0.0
    largest = linears = 0
    with new_folder(folder) as temporary:
        writer = GGUFWriter(temporary / ADAPTER_FILE, description.name)
        writer.add_type(GGUFType.ADAPTER)
        writer.add_string(Keys.Adapter.TYPE, "lora")
        # llama.cpp multiplies B A by alpha / rank, and by 1 if alpha is 0.
        writer.add_float32(Keys.Adapter.LORA_ALPHA, 0.0 if adapter is None else adapter.alpha)
        for info, a_RK, b_NR in low_rank_changes(package, values_K):
            order_N = description.row_order(info.name, len(b_NR))
            parts = {"lora_a": a_RK, "lora_b": b_NR if order_N is None else b_NR[order_N]}
            for suffix, part in parts.items():
                stored = np.ascontiguousarray(part, dtype)
                writer.add_tensor(f"{description.names[info.name]}.{suffix}", stored)
                changes = part[part != 1]
                squared += float(np.square(changes, dtype=np.float64).sum())
                lost += float(np.square(stored[part != 1] - changes, dtype=np.float64).sum())
            largest, linears = max(largest, len(a_RK)), linears + 1
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        size = (temporary / ADAPTER_FILE).stat().st_size
    return GgufAdapter(
        kind=kind,
        size_bytes=size,
        linears=linears,
        largest_rank=largest,
        kept=1.0 - lost / squared if squared else 1.0,
    )

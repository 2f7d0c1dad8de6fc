"""Export of a package to a folder that unmodified transformers loads.

`export_transformers` writes decoded weights with the sparse values set, or with an adapter merged.

Tensors are written one by one, so memory depends on the size of the largest tensor, not on that of the model.
A folder appears only when it is complete. A failed export leaves no folder.
"""

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from permille.errors import InputError
from permille.files import fsync_folder, write_atomic
from permille.models.families import expected_tensors
from permille.package.manifest import TensorInfo
from permille.package.reader import Package
from permille.quantization import dequantize
from permille.tensors import write_float32

WEIGHTS_FILE = "model.safetensors"


def export_transformers(package: Package, values_K: NDArray[np.float32] | None, folder: Path) -> None:
    """Write the model in float32 to a folder that unmodified transformers loads.

        export_transformers(package, personal_K, Path("mine"))
        AutoModelForCausalLM.from_pretrained("mine")

    Args:
        package: the package.
        values_K: float32 [package.k], the masked weights or the adapter's numbers. None takes the package's
            values.
        folder: a new or empty folder. Its parent folder must exist.

    Raises:
        InputError: the values have another shape or dtype or are not finite, or the folder is not empty.
        OSError: the file system failed. No folder is left.
    """
    values_K = checked_values(package, values_K)
    # Drop the older name of `dtype`, which would contradict the float32 that is written below.
    config = {key: value for key, value in package.config.items() if key != "torch_dtype"}
    shapes = expected_tensors(package.config)
    # The order must be that of `merged_tensors`.
    names = [*(info.name for info in package.manifest.tensors), *package.plain_names]
    with new_folder(folder) as temporary:
        for name in package.manifest.files():
            if name != "config.json":
                write_atomic(temporary / name, package.file(name))
        text = json.dumps(config | {"dtype": "float32"}, indent=2, sort_keys=True) + "\n"
        write_atomic(temporary / "config.json", text.encode())
        write_float32(
            temporary / WEIGHTS_FILE,
            {name: shapes[name] for name in names},
            (tensor for _, tensor in merged_tensors(package, values_K)),
        )


def checked_values(package: Package, values_K: NDArray[np.float32] | None) -> NDArray[np.float32]:
    """Check the values to write, and return them. None takes the package's values.

    Raises:
        InputError: the values have another shape or dtype, or are not finite.
    """
    values_K = package.values() if values_K is None else values_K
    # Without this check, a longer array would be cut silently.
    if values_K.dtype != np.float32 or values_K.shape != (package.k,):
        raise InputError(
            f"expected values float32 [{package.k}], got {values_K.dtype} {list(values_K.shape)}"
        )
    if not np.isfinite(values_K).all():
        raise InputError("The values contain NaN or infinity. Export another state.")
    return values_K


def adapter_matrices(
    package: Package, values_K: NDArray[np.float32]
) -> Iterator[tuple[TensorInfo, NDArray[np.float32], NDArray[np.float32]]]:
    """Yield the tensor, A [rank, K] and B [N, rank] of each linear in the scope of a package's adapter."""
    start = 0
    for info in package.manifest.tensors:
        if info.count:
            a_RK, part = package.adapter_matrix(info.name), values_K[start : start + info.count]
            # FORMAT 4.10: the values are A, then B. The A of LoRA-FA is frozen and not among the values.
            b_N = part[info.count - info.shape[0] * len(a_RK) :]
            trained = part[: info.count - len(b_N)]
            yield info, trained.reshape(a_RK.shape) if len(trained) else a_RK, b_N.reshape(-1, len(a_RK))
        start += info.count


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `folder` if the block succeeds, and is removed otherwise.

    Raises:
        InputError: `folder` is not empty, or is a file.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file. Name a new or empty folder.")
    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"{folder} holds files. Name a new or empty folder.")
    # Create the temporary folder in the parent, because a rename is atomic only within a file system.
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}.", suffix=".tmp"))
    try:
        yield temporary
        temporary.replace(folder)  # keeps mode 0700, because a personal model is private
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    fsync_folder(folder.parent)


def merged_tensors(
    package: Package, values_K: NDArray[np.float32]
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Yield name and numbers of every tensor, with the values in their places or the adapter merged.

    The quantized tensors come first, then the others.
    """
    adapter, start = package.manifest.adapter, 0
    low_rank = iter(()) if adapter is None else adapter_matrices(package, values_K)
    for info in package.manifest.tensors:
        weight_NK = dequantize(package.quantized(info.name))
        if adapter is None:
            weight_NK.reshape(-1)[package.mask(info.name)] = values_K[start : start + info.count]
        elif info.count:
            _, a_RK, b_NR = next(low_rank)
            weight_NK += np.float32(adapter.scale) * (b_NR @ a_RK)
        start += info.count
        yield info.name, weight_NK
    for name in package.plain_names:
        yield name, package.plain(name).float32()

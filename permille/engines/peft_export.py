"""Export of a personal change to a folder that unmodified peft loads.

Load the adapter onto the package's own model (exported without values) or onto the source model. The source
model is not quantized, so with it, results differ a little from those of the package. The folder appears only
when it is complete. A failed export leaves no folder.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from permille.engines.export import checked_values, new_folder
from permille.engines.low_rank import low_rank_changes
from permille.files import write_atomic
from permille.package.manifest import AdapterInfo
from permille.package.reader import Package
from permille.tensors import write_float32

CONFIG_FILE, ADAPTER_FILE = "adapter_config.json", "adapter_model.safetensors"


def export_peft(package: Package, values_K: NDArray[np.float32] | None, folder: Path) -> None:
    """Write a folder for `peft.PeftModel.from_pretrained(base, folder)`.

    Sparse values become LoRA matrices whose product is their change, without error. Each linear has a rank of
    its own. LoRA-FA is written as LoRA.

    Args:
        package: the package.
        values_K: float32 [package.k], the masked weights or the adapter's numbers. None takes the package's
            values, which change nothing.
        folder: a new or empty folder. Its parent folder must exist.

    Raises:
        InputError: no masked weight differs from the package's, the values have another shape or dtype or
            are not finite, or the folder is not empty.
        OSError: the file system failed. No folder is left.
    """
    values_K = checked_values(package, values_K)
    shapes: dict[str, tuple[int, ...]] = {}
    rank_of: dict[str, int] = {}
    for info, a_RK, b_NR in low_rank_changes(package, values_K):
        module = info.name.removesuffix(".weight")
        name = f"base_model.model.{module}.lora"
        shapes |= {f"{name}_A.weight": a_RK.shape, f"{name}_B.weight": b_NR.shape}
        rank_of[module] = len(a_RK)
    # Compute the matrices a second time, so that no more than one pair is in memory.
    matrices = (matrix for _, *both in low_rank_changes(package, values_K) for matrix in both)
    with new_folder(folder) as temporary:
        write_atomic(temporary / CONFIG_FILE, _peft_config(package.manifest.adapter, rank_of))
        write_float32(temporary / ADAPTER_FILE, shapes, matrices)


def _peft_config(adapter: AdapterInfo | None, rank_of: Mapping[str, int]) -> bytes:
    rank, alpha = (1, 1.0) if adapter is None else (adapter.rank, adapter.alpha)
    config: dict[str, object] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        # The user chooses the base when loading the adapter: an export of the package, or the source model.
        "base_model_name_or_path": None,
        "r": rank,
        "lora_alpha": alpha,
        # Use full paths, because peft would match a bare name in layers outside of the scope, too.
        "target_modules": list(rank_of),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_dropout": 0.0,
    }
    if adapter is None:
        # peft multiplies B A by alpha / rank, which must be 1 here.
        config |= {"rank_pattern": rank_of, "alpha_pattern": rank_of}
    return (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()

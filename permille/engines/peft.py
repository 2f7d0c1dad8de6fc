"""An adapter and its trained numbers as a folder that unmodified `peft` loads: `adapter_config.json` and
`adapter_model.safetensors`, nothing of ours.

The base to load it onto is the package's own model (`permille.engines.export` without values), or the model
that the package was made of, which differs by the 4-bit codes.
"""

import json
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from permille.engines.export import adapter_matrices, checked_values, new_folder, safetensors_header
from permille.errors import InputError
from permille.files import write_atomic
from permille.package.manifest import AdapterInfo
from permille.package.reader import Package

CONFIG_FILE, ADAPTER_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."


def export_peft(package: Package, values_K: NDArray[np.float32] | None, folder: Path) -> None:
    """Write a folder for `peft.PeftModel.from_pretrained(base, folder)`; LoRA-FA becomes a LoRA.

    Args:
        values_K: float32 [k], the adapter's numbers; None takes the package's own, which change nothing.
        folder: must not exist, or be empty; its parent must exist.

    Raises:
        InputError: a package with a mask; values of another shape or dtype or not finite, or a folder that
            holds something.
        OSError: as the file system reports it; no folder is left.
    """
    adapter = package.manifest.adapter
    if adapter is None:
        raise InputError(
            "expected a package with an adapter for peft, got one with a mask: its sparse values are no "
            "low-rank matrices; export it for transformers or gguf"
        )
    values_K = checked_values(package, values_K)
    with new_folder(folder) as temporary:
        write_atomic(temporary / CONFIG_FILE, _config(package, adapter))
        with (temporary / ADAPTER_FILE).open("wb") as file:
            shapes: dict[str, tuple[int, ...]] = {}
            for info, a_RK, b_NR in adapter_matrices(package, values_K):
                shapes |= {_name(info.name, "A"): a_RK.shape, _name(info.name, "B"): b_NR.shape}
            file.write(safetensors_header({name: ("F32", shape) for name, shape in shapes.items()}))
            for _, a_RK, b_NR in adapter_matrices(package, values_K):
                for matrix in (a_RK, b_NR):
                    file.write(np.ascontiguousarray(matrix, "<f4").data)
            file.flush()
            os.fsync(file.fileno())


def _config(package: Package, adapter: AdapterInfo) -> bytes:
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "target_modules": [t.name.removesuffix(".weight") for t in package.manifest.tensors if t.count],
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_dropout": 0.0,
    }
    return (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()


def _name(weight: str, matrix: str) -> str:
    return f"{_PREFIX}{weight.removesuffix('.weight')}.lora_{matrix}.weight"

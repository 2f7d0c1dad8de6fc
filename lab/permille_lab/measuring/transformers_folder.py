"""A folder that shows an NF4 package to transformers with bitsandbytes.

Transformers sees the codes without the overlay: masked weights have their decoded values.
"""

import json
from pathlib import Path

from permille.errors import InputError
from permille.files import write_atomic
from permille.package.limits import Role
from permille.package.reader import Package
from permille.quantization.types import Scheme
from permille.tensors import Q8_0

_SHARDS = {Role.DENSE: "model-00001-of-00002.safetensors", Role.PLAIN: "model-00002-of-00002.safetensors"}


def link_transformers_folder(package: Package, folder: Path) -> None:
    """Write a folder for `AutoModelForCausalLM.from_pretrained`: links to blobs, an index and a config.

    Other files in the folder are not changed.

    Raises:
        InputError: the package is not NF4, or its embedding has 8 bits.
    """
    if package.manifest.scheme.name is not Scheme.NF4:
        raise InputError(f"expected an nf4 package, got {package.manifest.scheme.name}")
    if any(package.plain_dtype(name) == Q8_0 for name in package.plain_names):
        raise InputError("transformers has no 8-bit embedding of GGUF's. Make the package with `source`.")
    folder.mkdir(parents=True, exist_ok=True)
    for role, name in _SHARDS.items():
        _link(package.blobs.path(package.manifest.layer(role).digest), folder / name)
    for path, layer in package.manifest.files().items():
        if path != "config.json":
            _link(package.blobs.path(layer.digest), folder / path)
    _write_json(folder / "model.safetensors.index.json", _index(package))
    quantization = {"quantization_config": _quantization_config(package)}
    declared = {} if {"dtype", "torch_dtype"} & package.config.keys() else {"dtype": _dtype(package)}
    _write_json(folder / "config.json", declared | package.config | quantization)


def _index(package: Package) -> dict[str, object]:
    weights = {name: _SHARDS[role] for role in (Role.DENSE, Role.PLAIN) for name in package.layer_names(role)}
    total = sum(package.manifest.layer(role).size_bytes for role in _SHARDS)
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(weights.items()))}


def _quantization_config(package: Package) -> dict[str, object]:
    matrices = [name for name in package.plain_names if len(package.plain_shape(name)) == 2]
    skipped = {name.removesuffix(".weight") for name in matrices} | {"lm_head"}
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_compute_dtype": "float32",
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_use_double_quant": False,
        "llm_int8_skip_modules": sorted(skipped),
    }


def _dtype(package: Package) -> str:
    """Return the dtype for a config without one. Transformers would infer a wrong one from the scales."""
    found = {package.plain_dtype(name) for name in package.plain_names}
    return (
        {"BF16": "bfloat16", "F16": "float16"}.get(found.pop(), "float32") if len(found) == 1 else "float32"
    )


def _link(target: Path, link: Path) -> None:
    temporary = link.with_name(f".{link.name}.link")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target.resolve())
    temporary.replace(link)


def _write_json(path: Path, value: dict[str, object]) -> None:
    write_atomic(path, (json.dumps(value, indent=2, sort_keys=True) + "\n").encode("utf-8"))

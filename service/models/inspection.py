"""Looking at a model's folder before anything is made of it: where it is, its family, its tensors. No torch.

Only names, sizes and headers are read. Weights must be safetensors; pickled weights, code of its own
(`auto_map`) and files that a link leads out of the root are refused.
"""

import json
from pathlib import Path
from typing import Any

from permille.errors import InputError
from permille.models.families import canonical_name, expected_tensors, family_of
from permille.store.models import ModelFacts
from service.preflights.estimates import sizes_of

MAX_CONFIG_BYTES = 1024 * 1024
MAX_HEADER_BYTES = 8 * 1024 * 1024
MAX_WEIGHT_FILES = 1000


def inspect_folder(root: Path, relative: str) -> ModelFacts:
    """What the service stores of a model's folder.

    Raises:
        InputError: no such folder below the root, no config or safetensors, an unknown family, missing
        tensors.
    """
    folder = contained(root, relative)
    if not folder.is_dir():
        raise InputError(f"expected a folder below the model root, got {relative!r}")
    config = read_config(contained(root, f"{relative}/config.json"))
    family = family_of(config)
    weights = [contained(root, f"{relative}/{path.name}") for path in sorted(folder.glob("*.safetensors"))]
    if not 1 <= len(weights) <= MAX_WEIGHT_FILES:
        raise InputError(
            f"expected 1 to {MAX_WEIGHT_FILES} safetensors files in {relative!r}, got {len(weights)}"
        )
    if not (folder / "tokenizer.json").is_file():
        raise InputError(f"expected tokenizer.json in {relative!r}, got none")
    shapes = {name: shape for path in weights for name, shape in read_shapes(path).items()}
    _check_shapes(config, shapes)
    sizes = sizes_of(config)
    return ModelFacts(
        family=family.value,
        config=config,
        size_bytes=sum(path.stat().st_size for path in weights),
        parameter_count=sizes.parameters,
        scoped_parameter_count=sizes.scoped,
    )


def contained(root: Path, relative: str) -> Path:
    """The real path of `relative`, which must stay below the real `root`. Raises InputError."""
    base = root.resolve()
    path = (base / relative).resolve()
    if not path.is_relative_to(base):
        raise InputError(f"expected a path below the configured root, got {relative!r}")
    return path


def read_config(path: Path) -> dict[str, Any]:
    """A `config.json`, read with a limit. Raises InputError."""
    if not path.is_file():
        raise InputError("expected config.json, got none")
    with path.open("rb") as file:
        data = file.read(MAX_CONFIG_BYTES + 1)
    if len(data) > MAX_CONFIG_BYTES:
        raise InputError(f"expected config.json of at most {MAX_CONFIG_BYTES} bytes, got more")
    return _object(data, "config.json")


def read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a safetensors file's header. Raises InputError."""
    with path.open("rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) != 8 or length > MAX_HEADER_BYTES:
            raise InputError(
                f"expected a header of at most {MAX_HEADER_BYTES} bytes in {path.name}, got {length}"
            )
        header = file.read(length)
    if len(header) != length:
        raise InputError(f"expected a header of {length} bytes in {path.name}, got {len(header)}")
    entries = _object(header, path.name)
    return {name: _shape(entry, name) for name, entry in entries.items() if name != "__metadata__"}


def _shape(entry: object, name: str) -> tuple[int, ...]:
    shape = entry.get("shape") if isinstance(entry, dict) else None
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise InputError(f"expected a shape of tensor {name[:100]!r}, got {shape!r:.100}")
    return tuple(shape)


def _check_shapes(config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> None:
    known = {canonical_name(config, name): shape for name, shape in shapes.items()}
    for name, expected in expected_tensors(config).items():
        if known.get(name) != expected:
            raise InputError(f"expected tensor {name} of shape {expected}, got {known.get(name)}")


def _object(data: bytes, name: str) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as exc:
        raise InputError(f"expected JSON in {name}, got {exc}") from exc
    if not isinstance(value, dict):
        raise InputError(f"expected a JSON object in {name}, got {type(value).__name__}")
    return value

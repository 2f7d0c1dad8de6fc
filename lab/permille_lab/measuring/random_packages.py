"""Packages of random codes in the shapes of known models, written tensor by tensor.

Codes, scales and values are drawn in their stored form, so a dense model never exists. The weights have the
spread of a trained model, so that a forward pass stays finite. Its predictions are noise, but time and memory
do not depend on them.

The same settings and seed give the same package.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from permille.choices import Embeddings
from permille.models.families import expected_tensors, layer_of, scoped_tensors
from permille.package.blobs import BlobFolder
from permille.package.blocks import write_blocks
from permille.package.build import write_manifest
from permille.package.layers import write_dense, write_file, write_mask, write_plain, write_values
from permille.package.manifest import (
    Manifest,
    MaskInfo,
    ModelInfo,
    Quantization,
    TensorInfo,
    decimal_text,
    sort_layers,
)
from permille.package.reader import Package
from permille.quantization import default_group_size
from permille.quantization.tables import code_table
from permille.quantization.types import (
    QuantizedTensor,
    Scheme,
    bits_of,
    packed_size,
    scales_shape,
)
from permille.tensors import RawTensor

# Root mean square of a uniformly drawn code, in units of its scale.
_CODE_RMS = {Scheme.NF4: 0.55, Scheme.INT4: 4.3, Scheme.INT8: 73.6, Scheme.SOURCE: 4.6}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a Llama model."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool = False

    def config(self) -> dict[str, Any]:
        """Return the contents of `config.json`."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": self.tied,
            "hidden_act": "silu",
        }

    def with_layers(self, layers: int | None) -> "Shape":
        """Return the shape with another number of layers, or unchanged for None."""
        return self if layers is None else replace(self, layers=layers)


SHAPES = {
    "tiny": Shape(hidden=64, inner=128, layers=2, heads=4, kv_heads=2, vocabulary=256),
    "135M": Shape(hidden=576, inner=1536, layers=30, heads=9, kv_heads=3, vocabulary=49152, tied=True),
    "30M": Shape(hidden=512, inner=1408, layers=8, heads=8, kv_heads=8, vocabulary=4096),
    "0.5B": Shape(hidden=896, inner=4864, layers=24, heads=14, kv_heads=2, vocabulary=151936, tied=True),
    "1.1B": Shape(hidden=2048, inner=5632, layers=22, heads=32, kv_heads=4, vocabulary=32000),
    "7B": Shape(hidden=4096, inner=11008, layers=32, heads=32, kv_heads=32, vocabulary=32000),
}


def random_package(
    folder: Path,
    shape: Shape,
    *,
    density: float = 0.001,
    first_layer: int = 0,
    scheme: Scheme = Scheme.NF4,
    tables: Embeddings = Embeddings.SOURCE,
    seed: int = 0,
) -> Package:
    """Return a random package in `folder/blobs`. It is made once for its settings and then reused.

    Args:
        density: share of masked weights in each masked tensor. At least one weight is masked.
        first_layer: first decoder layer with masked weights.
        tables: format of the embedding and the head. `SOURCE` means bf16.
    """
    blobs = BlobFolder(folder / "blobs")
    settings = (
        asdict(shape)
        | {
            "density": density,
            "first_layer": first_layer,
            "scheme": scheme.value,
            "seed": seed,
        }
        | ({} if tables is Embeddings.SOURCE else {"tables": tables.value})
    )
    known = folder / "digests" / "-".join(str(value) for value in settings.values())
    if not known.exists():
        about = _About(
            shape=shape,
            density=density,
            first_layer=first_layer,
            scheme=scheme,
            tables=tables,
            seed=seed,
        )
        digest = _write(blobs, about)
        known.parent.mkdir(parents=True, exist_ok=True)
        known.write_text(digest)
    return Package.open(blobs, known.read_text())


@dataclass(frozen=True, slots=True, kw_only=True)
class _About:
    """Settings of a random package; see `random_package`."""

    shape: Shape
    density: float
    first_layer: int
    scheme: Scheme
    tables: Embeddings
    seed: int

    @property
    def quantization(self) -> Quantization:
        return Quantization(name=self.scheme, group_size=default_group_size(self.scheme))


def _write(blobs: BlobFolder, about: _About) -> str:
    config, density, first_layer = about.shape.config(), about.density, about.first_layer
    scoped = scoped_tensors(config)
    order = [name for name, _ in scoped]
    rng = np.random.default_rng(about.seed)
    mask = {name: _mask(rng, size, density) for name, size in scoped if (layer_of(name) or 0) >= first_layer}
    how = about.quantization
    config_layer = write_file(blobs, "config.json", json.dumps(config, indent=2).encode())
    counts = {name: len(mask.get(name, ())) for name in order}
    layers = [
        write_dense(blobs, _codes(rng, scoped, about), how),
        write_plain(blobs, _plain(rng, config, frozenset(order), about.tables)),
        write_mask(blobs, mask, order),
        write_values(blobs, _values(rng, scoped, counts), order),
        config_layer,
    ]
    layers.append(write_blocks(blobs, layers))
    manifest = Manifest(
        model=ModelInfo(family="llama", config=config_layer.digest),
        scheme=how,
        trainable=MaskInfo(
            method="random",
            density=decimal_text(density),
            scope=f"layers:{first_layer}-" if first_layer else "all",
            k=sum(counts.values()),
        ),
        tensors=tuple(TensorInfo(name=name, shape=size, count=counts[name]) for name, size in scoped),
        layers=sort_layers(layers),
    )
    return write_manifest(blobs, manifest)


def _mask(rng: np.random.Generator, shape: tuple[int, int], density: float) -> NDArray[np.uint32]:
    """Draw one index in each of `density * N * K` equal ranges. Thus the indices increase without a sort."""
    weights = shape[0] * shape[1]
    count = max(1, round(density * weights))
    stretch = weights // count
    starts = np.arange(count, dtype=np.uint64) * np.uint64(stretch)
    indices: NDArray[np.uint32] = (starts + rng.integers(0, stretch, count, np.uint64)).astype(np.uint32)
    return indices


def _codes(
    rng: np.random.Generator, scoped: tuple[tuple[str, tuple[int, int]], ...], about: _About
) -> Iterator[tuple[str, QuantizedTensor]]:
    for name, shape in scoped:
        spread = 1 / (_CODE_RMS[about.scheme] * np.sqrt(shape[1]))
        yield name, _random_codes(rng, shape, about.quantization, spread)


def _random_codes(
    rng: np.random.Generator, shape: tuple[int, int], how: Quantization, spread: float
) -> QuantizedTensor:
    packed = rng.integers(0, 256, packed_size(bits_of(how.name), shape), np.uint8)
    size = scales_shape(how.name, shape, how.group_size)
    if how.name is Scheme.INT8:
        packed[packed == 128] = 0  # int8 codes do not include -128
    elif shape[0] * shape[1] % 2:
        packed[-1] &= 0xF0
    minima = None
    scales = rng.uniform(0.8 * spread, 1.2 * spread, size).astype(np.float32)
    if how.name is Scheme.SOURCE:  # like Q4_1, the most expensive source type
        scales = scales.astype(np.float16).astype(np.float32)
        minima = np.float32(-8) * scales
    return QuantizedTensor(
        scheme=how.name,
        shape=shape,
        group_size=how.group_size,
        packed=packed,
        scales=scales,
        minima=minima,
    )


def _plain(
    rng: np.random.Generator, config: dict[str, Any], scoped: frozenset[str], tables: Embeddings
) -> Iterator[RawTensor]:
    for name, shape in expected_tensors(config).items():
        if name in scoped:
            continue
        if len(shape) == 1:
            numbers = np.ones(shape, np.float32)
        else:
            numbers = rng.standard_normal(shape, np.float32) / np.float32(np.sqrt(shape[-1]))
        tensor = _bf16(name, numbers)
        yield code_table(tensor) if len(shape) == 2 and tables is Embeddings.Q8_0 else tensor


def _values(
    rng: np.random.Generator, scoped: tuple[tuple[str, tuple[int, int]], ...], counts: dict[str, int]
) -> Iterator[RawTensor]:
    for name, shape in scoped:
        numbers = rng.standard_normal(counts[name], np.float32) / np.float32(np.sqrt(shape[1]))
        yield _bf16(name, numbers)


def _bf16(name: str, numbers: NDArray[np.float32]) -> RawTensor:
    """Return the tensor in bf16: the upper half of each float32. Random numbers need no rounding."""
    halves = (np.ascontiguousarray(numbers).view(np.uint32) >> np.uint32(16)).astype("<u2")
    return RawTensor(name=name, dtype="BF16", shape=numbers.shape, data=halves.view(np.uint8).reshape(-1))

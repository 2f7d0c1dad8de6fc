"""A tiny package of random numbers, made without torch. Other folders of tests use it, too."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, quantize
from numpy.typing import NDArray

from permille.choices import Embeddings
from permille.models.families import expected_tensors, scoped_tensors
from permille.package.blobs import BlobFolder
from permille.package.build import ChosenAdapter, ChosenMask, pack_model
from permille.package.limits import MAX_MANIFEST_BYTES
from permille.package.manifest import Manifest
from permille.quantization.gguf_blocks import TYPES, codes_of
from permille.quantization.types import QuantizedTensor, Scheme
from permille.tensors import RawTensor
from tests.packages import MemoryModel

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


WIDE = LLAMA | {"intermediate_size": 64}
"""Configuration with rows that blocks of 32 fill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiny:
    """A written package, and its inputs."""

    blobs: BlobFolder
    digest: str
    manifest: Manifest
    weights: Mapping[str, RawTensor]
    mask: Mapping[str, NDArray[np.uint32]]


def random_weights(config: Mapping[str, Any], *, seed: int = 0, dtype: str = "F32") -> dict[str, RawTensor]:
    """Return random tensors of a whole checkpoint."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in expected_tensors(config).items():
        numbers = rng.normal(0, 0.05, shape).astype("<f4")
        weights[name] = as_dtype(name, numbers, dtype)
    return weights


def as_dtype(name: str, numbers: NDArray[np.float32], dtype: str) -> RawTensor:
    """Convert float32 numbers to another dtype. For bf16, the lower 16 bits are cut off."""
    if dtype == "BF16":
        data = (numbers.view(np.uint32) >> 16).astype("<u2").view(np.uint8)
    else:
        data = numbers.astype({"F32": "<f4", "F16": "<f2"}[dtype]).view(np.uint8)
    return RawTensor(name=name, dtype=dtype, shape=numbers.shape, data=data.reshape(-1))


def random_mask(config: Mapping[str, Any], *, seed: int = 0, count: int = 5) -> dict[str, NDArray[np.uint32]]:
    """Return `count` random positions of every linear layer."""
    rng = np.random.default_rng([seed, 1])
    return {
        name: np.sort(rng.choice(rows * columns, count, replace=False)).astype(np.uint32)
        for name, (rows, columns) in scoped_tensors(config)
    }


def kept(w_NK: NDArray[np.float32], name: str) -> QuantizedTensor:
    """Return a weight in a GGUF type, as scheme `SOURCE` keeps it."""
    return codes_of(quantize(w_NK, GGMLQuantizationType[name]), w_NK.shape[1])


def write_tiny(
    blobs: BlobFolder,
    *,
    config: Mapping[str, Any] = LLAMA,
    scheme: Scheme = Scheme.NF4,
    dtype: str = "F32",
    seed: int = 0,
    mask_seed: int = 0,
    adapter: ChosenAdapter | None = None,
    embeddings: Embeddings = Embeddings.SOURCE,
) -> Tiny:
    """Write a package of random weights with a random mask or an adapter.

    With scheme `SOURCE`, the linear layers have the kept types in turn.
    """
    weights = random_weights(config, seed=seed, dtype=dtype)
    names = [name for name, _ in scoped_tensors(config)]

    def codes(name: str) -> QuantizedTensor:
        return kept(weights[name].float32(), TYPES[names.index(name) % len(TYPES)])

    mask = random_mask(config, seed=mask_seed)
    license_text = b"Anybody may do anything with these random numbers.\n"
    model = MemoryModel(config=config, tensors=weights, files={"LICENSE": license_text})
    chosen = ChosenMask(indices=mask, method="random", density="0.004")
    digest = pack_model(
        blobs,
        model,
        adapter or chosen,
        scheme,
        embeddings=embeddings,
        codes=codes if scheme is Scheme.SOURCE else None,
        provenance={"seed": seed},
    )
    manifest = Manifest.from_bytes(blobs.read(digest, limit=MAX_MANIFEST_BYTES))
    return Tiny(blobs=blobs, digest=digest, manifest=manifest, weights=weights, mask=mask)

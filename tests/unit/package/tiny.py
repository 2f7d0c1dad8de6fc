"""A tiny package of random numbers, made without torch, for the tests of this room and of others to open."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from permille.models.families import expected_tensors, family_of, scoped_tensors
from permille.package.blobs import BlobFolder
from permille.package.config_files import clean_config, config_bytes
from permille.package.direction_layers import write_basis, write_exponents
from permille.package.layers import (
    masked_values,
    write_dense,
    write_file,
    write_mask,
    write_plain,
    write_values,
)
from permille.package.manifest import Manifest, MaskInfo, ModelInfo, Quantization, TensorInfo, sort_layers
from permille.package.writer import write_manifest
from permille.quantization import Scheme, default_group_size, quantize
from permille.tensors import RawTensor

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiny:
    """A written package and what went into it."""

    blobs: BlobFolder
    digest: str
    manifest: Manifest
    weights: Mapping[str, RawTensor]
    mask: Mapping[str, NDArray[np.uint32]]


def random_weights(config: Mapping[str, Any], *, seed: int = 0, dtype: str = "F32") -> dict[str, RawTensor]:
    """Random tensors of a whole checkpoint."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in expected_tensors(config).items():
        numbers = rng.normal(0, 0.05, shape).astype("<f4")
        weights[name] = as_dtype(name, numbers, dtype)
    return weights


def as_dtype(name: str, numbers: NDArray[np.float32], dtype: str) -> RawTensor:
    """float32 numbers in another dtype; bf16 by cutting, which is a bf16 number like any other."""
    if dtype == "BF16":
        data = (numbers.view(np.uint32) >> 16).astype("<u2").view(np.uint8)
    else:
        data = numbers.astype({"F32": "<f4", "F16": "<f2"}[dtype]).view(np.uint8)
    return RawTensor(name=name, dtype=dtype, shape=numbers.shape, data=data.reshape(-1))


def random_mask(config: Mapping[str, Any], *, seed: int = 0, count: int = 5) -> dict[str, NDArray[np.uint32]]:
    """`count` random positions of every linear layer."""
    rng = np.random.default_rng([seed, 1])
    return {
        name: np.sort(rng.choice(rows * columns, count, replace=False)).astype(np.uint32)
        for name, (rows, columns) in scoped_tensors(config)
    }


def write_tiny(
    blobs: BlobFolder,
    *,
    config: Mapping[str, Any] = LLAMA,
    scheme: Scheme = Scheme.NF4,
    dtype: str = "F32",
    seed: int = 0,
    mask_seed: int = 0,
    exponents: NDArray[np.int8] | None = None,
    basis: NDArray[np.int8] | None = None,
) -> Tiny:
    """Write a package of random weights and a random mask; [70] exponents and a [70, r] basis on request."""
    weights = random_weights(config, seed=seed, dtype=dtype)
    mask = random_mask(config, seed=mask_seed)
    group_size = default_group_size(scheme)
    scoped = scoped_tensors(config)
    order = [name for name, _ in scoped]
    config_layer = write_file(blobs, "config.json", config_bytes(clean_config(config)))
    layers = [
        write_dense(
            blobs, ((name, quantize(weights[name].float32(), scheme, group_size)) for name in order), scheme
        ),
        write_plain(blobs, (tensor for name, tensor in weights.items() if name not in mask)),
        write_mask(blobs, mask, order),
        write_values(blobs, (masked_values(weights[name], mask[name]) for name in order), order),
        config_layer,
        write_file(blobs, "LICENSE", b"Anybody may do anything with these random numbers.\n"),
    ]
    counts = {name: mask[name].size for name in order}
    if exponents is not None:
        layers.append(write_exponents(blobs, exponents, counts))
    if basis is not None:
        layers.append(write_basis(blobs, basis, counts))
    manifest = Manifest(
        model=ModelInfo(family=family_of(config), config=config_layer.digest),
        scheme=Quantization(name=scheme, group_size=group_size, mask_aware=False),
        mask=MaskInfo(method="random", density="0.004", scope="all", k=sum(x.size for x in mask.values())),
        tensors=tuple(TensorInfo(name=name, shape=shape, count=mask[name].size) for name, shape in scoped),
        layers=sort_layers(layers),
        provenance={"seed": seed},
    )
    digest = write_manifest(blobs, manifest)
    return Tiny(blobs=blobs, digest=digest, manifest=manifest, weights=weights, mask=mask)

"""Small packages for tests: a random Llama in numpy, a tokenizer trained on the spot, the library's writers.

No torch, no files from elsewhere; the same arguments give the same package digest.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from permille.models.families import expected_tensors, family_of, scoped_tensors
from permille.package.blobs import BlobFolder
from permille.package.direction_layers import write_basis, write_exponents
from permille.package.layers import (
    masked_values,
    write_dense,
    write_file,
    write_mask,
    write_plain,
    write_values,
)
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
from permille.package.writer import write_manifest
from permille.quantization import Scheme, default_group_size, quantize
from permille.tensors import RawTensor

SPECIAL_TOKENS = ("<s>", "</s>", "<pad>")
TINY_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "vocab_size": 320,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
_NOUNS = ("river", "house", "garden", "winter", "letter", "engine", "harbour", "window", "forest", "bread")
_VERBS = ("crossed", "painted", "remembered", "opened", "followed", "lost", "found", "carried")
_PLACES = ("in the morning", "near the old bridge", "without a word", "before the rain", "at last")


def sentences(count: int, *, seed: int = 0) -> list[str]:
    """Made-up sentences, all different for counts up to a few thousand."""
    rng = np.random.Generator(np.random.PCG64(seed))
    result = []
    for number in range(count):
        first, second = (_NOUNS[i] for i in rng.integers(0, len(_NOUNS), 2))
        verb, place = _VERBS[rng.integers(0, len(_VERBS))], _PLACES[rng.integers(0, len(_PLACES))]
        result.append(f"On day {number} the {first} {verb} the {second} {place}.")
    return result


def tiny_tokenizer(vocabulary: int = 320, texts: Sequence[str] | None = None) -> Tokenizer:
    """A byte-level BPE tokenizer trained on `texts`, with `SPECIAL_TOKENS` as ids 0, 1, 2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts if texts is not None else sentences(200), trainer)
    return tokenizer


def tiny_package(
    blobs: Path,
    *,
    density: float = 0.05,
    seed: int = 0,
    scheme: Scheme = Scheme.NF4,
    config: Mapping[str, Any] | None = None,
    chat_template: str | None = None,
) -> Package:
    """A package of a random model of `config` (default `TINY_LLAMA`) in the folder `blobs`; a random mask."""
    config = {**TINY_LLAMA, **(config or {})}
    rng = np.random.Generator(np.random.PCG64(seed))
    weights = {name: _random_weight(rng, name, shape) for name, shape in expected_tensors(config).items()}
    mask = {
        name: np.sort(rng.choice(n * k, size=max(1, round(density * n * k)), replace=False)).astype(np.uint32)
        for name, (n, k) in scoped_tensors(config)
    }
    tokenizer_config = {"bos_token": SPECIAL_TOKENS[0], "eos_token": SPECIAL_TOKENS[1]}
    files = {
        "tokenizer.json": tiny_tokenizer(config["vocab_size"]).to_str().encode(),
        "tokenizer_config.json": json.dumps(tokenizer_config).encode(),
    }
    if chat_template is not None:
        files["chat_template.jinja"] = chat_template.encode()
    return write_package(blobs, config, weights, mask, files, scheme=scheme)


def write_package(
    blobs: Path,
    config: Mapping[str, Any],
    weights: Mapping[str, NDArray[np.float32]],
    mask: Mapping[str, NDArray[np.uint32]],
    files: Mapping[str, bytes],
    *,
    scheme: Scheme = Scheme.NF4,
    method: str = "random",
) -> Package:
    """Write the package of a float32 model with a known mask, quantized with regard to it; open it."""
    blobs.mkdir(parents=True, exist_ok=True)
    folder = BlobFolder(blobs)
    shapes = dict(scoped_tensors(config))
    order = list(shapes)
    raw = {name: _raw(name, weight) for name, weight in weights.items()}
    group_size = default_group_size(scheme)
    quantized = []
    for name in order:
        keep = np.zeros(weights[name].size, dtype=np.bool_)
        keep[mask[name]] = True
        quantized.append((name, quantize(weights[name], scheme, group_size, keep.reshape(shapes[name]))))
    config_layer = write_file(folder, "config.json", json.dumps(config, indent=2).encode())
    layers = [
        write_dense(folder, quantized, scheme),
        write_plain(folder, [raw[name] for name in weights if name not in shapes]),
        write_mask(folder, mask, order),
        write_values(folder, [masked_values(raw[name], mask[name]) for name in order], order),
        config_layer,
        *(write_file(folder, path, data) for path, data in files.items()),
    ]
    total = sum(n * k for n, k in shapes.values())
    k = sum(len(indices) for indices in mask.values())
    manifest = Manifest(
        model=ModelInfo(family=family_of(config).value, config=config_layer.digest),
        scheme=Quantization(name=scheme, group_size=group_size, mask_aware=True),
        mask=MaskInfo(method=method, density=decimal_text(k / total), scope="all", k=k),
        tensors=tuple(TensorInfo(name=name, shape=shapes[name], count=len(mask[name])) for name in order),
        layers=sort_layers(layers),
        provenance={},
    )
    return Package.open(folder, write_manifest(folder, manifest))


def layered_package(
    package: Package, *, basis_KR: NDArray[np.int8] | None = None, exponents_K: NDArray[np.int8] | None = None
) -> Package:
    """The package with layers of learned directions or scaling exponents added, in the same folder."""
    manifest, folder = package.manifest, package.blobs
    counts = {tensor.name: tensor.count for tensor in manifest.tensors}
    layers = list(manifest.layers)
    if basis_KR is not None:
        layers.append(write_basis(folder, basis_KR, counts))
    if exponents_K is not None:
        layers.append(write_exponents(folder, exponents_K, counts))
    changed = replace(manifest, layers=sort_layers(layers))
    return Package.open(folder, write_manifest(folder, changed))


def _random_weight(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    if "norm" in name:
        return np.ones(shape, dtype=np.float32)
    scale = 0.5 if "embed" in name else 1.0 / np.sqrt(shape[-1])
    return (rng.standard_normal(shape) * scale).astype(np.float32)


def _raw(name: str, weight: NDArray[np.float32]) -> RawTensor:
    data = np.ascontiguousarray(weight, dtype="<f4").view(np.uint8).reshape(-1)
    return RawTensor(name=name, dtype="F32", shape=weight.shape, data=data)

"""Tiny random models of each family, as packages and as reference models.

The reference is unmodified transformers in float32. `permille.quantization.dequantize` gives its weights, and
the sparse values are written into them. So it shares only the formulas with the engines, not their code.
"""

import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM

from permille.choices import AdapterKind, Embeddings
from permille.models.families import scoped_tensors
from permille.package.blobs import BlobFolder
from permille.package.build import ChosenAdapter, ChosenMask, pack_model
from permille.package.config_files import clean_config
from permille.package.manifest import AdapterInfo
from permille.package.reader import Package
from permille.quantization import dequantize
from permille.quantization.types import Scheme
from permille.tensors import RawTensor
from permille.zo.estimators import Batch
from tests.packages import MemoryModel

VOCABULARY = 96
POSITIONS = 64
_SHARED = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCABULARY}
_LLAMA = {"intermediate_size": 44, "num_key_value_heads": 2}

# The families differ in grouped heads, windows, biases, norms of q and k, scaled embeddings, soft caps,
# parallel blocks, stacked matrices, learned positions and projected embeddings. 44 columns give short last
# groups, and blocks that cross rows.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA | {"tie_word_embeddings": True, "attention_bias": True},
    "mistral": _LLAMA | {"sliding_window": 5},
    "qwen2": _LLAMA,
    "qwen3": _LLAMA | {"head_dim": 16},
    "gemma": _LLAMA | {"head_dim": 16},
    "gemma2": _LLAMA | {"head_dim": 16, "final_logit_softcapping": 2.0, "sliding_window": 5},
    "gemma3_text": _LLAMA | {"head_dim": 16, "sliding_window": 5},
    "opt": {"ffn_dim": 44, "word_embed_proj_dim": 16},
    "gpt_neox": {"intermediate_size": 44, "tie_word_embeddings": False},
    "smollm3": _LLAMA | {"no_rope_layers": [1, 0], "pad_token_id": 0},
    "granite": _LLAMA
    | {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.6,
        "logits_scaling": 2.0,
    },
    "olmo2": _LLAMA | {"attention_bias": True},
    "olmo3": _LLAMA | {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "exaone4": _LLAMA | {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "ministral3": _LLAMA
    | {
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 2.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 32,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "phi3": _LLAMA
    | {
        "sliding_window": 5,
        "pad_token_id": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75},
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiny:
    """A package and its float32 reference model."""

    package: Package
    reference: Any


def difference(function: Callable[[float], NDArray[np.float64]], step: float = 1e-2) -> NDArray[np.float64]:
    """Return the derivative at 0 by a central difference of fourth order."""
    near, far = (function(step) - function(-step), function(2 * step) - function(-2 * step))
    return (8 * near - far) / (12 * step)


def tiny_model(family: str, *, seed: int = 0, **changes: Any) -> Any:
    """Return a random float32 model.

    Its norms and biases are random too, so that tests notice errors in them.
    """
    settings = _SHARED | CONFIGS[family] | {"max_position_embeddings": POSITIONS} | changes
    config = AutoConfig.for_model(family, **settings)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.1 if parameter.ndim == 1 else 0.12))
    return model.eval().requires_grad_(False)


def write_package(
    blobs: BlobFolder,
    model: Any,
    scheme: Scheme,
    *,
    density: float = 0.05,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    scope: str = "all",
    files: Mapping[str, bytes] | None = None,
    adapter: ChosenAdapter | None = None,
    embeddings: Embeddings = Embeddings.Q8_0,
) -> Package:
    """Return a package of `model` in `dtype`, with a random mask of the scope or with an adapter."""
    rng = np.random.default_rng(seed)
    config = clean_config(model.config.to_dict())
    state = {name: _raw(name, tensor.to(dtype)) for name, tensor in model.state_dict().items()}
    covered = dict(scoped_tensors(config, scope))
    mask = {name: np.flatnonzero(rng.random(shape) < density) for name, shape in scoped_tensors(config)}
    chosen = ChosenMask(
        indices={name: found.astype(np.uint32) for name, found in mask.items() if name in covered},
        method="random",
        density=density,
        scope=scope,
    )
    digest = pack_model(
        blobs,
        MemoryModel(config=config, tensors=state, files=files or {}),
        adapter or chosen,
        scheme,
        embeddings=embeddings,
    )
    return Package.open(blobs, digest)


def tiny_package(
    folder: Path,
    family: str,
    scheme: Scheme = Scheme.NF4,
    *,
    layers: int = 2,
    sizes: Mapping[str, int] | None = None,
    **options: Any,
) -> Tiny:
    """Return a package in `folder`, and its reference with the package's own values."""
    model = tiny_model(family, num_hidden_layers=layers, **(sizes or {}))
    package = write_package(BlobFolder(folder), model, scheme, **options)
    return Tiny(package=package, reference=reference_model(package, model))


def reference_model(package: Package, model: Any, dtype: torch.dtype = torch.float32) -> Any:
    """Set the package's tensors and values in `model`, and return it in `dtype`."""
    model = model.to(dtype)
    for info in package.manifest.tensors:
        model.get_parameter(info.name).copy_(torch.from_numpy(dequantize(package.quantized(info.name))))
    for name in package.plain_names:
        model.get_parameter(name).copy_(torch.from_numpy(package.plain(name).float32().copy()))
    set_values(package, model, package.values())
    return model


def set_values(package: Package, model: Any, values_K: NDArray[np.float32]) -> None:
    """Write sparse values into the reference's weights, or add the product of the adapter to them."""
    parts = np.split(values_K, np.cumsum(package.counts)[:-1])
    for info, part in zip(package.manifest.tensors, parts, strict=True):
        weight, adapter = model.get_parameter(info.name), package.manifest.adapter
        if adapter is not None:
            weight_NK = dequantize(package.quantized(info.name)).astype(np.float64)
            if info.count:
                a_RK, b_NR = adapter_matrices(package, info.name, part)
                weight_NK += adapter.alpha / adapter.rank * (b_NR @ a_RK)
            weight.data.copy_(torch.from_numpy(weight_NK))
            continue
        weight.data.view(-1)[torch.from_numpy(package.mask(info.name).astype(np.int64))] = torch.from_numpy(
            part
        ).to(weight.dtype)


def adapter_matrices(package: Package, name: str, part: NDArray[np.float32]) -> tuple[NDArray[Any], ...]:
    """Return the matrices A and B of one linear layer in float64. `part` is its part of the values."""
    frozen_RK, adapter = package.adapter_matrix(name), package.manifest.adapter
    assert adapter is not None
    trained = frozen_RK.size if adapter.kind is AdapterKind.LORA else 0
    a_RK = part[:trained].reshape(frozen_RK.shape) if trained else frozen_RK
    return a_RK.astype(np.float64), part[trained:].reshape(-1, adapter.rank).astype(np.float64)


def reference_token_losses(model: Any, batch: Batch) -> torch.Tensor:
    """Return the losses of the targets. Each sequence runs alone, without padding."""
    losses = []
    for ids, attention, target in zip(batch.input_ids_BT, batch.attention_BT, batch.target_BT, strict=True):
        length = int(attention.sum())
        tokens = torch.from_numpy(ids[:length])
        log_prob = torch.log_softmax(model(tokens[None]).logits[0], dim=-1)
        places = torch.from_numpy(np.flatnonzero(target[:length]))
        losses.append(-log_prob[places - 1, tokens[places]])
    return torch.cat(losses)


def reference_gradient(
    package: Package, model: Any, batch: Batch, values_K: NDArray[np.float32] | None = None
) -> NDArray[Any]:
    """Return the reverse-mode gradient of the reference's mean loss, [k] in the model's dtype.

    For a mask, it is the gradient of the dense weights at the masked indices. For an adapter, the chain rule
    gives it from the dense gradients at `values_K`.
    """
    weights = [model.get_parameter(info.name).requires_grad_() for info in package.manifest.tensors]
    gradients = torch.autograd.grad(reference_token_losses(model, batch).mean(), weights)
    model.requires_grad_(False)
    if package.manifest.adapter is not None and values_K is not None:
        dense = [gradient.numpy() for gradient in gradients]
        return np.concatenate(list(_adapter_gradients(package, package.manifest.adapter, dense, values_K)))
    masks = [package.mask(info.name) for info in package.manifest.tensors]
    return np.concatenate(
        [gradient.numpy().reshape(-1)[mask] for gradient, mask in zip(gradients, masks, strict=True)]
    )


def _adapter_gradients(
    package: Package, adapter: AdapterInfo, dense: list[NDArray[Any]], values_K: NDArray[np.float32]
) -> Iterator[NDArray[Any]]:
    parts = np.split(values_K, np.cumsum(package.counts)[:-1])
    for info, part, d_w_NK in zip(package.manifest.tensors, parts, dense, strict=True):
        if info.count:
            a_RK, b_NR = adapter_matrices(package, info.name, part)
            if adapter.kind is AdapterKind.LORA:
                yield adapter.scale * (b_NR.T @ d_w_NK).reshape(-1)
            yield adapter.scale * (d_w_NK @ a_RK.T).reshape(-1)


def tiny_batch(*, lengths: tuple[int, ...] = (12, 7, 9)) -> Batch:
    """Return right-padded random tokens. About two thirds of them are targets."""
    rng = np.random.default_rng(0)
    shape = (len(lengths), max(lengths))
    attention_BT = np.arange(shape[1]) < np.array(lengths)[:, None]
    target_BT = attention_BT & (rng.random(shape) < 0.67)
    target_BT[:, 0] = False
    target_BT[:, 1] = attention_BT[:, 1]
    return Batch(
        input_ids_BT=rng.integers(0, VOCABULARY, shape), attention_BT=attention_BT, target_BT=target_BT
    )


def rows_of(batch: Batch, rows: list[int]) -> Batch:
    """Return the sequences of a batch with the numbers `rows`."""
    names = ("input_ids_BT", "attention_BT", "target_BT")
    arrays = {name: getattr(batch, name)[rows] for name in names}
    return Batch(**arrays)


def peak_bytes(work: Callable[[], object]) -> int:
    """Return the peak memory of Python and numpy during `work`, without the memory allocated before."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def variants(package: Package, count: int, *, scale: float = 0.02, seed: int = 1) -> NDArray[np.float32]:
    """Return the package's values and `count - 1` perturbed copies."""
    base_K = package.values()
    noise_VK = np.random.default_rng(seed).standard_normal((count, len(base_K))).astype(np.float32)
    noise_VK[0] = 0
    return base_K + np.float32(scale) * noise_VK


def split_variants(package: Package) -> NDArray[np.float32]:
    """Return FedSPZO's 16 variants: four lower blocks, each with four upper blocks of its own."""
    rng = np.random.default_rng(5)
    lower = sum(package.counts[: len(package.counts) // 2])
    values_VK = np.repeat(package.values()[None], 16, axis=0)
    values_VK[:, :lower] += np.repeat(rng.normal(0, 0.1, (4, lower)), 4, axis=0).astype(np.float32)
    values_VK[:, lower:] += rng.normal(0, 0.1, (16, package.k - lower)).astype(np.float32)
    return values_VK


def _raw(name: str, tensor: torch.Tensor) -> RawTensor:
    dtype = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}[tensor.dtype]
    data = tensor.contiguous().view(torch.uint8).numpy().reshape(-1)
    return RawTensor(name=name, dtype=dtype, shape=tuple(tensor.shape), data=data)

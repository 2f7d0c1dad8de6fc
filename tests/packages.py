"""Small packages for tests: a random Llama in numpy, a tokenizer that is trained here, the library's writers.

They need neither torch nor files. The same arguments give the same package digest.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from permille.models.families import expected_tensors, scoped_tensors
from permille.package.blobs import BlobFolder
from permille.package.build import ChosenMask, pack_model, write_manifest
from permille.package.limits import MAX_MANIFEST_BYTES, Role
from permille.package.manifest import Layer, Lengths, Manifest
from permille.package.reader import Package
from permille.quantization.types import Scheme
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
LENGTHS = Lengths(step=12.0)
"""Lengths that suit the model of `tests.bigram_engine`."""
_NOUNS = ("river", "house", "garden", "winter", "letter", "engine", "harbour", "window", "forest", "bread")
_VERBS = ("crossed", "painted", "remembered", "opened", "followed", "lost", "found", "carried")
_PLACES = ("in the morning", "near the old bridge", "without a word", "before the rain", "at last")


def sentences(count: int, *, seed: int = 0) -> list[str]:
    """Return made-up sentences. All of them differ, because each contains its number."""
    rng = np.random.Generator(np.random.PCG64(seed))
    result = []
    for number in range(count):
        first, second = (_NOUNS[i] for i in rng.integers(0, len(_NOUNS), 2))
        verb, place = _VERBS[rng.integers(0, len(_VERBS))], _PLACES[rng.integers(0, len(_PLACES))]
        result.append(f"On day {number} the {first} {verb} the {second} {place}.")
    return result


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Chat template of many instruct models."""


def tiny_tokenizer(vocabulary: int = 320) -> Tokenizer:
    """Return a small byte-level BPE tokenizer. `SPECIAL_TOKENS` are the ids 0, 1, 2."""
    # Return a copy, because callers change it.
    return Tokenizer.from_str(_trained_tokenizer(vocabulary))


@cache
def _trained_tokenizer(vocabulary: int) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sentences(200), trainer)
    return tokenizer.to_str()


def tiny_package(
    blobs: Path,
    *,
    density: float = 0.05,
    seed: int = 0,
    scheme: Scheme = Scheme.NF4,
    config: Mapping[str, Any] | None = None,
    chat_template: str | None = None,
    files: Mapping[str, bytes] | None = None,
) -> Package:
    """Write a package into the folder `blobs`: a random model of `TINY_LLAMA` with a random mask.

    Args:
        config: Changes of `TINY_LLAMA`.
        files: Files that replace the default files of the model.
    """
    chosen = json.dumps({**TINY_LLAMA, **(config or {})})
    digest, made = _packed(density, seed, scheme, chosen, chat_template, tuple((files or {}).items()))
    blobs.mkdir(parents=True, exist_ok=True)
    folder = BlobFolder(blobs)
    for data in made:
        folder.put_bytes(data)
    return Package.open(folder, digest)


@lru_cache(maxsize=64)
def _packed(
    density: float,
    seed: int,
    scheme: Scheme,
    config_json: str,
    chat_template: str | None,
    files: tuple[tuple[str, bytes], ...],
) -> tuple[str, tuple[bytes, ...]]:
    """Return the digest and the blobs of a package. Both are cached."""
    config = json.loads(config_json)
    rng = np.random.Generator(np.random.PCG64(seed))
    weights = {name: _random_weight(rng, name, shape) for name, shape in expected_tensors(config).items()}
    mask = {
        name: np.sort(rng.choice(n * k, size=max(1, round(density * n * k)), replace=False)).astype(np.uint32)
        for name, (n, k) in scoped_tensors(config)
    }
    tokenizer_config = {"bos_token": SPECIAL_TOKENS[0], "eos_token": SPECIAL_TOKENS[1]}
    own = {
        "tokenizer.json": tiny_tokenizer(config["vocab_size"]).to_str().encode(),
        "tokenizer_config.json": json.dumps(tokenizer_config).encode(),
    }
    if chat_template is not None:
        own["chat_template.jinja"] = chat_template.encode()
    model = MemoryModel(
        config=config,
        tensors={name: _raw(name, w) for name, w in weights.items()},
        files={**own, **dict(files)},
    )
    chosen = ChosenMask(indices=mask, method="random", density=density)
    with TemporaryDirectory() as root:
        blobs = BlobFolder(Path(root))
        without = pack_model(blobs, model, chosen, scheme)
        manifest = Manifest.from_bytes(blobs.read(without, limit=MAX_MANIFEST_BYTES))
        blobs.delete(without)
        digest = write_manifest(blobs, replace(manifest, lengths=LENGTHS))
        return digest, tuple(path.read_bytes() for path in Path(root).glob("sha256/*/*"))


@dataclass(frozen=True, kw_only=True)
class MemoryModel:
    """A model in memory from which packages are made."""

    config: Mapping[str, Any]
    tensors: Mapping[str, RawTensor]
    files: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(expected_tensors(self.config))

    def raw(self, name: str) -> RawTensor:
        return self.tensors[name]

    def file(self, name: str, *, limit: int) -> bytes | None:
        return self.files.get(name)


def program_bytes(rest: bytes = b"not a program") -> bytes:
    """Return bytes that have the header of a program (FORMAT 4.11), but that no runtime can load."""
    return struct.pack("<I8sIQQQ", 40, b"ET12eh00", 32, 40, 40, len(rest)) + rest


def program_package(package: Package, data: bytes = program_bytes()) -> Package:
    """Add a program to the package, in the same folder. The program is never run."""
    layer = Layer(role=Role.PROGRAM, digest=package.blobs.put_bytes(data), size_bytes=len(data))
    made = package.manifest.with_program(layer, {"weights": "float32"})
    return Package.open(package.blobs, write_manifest(package.blobs, made))


def _random_weight(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    if "norm" in name:
        return np.ones(shape, dtype=np.float32)
    scale = 0.5 if "embed" in name else 1.0 / np.sqrt(shape[-1])
    return (rng.standard_normal(shape) * scale).astype(np.float32)


def _raw(name: str, weight: NDArray[np.float32]) -> RawTensor:
    data = np.ascontiguousarray(weight, dtype="<f4").view(np.uint8).reshape(-1)
    return RawTensor(name=name, dtype="F32", shape=weight.shape, data=data)

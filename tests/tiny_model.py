"""A tiny random model in a folder, as `transformers` saves it, and a file with a corpus."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from safetensors.torch import load_file as load_tensors
from safetensors.torch import save_file as save_tensors

from permille.models.families import expected_tensors
from tests.packages import TINY_LLAMA, sentences, tiny_tokenizer


def write_model(folder: Path, *, config: Mapping[str, Any] | None = None, seed: int = 0) -> Path:
    """Write a random model of `config` (default `TINY_LLAMA`) with its tokenizer."""
    chosen = dict(config or TINY_LLAMA)
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.Generator(np.random.PCG64(seed))
    tensors = {
        name: (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)
        for name, shape in expected_tensors(chosen).items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(chosen))
    tiny_tokenizer(chosen["vocab_size"]).save(str(folder / "tokenizer.json"))
    tokenizer_config = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return folder


def write_published(folder: Path) -> Path:
    """Write a tiny OPT in the form of facebook/opt-1.3b: a pickle, vocab.json and merges.txt."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import OPTConfig, OPTForCausalLM

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<pad>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(iter(sentences(200)), trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.model.save(str(folder))
    names = {"bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>", "pad_token": "<pad>"}
    (folder / "special_tokens_map.json").write_text(json.dumps(names))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer", **names}))
    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=400,
        hidden_size=32,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        word_embed_proj_dim=32,
        architectures=["OPTForCausalLM"],
    )
    config.save_pretrained(folder)
    torch.save(OPTForCausalLM(config).state_dict(), folder / "pytorch_model.bin")
    return folder


def write_corpus(path: Path, *, rows: int = 600) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in sentences(rows)))
    return path


def spoil_weights(folder: Path) -> None:
    """Set one weight of a model to NaN and keep the type of the weights."""
    weights = load_tensors(folder / "model.safetensors")
    next(iter(weights.values())).view(-1)[0] = math.nan
    save_tensors(weights, folder / "model.safetensors", {"format": "pt"})

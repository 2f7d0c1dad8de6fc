"""Tiny packages with a tokenizer, for exports to llama.cpp."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from permille.models.gguf.config import ARCHITECTURES
from permille.package.blobs import BlobFolder
from permille.package.reader import Package
from permille.quantization.types import Scheme
from tests.packages import sentences, tiny_tokenizer
from tests.unit.engines.tiny import CONFIGS, tiny_model, write_package

VOCABULARY = 512
TEXTS = (*sentences(20, seed=3), "  two  spaces\n\n\tand a tab, 123 don't", "Été, naïve: 🎉 ¿qué?", "x")
FAMILIES = tuple(family for family in CONFIGS if family in ARCHITECTURES)
"""The families that llama.cpp supports."""
# llama.cpp requires these settings. For example, it scales attention scores by the size of a head.
SETTINGS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 64},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3_text": {"query_pre_attn_scalar": 16, "num_hidden_layers": 7},
    "smollm3": {"num_hidden_layers": 5, "no_rope_layers": [1, 1, 1, 0, 1]},
    "olmo2": {"attention_bias": False},
}
TEMPLATE = "{% for message in messages %}<s>{{ message['role'] }}: {{ message['content'] }}{% endfor %}"


def exported_package(
    folder: Path,
    family: str,
    scheme: Scheme = Scheme.INT4,
    *,
    tokenizer: bytes | None = None,
    changes: Mapping[str, Any] | None = None,
    files: Mapping[str, bytes] | None = None,
) -> Package:
    """Return a package of a random model, with a tokenizer and rows that are wide enough for GGUF blocks.

    Args:
        tokenizer: another `tokenizer.json`.
        changes: changes of the config.
        files: files that replace those beside the tokenizer.
    """
    settings = {"vocab_size": VOCABULARY, "hidden_size": 64} | SETTINGS.get(family, {}) | dict(changes or {})
    found = {
        "tokenizer.json": tokenizer or tiny_tokenizer(VOCABULARY - 8).to_str().encode(),
        "tokenizer_config.json": json.dumps({"bos_token": "<s>", "eos_token": "</s>"}).encode(),
        "chat_template.jinja": TEMPLATE.encode(),
        **(files or {}),
    }
    model = tiny_model(family, **settings)
    return write_package(BlobFolder(folder), model, scheme, density=0.01, files=found)


def sentencepiece_tokenizer() -> bytes:
    """Return a `tokenizer.json` as transformers converts it from a sentencepiece model.

    Unknown characters become bytes, and spaces become `▁`. The merges are all pairs that make a token, in the
    order of scores.
    """
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(
        sentences(200), trainers.BpeTrainer(vocab_size=VOCABULARY - 259, show_progress=False)
    )
    learned = json.loads(trained.to_str())["model"]
    made = ["".join(pair) for pair in learned["merges"]]
    letters = sorted(token for token in learned["vocab"] if len(token) == 1)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *made, *letters]
    known = {*made, *letters}
    merges = [
        (token[:place], token[place:])
        for token in made
        for place in range(1, len(token))
        if token[:place] in known and token[place:] in known
    ]
    vocab = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer.to_str().encode()

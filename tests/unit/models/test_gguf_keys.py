"""Tests that the metadata of a GGUF file means what it means to llama.cpp, or is refused by name."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from transformers import AutoModelForCausalLM

from permille.errors import InputError
from permille.models.gguf.config import read_model
from permille.models.gguf.file import GgufFile
from permille_lab.exports.llama_cpp import LlamaCpp
from tests.unit.engines.gguf_packages import exported_package
from tests.unit.engines.tiny import POSITIONS
from tests.unit.models.gguf_files import converted, rewritten, written

IDS_T = np.arange(3, 27)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def file_of(family: str) -> Path:
        folder = Path(mkdtemp(dir=tmp_path_factory.getbasetemp()))
        return written(exported_package(folder / "blobs", family), folder / "export")

    return file_of


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("llama", {"llama.rope.scaling.factor": 4.0}),
        ("llama", {"llama.rope.scale_linear": 4.0}),
        ("llama", {"llama.rope.scaling.factor": 4.0, "llama.rope.scale_linear": 2.0}),
        ("llama", {"llama.rope.scaling.type": "linear"}),
        ("llama", {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 0.0}),
        ("llama", {"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}),
        ("llama", {"llama.attention.sliding_window": 4}),
        ("qwen2", {"qwen2.attention.sliding_window": 4, "qwen2.rope.scale_linear": 2.0}),
        ("gemma2", {"gemma2.attn_logit_softcapping": None, "gemma2.final_logit_softcapping": None}),
        ("gemma3_text", {"gemma3.final_logit_softcapping": 1.0}),
        ("gemma3_text", {"gemma3.final_logit_softcapping": 0.0}),
        ("gemma3_text", {"gemma3.rope.scaling.factor": 4.0}),
        ("granite", {f"granite.{name}": None for name in ("attention.scale", "embedding_scale")}),
        ("granite", {"granite.residual_scale": None}),
    ],
    ids=str,
)
def test_a_key_means_what_llama_cpp_takes_it_for(
    family: str, keys: Mapping[str, Any], exported: Any, tmp_path: Path
) -> None:
    path = rewritten(GGUFReader(exported(family)), tmp_path / "changed.gguf", {}, dict(keys))
    converted(path, tmp_path / "folder")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "folder", dtype=torch.float32)
    with torch.no_grad():
        logit_TD = model(torch.from_numpy(IDS_T)[None]).logits[0].double()
    with LlamaCpp(path, context=POSITIONS) as peer:
        found_TD = peer.log_probs(IDS_T)
    # llama.cpp computes the activation of a Gemma by a table in float16.
    np.testing.assert_allclose(torch.log_softmax(logit_TD, -1), found_TD, atol=5e-3)


@pytest.mark.parametrize(
    ("family", "key", "value", "words"),
    [
        ("llama", "llama.attention.clamp_kqv", 0.1, "sets llama.attention.clamp_kqv to 0.1"),
        ("llama", "llama.attention.causal", False, "sets llama.attention.causal to False"),
        ("llama", "llama.rope.scaling.attn_factor", 2.0, "sets llama.rope.scaling.attn_factor to 2.0"),
        ("llama", "llama.logit_scale", 2.0, "sets llama.logit_scale to 2.0"),
        ("llama", "tokenizer.ggml.suppress_tokens", [1, 2], "sets tokenizer.ggml.suppress_tokens"),
        ("llama", "llama.rope.scaling.type", "yarn", "positions by 'yarn'"),
        ("llama", "llama.rope.scaling.factor", -2.0, "must be above 0"),
        ("gemma2", "gemma2.final_logit_softcapping", 0.0, "must be above 0"),
        ("gemma3_text", "gemma3.attn_logit_softcapping", 5.0, "sets gemma3.attn_logit_softcapping to 5.0"),
        ("gemma3_text", "gemma3.attention.sliding_window", None, "has no number 'gemma3.attention.sliding"),
        ("gemma3_text", "gemma3.attention.sliding_window_pattern", 2, "sets gemma3.attention.sliding_window"),
    ],
)
def test_a_key_that_is_not_obeyed_is_refused_by_name(
    family: str, key: str, value: Any, words: str, exported: Any, tmp_path: Path
) -> None:
    path = rewritten(GGUFReader(exported(family)), tmp_path / "changed.gguf", {}, {key: value})
    with pytest.raises(InputError, match=words):
        read_model(GgufFile(path))


def test_a_key_of_other_programs_is_ignored(exported: Any, tmp_path: Path) -> None:
    keys = {"qwen2.rope.scaling.factor": 4.0, "general.made_by": "me", "tokenizer.huggingface.json": "{}"}
    path = rewritten(GGUFReader(exported("llama")), tmp_path / "changed.gguf", {}, keys)
    assert read_model(GgufFile(path)).config == read_model(GgufFile(exported("llama"))).config

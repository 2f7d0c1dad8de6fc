"""A trained model as a Hugging Face folder in bfloat16, with its recipe and the manifest of its texts."""

from __future__ import annotations

import json
import platform
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from permille_lab.reference.model import Shape


def export(
    parameters: dict[str, Tensor], shape: Shape, corpus: Path, folder: Path, facts: dict[str, Any]
) -> None:
    """Write weights, config, tokenizer, `recipe.json` and `manifest.json` into `folder`."""
    model = LlamaForCausalLM(LlamaConfig(**shape.config()))
    state = {name: value.detach().cpu() for name, value in parameters.items()}
    if shape.tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    folder.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    for path in (corpus / "tokenizer").iterdir():
        shutil.copy(path, folder / path.name)
    shutil.copy(corpus / "manifest.json", folder / "manifest.json")
    facts = {
        **facts,
        "parameters": sum(value.numel() for value in parameters.values()),
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
    }
    (folder / "recipe.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")

"""Prune a model with llm-compressor. This runs in its environment and imports nothing of permille.

    python tests/oracles/llm_compressor.py MODEL TOKENS.npy METHOD PATTERN OUT.npz

PATTERN is "none" for half of each row, or for example 2:4.
"""

import sys

import numpy as np
import torch
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.pruning import SparseGPTModifier, WandaPruningModifier
from transformers import AutoModelForCausalLM


def main(folder: str, tokens: str, method: str, pattern: str, out: str) -> None:
    """Prune half of all linears of the decoder layers, and write the weights."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = np.load(tokens)
    data = Dataset.from_dict({"input_ids": rows.tolist(), "attention_mask": np.ones_like(rows).tolist()})
    layer = type(model.model.layers[0]).__name__
    modifier = {"wanda": WandaPruningModifier, "sparsegpt": SparseGPTModifier}[method](
        sparsity=0.5, mask_structure="0:0" if pattern == "none" else pattern, targets=[layer]
    )
    oneshot(
        model=model,
        dataset=data,
        recipe=[modifier],
        num_calibration_samples=len(rows),
        max_seq_length=rows.shape[1],
        shuffle_calibration_samples=False,
        pipeline="sequential",
    )
    layers = {name: value.detach().numpy() for name, value in model.named_parameters() if ".layers." in name}
    np.savez(out, **{name: value for name, value in layers.items() if value.ndim == 2})


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Tests of running a checkpoint layer by layer: the same bits as the whole model."""

from pathlib import Path
from typing import Any

import pytest
import torch

from permille.models.checkpoint import Checkpoint
from permille.models.layerwise import LayerStream
from permille.models.loading import load_model
from tests.unit.models.test_families import CASES, config_of

_WINDOWS = {"sliding_window": 4}


@pytest.mark.parametrize(
    ("family", "changes"), CASES, ids=[f"{name}-{i}" for i, (name, _) in enumerate(CASES)]
)
def test_the_stream_gives_the_logits_and_gradients_of_the_whole_model(
    tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    whole = _saved(tmp_path, family, changes)
    tokens_BT = torch.randint(0, 99, (2, 12), generator=torch.Generator().manual_seed(1))
    expected = whole(input_ids=tokens_BT, use_cache=False).logits
    expected.square().mean().backward()
    stream = LayerStream(Checkpoint(tmp_path))
    with stream.ends() as ends:
        hidden = [ends.embed(tokens_BT)]
    for index in range(stream.layers):
        with stream.layer(index) as layer:
            hidden.append(layer(hidden[-1]))
    with stream.ends() as ends:
        last = hidden[-1].requires_grad_()
        logits = ends.logits(last)
        assert torch.equal(logits, expected)
        (gradient,) = torch.autograd.grad(logits.square().mean(), last)
    for index in reversed(range(stream.layers)):
        with stream.layer(index) as layer, torch.enable_grad():
            layer.module.requires_grad_(True)
            before = hidden[index].detach().requires_grad_()
            layer(before).backward(gradient)  # type: ignore[no-untyped-call]
            assert before.grad is not None
            gradient = before.grad
            for name, parameter in layer.module.named_parameters():
                known = whole.get_parameter(f"{layer.prefix}.{name}").grad
                assert parameter.grad is not None and known is not None
                torch.testing.assert_close(parameter.grad, known)


def test_only_the_part_in_use_is_in_memory(tmp_path: Path) -> None:
    whole = _saved(tmp_path, "llama", {})
    stream = LayerStream(Checkpoint(tmp_path), dtype=torch.bfloat16)
    with stream.layer(1) as layer, torch.no_grad():
        hidden = layer(torch.zeros(1, 8, 32, dtype=torch.bfloat16))
        held = dict(layer.module.named_parameters())
        known = whole.get_parameter("model.layers.1.mlp.up_proj.weight").bfloat16()
        assert torch.equal(held["mlp.up_proj.weight"], known)
    assert hidden.dtype == torch.bfloat16
    parts = [stream._model, *stream._layers]
    assert all(parameter.is_meta for part in parts for parameter in part.parameters())


def _saved(folder: Path, family: str, changes: dict[str, Any]) -> Any:
    import transformers

    config = config_of(family, changes | (_WINDOWS if "gemma" in family or family == "mistral" else {}))
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    made.save_pretrained(folder)
    return load_model(folder)

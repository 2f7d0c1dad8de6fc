"""Tests of checkpoints with vision: their text model is read as a separate model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from permille.errors import InputError
from permille.models.checkpoint import Checkpoint
from permille.models.descriptions import Family
from permille.models.families import shape_of, text_config
from permille.models.layerwise import LayerStream
from permille.models.loading import load_model

_TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 99,
    "max_position_embeddings": 64,
}
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 2.0,
    "original_max_position_embeddings": 32,
    "llama_4_scaling_beta": 0.1,
}


def _gemma3() -> Any:
    config = transformers.Gemma3Config(
        text_config=_TEXT | {"sliding_window": 5}, vision_config=_VISION, mm_tokens_per_image=4
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def _ministral3(*, tied: bool = True) -> Any:
    text = _TEXT | {"model_type": "ministral3", "rope_parameters": _YARN, "pad_token_id": 0}
    vision = _VISION | {"model_type": "pixtral", "head_dim": 8}
    config = transformers.Mistral3Config(text_config=text, vision_config=vision, tie_word_embeddings=tied)
    return transformers.Mistral3ForConditionalGeneration(config)


def _untied() -> Any:
    return _ministral3(tied=False)


CASES = [
    (_gemma3, Family.GEMMA3_TEXT),
    (_ministral3, Family.MINISTRAL3),
    (_untied, Family.MINISTRAL3),
]


@pytest.fixture(params=CASES, ids=["gemma3", "mistral3", "untied"])
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Family, Path]:
    torch.manual_seed(0)
    make, family = request.param
    model = make().eval()
    model.save_pretrained(tmp_path)
    return model, family, tmp_path


def _check(model: Any, family: Family, folder: Path) -> None:
    checkpoint = Checkpoint(folder)
    assert checkpoint.family is family
    assert not [name for name in checkpoint.names if "vision" in name or "projector" in name]
    loaded, ids = load_model(folder), torch.arange(20)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model(input_ids=ids).logits, rtol=0, atol=1e-5)
    stream = LayerStream(checkpoint)
    with stream.ends() as ends:
        hidden_BTH = ends.embed(ids)
    assert (len(hidden_BTH[0]), stream.layers) == (20, 2)


def test_its_logits_are_those_of_the_whole(case: tuple[Any, Family, Path]) -> None:
    _check(*case)


@pytest.mark.parametrize(
    "names",
    [
        {
            "model.language_model.": "language_model.model.",
            "model.vision_tower.": "vision_tower.",
            "lm_head.": "language_model.lm_head.",
        },
        {"language_model.model.": "model.language_model.", "vision_tower.": "model.vision_tower."},
    ],
)
def test_older_and_newer_names_are_known(case: tuple[Any, Family, Path], names: dict[str, str]) -> None:
    weights = case[2] / "model.safetensors"
    tensors = load_file(weights)
    for old, new in names.items():
        tensors = {
            (new + name.removeprefix(old) if name.startswith(old) else name): tensor
            for name, tensor in tensors.items()
        }
    save_file(tensors, weights, metadata={"format": "pt"})
    _check(*case)


def test_a_config_without_its_text_part_or_with_codes_is_refused(case: tuple[Any, Family, Path]) -> None:
    path = case[2] / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(InputError, match=r"already quantized \(fp8\)"):
        Checkpoint(case[2])
    del config["text_config"]
    path.write_text(json.dumps(config))
    with pytest.raises(InputError, match="has no text_config"):
        Checkpoint(case[2])


def test_what_a_published_config_of_gemma_3_leaves_out_is_transformers_default() -> None:
    """The config of gemma-3-4b-it has four sizes of its text model, but no numbers of heads."""
    inner = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    }
    shape = shape_of(text_config({"model_type": "gemma3", "text_config": inner}))
    own = transformers.Gemma3Config(text_config=inner).text_config
    assert (shape.heads, shape.kv_heads, shape.head, shape.vocabulary) == (
        *(own.num_attention_heads, own.num_key_value_heads),
        *(own.head_dim, own.vocab_size),
    )
    assert shape.layers == 34 and shape.hidden == 2560

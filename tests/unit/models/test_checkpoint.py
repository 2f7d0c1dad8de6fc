"""Tests of reading a model folder without torch, and of refusing other folders."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from permille.errors import InputError
from permille.models.checkpoint import Checkpoint, inside
from permille.models.descriptions import Family
from permille.models.families import scoped_tensors
from permille.models.loading import FileTokenizer, load_model

EXAMPLE = Path(__file__).parents[3] / "examples" / "model"


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def write_header(folder: Path, header: bytes, data: bytes = b"") -> None:
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)


def test_tensors_are_those_of_the_model_bit_for_bit(model: Any, folder: Path) -> None:
    checkpoint = Checkpoint(folder)
    assert checkpoint.family is Family.LLAMA
    assert set(checkpoint.names) == set(model.state_dict()) - {"lm_head.weight"}
    for name in checkpoint.names:
        assert checkpoint.float32(name).tobytes() == model.state_dict()[name].numpy().tobytes()
        assert isinstance(checkpoint.raw(name).data, np.memmap)
        assert not checkpoint.raw(name).data.flags.writeable
    assert checkpoint.parameters == model.num_parameters()
    assert checkpoint.size_bytes == 4 * model.num_parameters()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_kept_and_widened_exactly(model: Any, folder: Path, dtype: torch.dtype) -> None:
    model.to(dtype).save_pretrained(folder)
    checkpoint = Checkpoint(folder)
    name = "model.layers.1.mlp.up_proj.weight"
    assert checkpoint.raw(name).dtype == ("BF16" if dtype is torch.bfloat16 else "F16")
    assert checkpoint.float32(name).tolist() == model.state_dict()[name].float().tolist()


def test_a_sharded_model_reads_as_a_whole_one(model: Any, folder: Path, tmp_path: Path) -> None:
    sharded = tmp_path / "sharded"
    model.save_pretrained(sharded, max_shard_size="8KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    whole, parts = Checkpoint(folder), Checkpoint(sharded)
    assert whole.names == parts.names
    for name in whole.names:
        assert whole.float32(name).tobytes() == parts.float32(name).tobytes()


def test_scoped_weights_are_read_on_access_in_tensor_id_order(folder: Path) -> None:
    checkpoint = Checkpoint(folder)
    weights = checkpoint.weights("layers:1-")
    assert [(name, weights[name].shape) for name in weights] == list(
        scoped_tensors(checkpoint.config, "layers:1-")
    )
    assert len(weights) == 7


def test_old_names_and_buffers_are_mapped(folder: Path, model: Any) -> None:
    state = dict(model.state_dict())
    state["lm_head.weight"] = state["lm_head.weight"].clone()
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
    safetensors.torch.save_file(state, folder / "model.safetensors")
    assert "lm_head.weight" not in Checkpoint(folder).names


def test_digest_is_of_names_and_contents_alone(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "other-name"
    copy.mkdir()
    for path in folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    (copy / "README.md").write_text("not part of the model")
    names = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json")
    assert Checkpoint(folder).files() == names
    digest = Checkpoint(folder).digest()
    assert digest.startswith("sha256:")
    assert Checkpoint(copy).digest() == digest
    (copy / "tokenizer.json").write_text("{}")
    assert Checkpoint(copy).digest() != digest


def test_reading_a_checkpoint_imports_no_torch(folder: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from permille.models.checkpoint import Checkpoint;"
        "import permille.models.sources, permille.sensitivity.masks, permille.quantization;"
        "print(Checkpoint(Path(sys.argv[1])).parameters, 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(folder)]
    assert subprocess.run(command, capture_output=True, check=True).stdout.split()[1] == b"False"


@pytest.mark.parametrize("name", ["", "..", "a/b", "/etc/passwd", "..\\x", "a\0b"])
def test_only_bare_file_names_are_opened(folder: Path, name: str) -> None:
    with pytest.raises(InputError, match="bare file name"):
        inside(folder, name)


def test_a_link_that_leads_out_of_the_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("{}")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to(secret)
    with pytest.raises(InputError, match="leads out of it"):
        Checkpoint(folder).digest()
    (folder / "model.safetensors").rename(tmp_path / "w")
    (folder / "model.safetensors").symlink_to(tmp_path / "w")
    with pytest.raises(InputError, match="leads out of it"):
        Checkpoint(folder)


def test_a_snapshot_of_the_hubs_cache_is_a_model_and_its_links_lead_to_its_blobs_alone(
    folder: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "models--owner--name"
    snapshot, blobs = cache / "snapshots" / "abc", cache / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in folder.iterdir():
        (blobs / f"digest-of-{path.name}").write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(f"../../blobs/digest-of-{path.name}")
    assert Checkpoint(snapshot).digest() == Checkpoint(folder).digest()
    for target in ("../../refs/main", "../../../secret", "../../blobs/../secret"):
        (snapshot / "tokenizer.json").unlink()
        (snapshot / "tokenizer.json").symlink_to(target)
        with pytest.raises(InputError, match="leads out of it"):
            Checkpoint(snapshot)


def test_a_folder_with_pickles_only_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"It has pytorch_model\.bin\. Only jobs, such as builds, convert"):
        Checkpoint(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "must hold a JSON object"),
        *((text, "is not valid JSON") for text in ("{", "[" * 100_000, "\xff")),
    ],
)
def test_a_config_that_is_no_json_object_is_refused(folder: Path, text: str, message: str) -> None:
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(InputError, match=message):
        Checkpoint(folder)


def test_a_checkpoint_that_disagrees_with_its_config_is_refused(folder: Path, model: Any) -> None:
    edit_config(folder, num_hidden_layers=3)
    with pytest.raises(InputError, match=r"9 missing: model\.layers\.2"):
        Checkpoint(folder)
    edit_config(folder, num_hidden_layers=1)
    with pytest.raises(InputError, match="9 unknown"):
        Checkpoint(folder)
    edit_config(folder, num_hidden_layers=2, vocab_size=255)
    with pytest.raises(InputError, match=r"embed_tokens\.weight: expected shape \(255, 16\)"):
        Checkpoint(folder)


def entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes


@pytest.mark.parametrize(
    "entry",
    [
        *({}, 7, entry(dtype=3)),
        *(entry(data_offsets=bad) for bad in ([0, 7], [0, 16], [8, 0], [0, 8, 9])),
        *(entry(shape=bad) for bad in ([-2], [True], [1 << 62, 4, 1 << 62])),
    ],
)
def test_a_malformed_header_is_refused(folder: Path, entry: Any) -> None:
    write_header(folder, json.dumps({"a": entry}).encode(), bytes(8))
    with pytest.raises(InputError, match=r"model\.safetensors"):
        Checkpoint(folder)


@pytest.mark.parametrize("content", [b"", b"\x00" * 7, (1 << 40).to_bytes(8, "little"), b"\xff" * 64])
def test_a_file_without_a_header_is_refused(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(InputError, match="expected a header"):
        Checkpoint(folder)


def test_a_pointer_of_git_lfs_is_told_from_damage(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:ab\n")
    with pytest.raises(InputError, match="git lfs pull"):
        Checkpoint(folder)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("config.json", "a folder that transformers saved"), ("model.safetensors", "Download the model again")],
)
def test_a_missing_file_says_what_to_do(folder: Path, name: str, hint: str) -> None:
    (folder / name).unlink()
    with pytest.raises(InputError, match=hint):
        Checkpoint(folder)


def test_an_integer_tensor_is_refused_when_it_is_read_as_a_weight(folder: Path, model: Any) -> None:
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    state["model.norm.weight"] = torch.ones(16, dtype=torch.int64)
    safetensors.torch.save_file(state, folder / "model.safetensors")
    with pytest.raises(InputError, match=r"norm.weight: expected F32, F16 or BF16, got I64"):
        Checkpoint(folder)


@pytest.mark.parametrize("weight_map", [None, {}, {"a": "../w.safetensors"}, {"a": "w.bin"}, {"a": 3}])
def test_an_index_that_names_anything_but_safetensors_here_is_refused(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(InputError, match=r"weight_map|bare file name"):
        Checkpoint(folder)


def test_load_model_gives_transformers_model_in_eval_mode(folder: Path, model: Any) -> None:
    loaded = load_model(folder)
    assert not loaded.training
    ids_BT = torch.arange(10)[None]
    assert torch.equal(loaded(input_ids=ids_BT).logits, model(input_ids=ids_BT).logits)
    assert load_model(folder, torch.bfloat16).dtype == torch.bfloat16


def test_load_model_never_runs_code_of_the_folder(folder: Path) -> None:
    (folder / "modeling_evil.py").write_text("raise SystemExit('ran')")
    edit_config(folder, auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"})
    assert type(load_model(folder)).__name__ == "LlamaForCausalLM"


def test_special_tokens_in_public_text_are_text(tmp_path: Path) -> None:
    for name, special in (("special", True), ("user-defined", False)):
        folder = tmp_path / name
        folder.mkdir()
        words = json.loads((EXAMPLE / "tokenizer.json").read_text())
        for token in words["added_tokens"]:
            token["special"] = special  # a file may call its end of a text an ordinary word
        (folder / "tokenizer.json").write_text(json.dumps(words))
        for other in ("tokenizer_config.json", "config.json"):
            shutil.copy(EXAMPLE / other, folder)
        tokenizer = FileTokenizer(folder)
        ends = {token["id"] for token in words["added_tokens"] if token["content"] in ("<s>", "</s>")}
        assert not ends & set(tokenizer.encode("Now <s>9</s> 7 pounds."))


def test_tokenizer_encodes_text_and_refuses_what_it_cannot_read(folder: Path) -> None:
    assert len(FileTokenizer(folder).encode("hello")) == 5
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match="tokenizers library"):
        FileTokenizer(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(InputError, match=r"has no file tokenizer\.json"):
        FileTokenizer(folder)

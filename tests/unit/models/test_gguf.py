"""Tests of GGUF files as models: round trips by the exporter, transformers' own loader, and forged files."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType
from gguf.quants import quantize

from permille.errors import InputError
from permille.models.architecture import architecture_of
from permille.models.gguf import folder as gguf_folder
from permille.models.gguf.config import read_model
from permille.models.gguf.file import GgufFile
from permille.models.gguf.folder import convert, model_folder
from permille.models.gguf.tokenizer import tokenizer_files
from permille.models.ollama import ollama_file, ollama_name
from permille.package.blobs import BlobFolder
from permille.package.reader import Package
from permille.quantization import dequantize
from tests.unit.engines.gguf_packages import (
    FAMILIES,
    SETTINGS,
    TEMPLATE,
    TEXTS,
    VOCABULARY,
    exported_package,
    sentencepiece_tokenizer,
)
from tests.unit.engines.tiny import reference_model, tiny_model
from tests.unit.models.gguf_files import converted, rewritten, written


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    return written(exported_package(folder / "blobs", "llama"), folder / "export")


def test_files_are_utf8_in_every_locale(llama: Path, tmp_path: Path) -> None:
    code = "import sys, pathlib; from permille.models.gguf.folder import convert; "
    code += "convert(*map(pathlib.Path, sys.argv[1:]))"
    command: list[str | Path] = [sys.executable, "-c", code, llama, tmp_path]
    ascii_alone = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(command, env=os.environ | ascii_alone, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Ġ" in (tmp_path / "tokenizer.json").read_text(encoding="utf-8")


def test_two_that_convert_a_file_at_once_leave_it_whole(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert_while_another_does(path: Path, folder: Path) -> None:
        monkeypatch.setattr(gguf_folder, "convert", convert)
        (folder / "begun").touch()
        model_folder(path, tmp_path)
        assert (folder / "begun").exists(), "the other one took our folder away"
        convert(path, folder)

    monkeypatch.setattr(gguf_folder, "convert", convert_while_another_does)
    made = model_folder(llama, tmp_path)
    assert not (made / "begun").exists(), "what is there already stays"
    assert [path.name for path in made.parent.iterdir()] == [made.name]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_comes_back_as_it_went(family: str, tmp_path: Path) -> None:
    package = exported_package(tmp_path / "blobs", family)
    checkpoint = converted(written(package, tmp_path / "export"), tmp_path / "folder")
    ours, theirs = architecture_of(package.config), architecture_of(checkpoint.config)
    same = "llama" if family == "mistral" else family
    assert checkpoint.config["model_type"] == same
    for name in ("heads", "kv_heads", "head", "norm", "block", "activation", "tied", "norm_epsilon"):
        assert getattr(ours, name) == getattr(theirs, name), name
    for name in ("attention_scale", "embedding_scale", "residual_scale", "logits_scale"):
        assert getattr(ours, name) == pytest.approx(getattr(theirs, name), rel=1e-6), name
    for first, second in zip(ours.layers, theirs.layers, strict=True):
        assert family == "mistral" or first.window == second.window
        if first.rope is None or second.rope is None:
            assert family == "smollm3"
            assert first.rope is second.rope
            continue
        np.testing.assert_allclose(first.rope.frequency_E, second.rope.frequency_E, rtol=1e-6)
    for name in checkpoint.names:
        if name in package.plain_names:
            expected = package.plain(name).float32()
        else:
            expected = dequantize(package.quantized(name))
            expected.reshape(-1)[package.mask(name)] = values_of(package, name)
        np.testing.assert_allclose(checkpoint.float32(name), expected, rtol=0, atol=2e-7)


@pytest.mark.parametrize("family", ["smollm3", "granite", "olmo2"])
def test_the_converted_model_computes_what_the_package_does(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    package = exported_package(tmp_path / "blobs", family)
    converted(written(package, tmp_path / "export"), tmp_path / "folder")
    settings = {"vocab_size": VOCABULARY, "hidden_size": 64} | SETTINGS.get(family, {})
    expected = reference_model(package, tiny_model(family, **settings))
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "folder", dtype=torch.float32)
    ids_1T = torch.arange(3, 40)[None]
    with torch.no_grad():
        torch.testing.assert_close(found(ids_1T).logits, expected(ids_1T).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "key", "value", "message"),
    [
        ("olmo2", "olmo2.attention.sliding_window", 4096, "OLMo 3"),
        ("granite", "granite.rope.scaling.finetuned", False, "Granite without rotations"),
        ("granite", "granite.logit_scale", 0.0, "must be above 0"),
    ],
)
def test_a_relative_that_computes_otherwise_is_refused(
    family: str, key: str, value: Any, message: str, tmp_path: Path
) -> None:
    path = written(exported_package(tmp_path / "blobs", family), tmp_path / "export")
    other = rewritten(GGUFReader(path), tmp_path / "other.gguf", {}, {key: value})
    with pytest.raises(InputError, match=message):
        model_folder(other, tmp_path)


@pytest.mark.parametrize(
    ("name", "written_as"), [("refact", "smollm"), ("smaug-bpe", "dbrx"), ("dbrx", "dbrx")]
)
def test_other_names_of_the_same_cuts_are_read(
    name: str, written_as: str, llama: Path, tmp_path: Path
) -> None:
    from tokenizers import Tokenizer

    found = []
    for number, pre in enumerate((name, written_as)):
        keys = {"tokenizer.ggml.pre": pre}
        other = rewritten(GGUFReader(llama), tmp_path / f"{number}.gguf", {}, keys)
        converted(other, tmp_path / f"folder{number}")
        found.append(Tokenizer.from_file(str(tmp_path / f"folder{number}" / "tokenizer.json")))
    for text in TEXTS:
        assert found[0].encode(text).ids == found[1].encode(text).ids


def values_of(package: Package, name: str) -> Any:
    start = 0
    for tensor in package.manifest.tensors:
        if tensor.name == name:
            return package.values()[start : start + tensor.count]
        start += tensor.count
    raise KeyError(name)


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
def test_tokenizer_and_template_come_back(kind: str, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    own = sentencepiece_tokenizer() if kind == "sentencepiece" else None
    package = exported_package(tmp_path / "blobs", "llama", tokenizer=own)
    folder = tmp_path / "folder"
    converted(written(package, tmp_path / "export"), folder)
    before = Tokenizer.from_buffer(package.file("tokenizer.json"))
    after = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in TEXTS:
        assert after.encode(text).ids == before.encode(text).ids, text
        assert after.decode(after.encode(text).ids) == before.decode(before.encode(text).ids)
    assert (folder / "chat_template.jinja").read_text() == TEMPLATE
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert (settings["bos_token"], settings["eos_token"]) == ("<s>", "</s>")


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_tensors_and_tokens_are_those_of_transformers(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # transformers' loader omits a Llama's biases.
    changes = {"attention_bias": False, "mlp_bias": False} if family == "llama" else {}
    package = exported_package(tmp_path / "blobs", family, changes=changes)
    path, folder = written(package, tmp_path / "export"), tmp_path / "folder"
    converted(path, folder)
    # transformers looks for the file in the current folder first, and the README puts a model.gguf there.
    monkeypatch.chdir(path.parent)
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = theirs.state_dict()
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, theirs(ids).logits)
    if family != "llama":  # for Qwen2, transformers splits text as Qwen does, regardless of the file
        return
    tokenizers = [AutoTokenizer.from_pretrained(folder)]
    tokenizers.append(AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name))
    first, second = (each(TEXTS[0], add_special_tokens=False).input_ids for each in tokenizers)
    assert first == second


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "F16", "BF16"])
def test_every_type_is_decoded(name: str, llama: Path, tmp_path: Path) -> None:
    reader, kind = GGUFReader(llama), GGMLQuantizationType[name]
    rows = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    data = quantize(rows, kind)
    path = rewritten(reader, tmp_path / "other.gguf", {"blk.0.attn_output.weight": (data, kind)})
    model = read_model(GgufFile(path))
    found = model.float32("model.layers.0.self_attn.o_proj.weight")
    np.testing.assert_allclose(found, rows, atol=0.3)
    from gguf.quants import dequantize as decode

    np.testing.assert_array_equal(found, decode(data, kind).reshape(64, 64))


@pytest.mark.parametrize("name", ["Q4_K", "Q5_K", "Q6_K"])
def test_blocks_of_256_are_decoded(name: str, tmp_path: Path) -> None:
    package = exported_package(tmp_path / "blobs", "llama", changes={"hidden_size": 256, "head_dim": 64})
    reader = GGUFReader(written(package, tmp_path / "export"))
    kind = GGMLQuantizationType[name]
    from gguf import GGML_QUANT_SIZES
    from gguf.quants import dequantize as decode

    rows = {t.name: t for t in reader.tensors}["blk.0.ffn_gate.weight"]
    number = int(rows.shape[1])
    _, block_bytes = GGML_QUANT_SIZES[kind]
    data = np.random.default_rng(1).integers(0, 255, (number, block_bytes), dtype=np.uint8)
    halves = slice(208, 210) if name == "Q6_K" else slice(0, 4)
    data[:, halves] = np.frombuffer(np.full(2, 0.01, "<f2").tobytes(), np.uint8)[: halves.stop - halves.start]
    path = rewritten(reader, tmp_path / "other.gguf", {"blk.0.ffn_gate.weight": (data, kind)})
    found = read_model(GgufFile(path)).float32("model.layers.0.mlp.gate_proj.weight")
    np.testing.assert_array_equal(found, decode(data, kind).reshape(number, 256))
    assert np.isfinite(found).all()


def test_types_that_are_not_read_are_refused_by_name(llama: Path, tmp_path: Path) -> None:
    kind = GGMLQuantizationType.IQ4_NL
    data = np.zeros((64, 64 // 32 * 18), np.uint8)
    path = rewritten(GGUFReader(llama), tmp_path / "o.gguf", {"blk.0.attn_output.weight": (data, kind)})
    with pytest.raises(InputError, match="IQ4_NL, which is not read"):
        GgufFile(path)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("general.architecture", "mamba", "architecture 'mamba'"),
        ("llama.expert_count", 8, "mixture of experts"),
        ("llama.block_count", 3, "lacks the tensor"),
        ("llama.embedding_length", 128, "of shape"),
        ("llama.attention.head_count", 0, "head_count as 0, which is no whole number from 1"),
        (
            "llama.attention.head_count_kv",
            3,
            "4 attention heads, which are no multiple of its 3 key",
        ),
        ("llama.attention.head_count_kv", 0, "head_count_kv as 0"),
        ("llama.rope.freq_base", 0.0, "freq_base as 0.0, which must be above 0"),
        ("llama.rope.freq_base", 1.5e-45, "unsupported settings: .*frequencies"),
        ("llama.rope.dimension_count", 0, "dimension_count as 0"),
        ("llama.context_length", 0, "context_length as 0"),
        ("llama.attention.layer_norm_rms_epsilon", -1e-5, "which must be above 0"),
        ("llama.rope.scaling.type", "yarn", "scales its positions"),
        ("llama.context_length", float("nan"), "no number"),
        ("split.count", 2, "part of a split model"),
        ("tokenizer.ggml.model", "bert", "tokenizer of kind 'bert'"),
        ("tokenizer.ggml.pre", "unheard-of", "cuts text by the rules"),
        ("tokenizer.chat_template", 7, "no text 'tokenizer.chat_template'"),
        ("llama.block_count", 0xFFFFFFFF, "names 4294967295 layers"),
        ("llama.attention.key_length", 0, "key_length as 0"),
        (
            "tokenizer.ggml.tokens",
            [f"t{number}" for number in range(1000)],
            "1000 tokens for an embedding of",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    key: str, value: Any, words: str, llama: Path, tmp_path: Path
) -> None:
    path = rewritten(GGUFReader(llama), tmp_path / "other.gguf", {}, {key: value})
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(InputError, match=words):
        convert(path, folder)


def test_lists_of_too_many_items_together_are_refused(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("permille.models.gguf.file._MOST_ITEMS", 2000)
    path = rewritten(GGUFReader(llama), tmp_path / "other.gguf", {}, {"other.list": [0] * 1999})
    with pytest.raises(InputError, match="lists of more than 2000 items together"):
        GgufFile(path)


def test_settings_that_an_engine_would_refuse_are_refused_with_the_file(tmp_path: Path) -> None:
    reader = GGUFReader(written(exported_package(tmp_path / "blobs", "gpt_neox"), tmp_path / "export"))
    path = rewritten(reader, tmp_path / "other.gguf", {}, {"gptneox.rope.dimension_count": 3})
    with pytest.raises(InputError, match=r"unsupported settings: .*needs an even number"):
        read_model(GgufFile(path))


@pytest.mark.parametrize("size", [0, 3, 23, 24, 400, 5000, -1])
def test_truncated_file_is_refused(size: int, llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(llama.read_bytes()[:size])
    with pytest.raises(InputError, match=r"truncated|no GGUF file"):
        model_folder(path, tmp_path)
    assert not list((tmp_path / "gguf").glob("*"))


@pytest.mark.parametrize("place", [8, 16])
def test_huge_counts_are_refused_before_anything_is_made(place: int, llama: Path, tmp_path: Path) -> None:
    data = bytearray(llama.read_bytes())
    data[place : place + 8] = struct.pack("<Q", (1 << 63) + 1)
    path = tmp_path / "huge.gguf"
    path.write_bytes(data)
    with pytest.raises(InputError, match="more than"):
        GgufFile(path)


def test_numbers_that_are_not_finite_are_refused(llama: Path, tmp_path: Path) -> None:
    rows = np.full((64, 64), np.nan, np.float32)
    changed = {"blk.0.attn_output.weight": (rows.view(np.uint8), GGMLQuantizationType.F32)}
    path = rewritten(GGUFReader(llama), tmp_path / "nan.gguf", changed)
    with pytest.raises(InputError, match="not finite"):
        model_folder(path, tmp_path)


def test_damaged_files_are_refused_or_read_and_never_crash(llama: Path, tmp_path: Path) -> None:
    data, random = llama.read_bytes(), Random(7)
    header = GgufFile(llama)
    end = min(place.begin for place in header.tensors.values())
    path = tmp_path / "damaged.gguf"
    refused = 0
    for _ in range(300):
        damaged = bytearray(data)
        for _ in range(random.randint(1, 4)):
            damaged[random.randrange(end)] = random.choice((0, 1, 255, random.randrange(256)))
        path.write_bytes(damaged)
        try:
            read_model(GgufFile(path))
        except InputError:
            refused += 1
    assert refused > 30


def test_same_file_is_converted_once(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(llama.read_bytes())
    folder = model_folder(tmp_path / "model.gguf", tmp_path)
    before = (folder / "model.safetensors").stat().st_mtime_ns
    (tmp_path / "again.gguf").write_bytes(llama.read_bytes())
    assert model_folder(tmp_path / "again.gguf", tmp_path) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


def test_ollama_names_are_found_in_its_store(tmp_path: Path) -> None:
    digest = "ab" * 32
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{digest}"}
    manifest = tmp_path / "manifests/registry.ollama.ai/library/smollm2/135m"
    manifest.parent.mkdir(parents=True)
    manifest.write_text(
        json.dumps({"layers": [layer, {"mediaType": "other", "digest": "sha256:" + "0" * 64}]})
    )
    with pytest.raises(InputError, match="ollama pull smollm2:135m"):
        ollama_file("smollm2:135m", tmp_path)
    blob = tmp_path / "blobs" / f"sha256-{digest}"
    blob.parent.mkdir()
    blob.write_bytes(b"GGUF")
    assert ollama_file("smollm2:135m", tmp_path) == (tmp_path, blob)
    other = tmp_path / "manifests/hf.co/Team/Model-GGUF/Q4_K_M"
    other.parent.mkdir(parents=True)
    other.write_text(manifest.read_text())
    assert ollama_file("hf.co/Team/Model-GGUF:Q4_K_M", tmp_path) == (tmp_path, blob)
    with pytest.raises(InputError, match="NAME:TAG"):
        ollama_file("hf.co/../../Model", tmp_path)
    with pytest.raises(InputError, match="has no model smollm2:latest"):
        ollama_file("smollm2", tmp_path)
    with pytest.raises(InputError, match="NAME:TAG"):
        ollama_file("../../etc/passwd", tmp_path)
    manifest.write_text("[]")
    with pytest.raises(InputError, match="damaged"):
        ollama_file("smollm2:135m", tmp_path)


def test_settings_of_sampling_come_along(llama: Path, tmp_path: Path) -> None:
    keys = {
        "general.sampling.temp": 0.5,
        "general.sampling.top_k": 20,
        "general.sampling.penalty_repeat": 1.25,
    }
    converted(rewritten(GGUFReader(llama), tmp_path / "sampled.gguf", {}, keys), tmp_path / "folder")
    found = json.loads((tmp_path / "folder/generation_config.json").read_text())
    assert found == {"temperature": 0.5, "top_k": 20, "repetition_penalty": 1.25, "eos_token_id": [1]}


def test_settings_of_sampling_are_brought_into_range_or_left_out(llama: Path, tmp_path: Path) -> None:
    keys = {
        "general.sampling.temp": -1.0,
        "general.sampling.top_k": (-1, GGUFValueType.INT32),
        "general.sampling.top_p": 1.5,
        "general.sampling.penalty_repeat": float("nan"),
    }
    converted(rewritten(GGUFReader(llama), tmp_path / "sampled.gguf", {}, keys), tmp_path / "folder")
    found = json.loads((tmp_path / "folder/generation_config.json").read_text())
    assert found == {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "eos_token_id": [1]}


def test_the_first_of_repeated_merges_counts_as_in_llama_cpp(llama: Path, tmp_path: Path) -> None:
    merges = tokenizer_files(GgufFile(llama))["tokenizer.json"]["model"]["merges"]
    repeated = [*(" ".join(pair) for pair in merges), " ".join(merges[0])]
    keys = {"tokenizer.ggml.merges": repeated}
    path = rewritten(GGUFReader(llama), tmp_path / "other.gguf", {}, keys)
    assert tokenizer_files(GgufFile(path))["tokenizer.json"]["model"]["merges"] == merges


def test_packages_of_a_converted_model_can_be_made(llama: Path, tmp_path: Path) -> None:
    from permille.package.build import ChosenMask, pack_model

    folder = tmp_path / "folder"
    checkpoint = converted(llama, folder)
    indices = {"model.layers.0.self_attn.q_proj.weight": np.arange(5, dtype=np.uint32)}
    blobs = BlobFolder(tmp_path / "blobs")
    digest = pack_model(blobs, checkpoint, ChosenMask(indices=indices, method="random", density=0.1))
    assert Package.open(blobs, digest).k == 5


def test_gemma_with_billions_of_layers_is_refused_at_once(tmp_path: Path) -> None:
    reader = GGUFReader(written(exported_package(tmp_path / "blobs", "gemma2"), tmp_path / "export"))
    path = rewritten(reader, tmp_path / "other.gguf", {}, {"gemma2.block_count": 0xFFFFFFFF})
    with pytest.raises(InputError, match="names 4294967295 layers"):
        read_model(GgufFile(path))


def test_template_that_is_not_utf8_is_refused(llama: Path, tmp_path: Path) -> None:
    data = llama.read_bytes()
    assert data.count(b"for message in messages") == 1
    path = tmp_path / "latin.gguf"
    path.write_bytes(data.replace(b"for message in messages", b"for message in m\xffssages"))
    with pytest.raises(InputError, match="template that is not UTF-8"):
        model_folder(path, tmp_path)


def test_scores_that_are_texts_are_refused(tmp_path: Path) -> None:
    package = exported_package(tmp_path / "blobs", "llama", tokenizer=sentencepiece_tokenizer())
    reader = GGUFReader(written(package, tmp_path / "export"))
    scores = ["high"] * len(reader.fields["tokenizer.ggml.scores"].contents())
    path = rewritten(reader, tmp_path / "other.gguf", {}, {"tokenizer.ggml.scores": scores})
    with pytest.raises(InputError, match="scores of tokens that are no numbers"):
        model_folder(path, tmp_path)


def test_tensors_over_each_others_bytes_are_refused(llama: Path, tmp_path: Path) -> None:
    data = bytearray(llama.read_bytes())
    name = b"blk.0.ffn_up.weight"
    at = data.index(name) + len(name) + 4 + 8 * 2 + 4  # the tensor's offset, after its dimensions and type
    data[at : at + 8] = struct.pack("<Q", 0)
    path = tmp_path / "over.gguf"
    path.write_bytes(data)
    with pytest.raises(InputError, match="over the bytes of another tensor"):
        GgufFile(path)


def test_scores_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    package = exported_package(tmp_path / "blobs", "llama", tokenizer=sentencepiece_tokenizer())
    reader = GGUFReader(written(package, tmp_path / "export"))
    scores = [float("nan")] * len(reader.fields["tokenizer.ggml.scores"].contents())
    path = rewritten(reader, tmp_path / "other.gguf", {}, {"tokenizer.ggml.scores": scores})
    with pytest.raises(InputError, match="scores of tokens that are no numbers"):
        model_folder(path, tmp_path)


def test_vocabulary_of_too_many_merges_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = exported_package(tmp_path / "blobs", "llama", tokenizer=sentencepiece_tokenizer())
    path = written(package, tmp_path / "export")
    monkeypatch.setattr("permille.models.gguf.tokenizer._MOST_MERGES", 10)
    with pytest.raises(InputError, match="more than 10 merges"):
        model_folder(path, tmp_path)


def test_divisors_of_another_shape_are_refused_unread(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    added = {"rope_freqs.weight": (np.ones(64, np.float32), GGMLQuantizationType.F32)}
    file = GgufFile(rewritten(GGUFReader(llama), tmp_path / "other.gguf", added))
    monkeypatch.setattr(GgufFile, "float32", lambda _self, name: pytest.fail(f"{name} was read"))
    with pytest.raises(InputError, match=r"'rope_freqs.weight' of shape \[64\], for heads of"):
        read_model(file)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("mine", "mine"),
        ("my notes (2)", "my-notes-2"),
        ("-f", "f"),
        ("été", "t"),
        ("日記", "personal"),
        ("a/b:c", "a-b-c"),
        ("x" * 200, "x" * 80),
        ("v1.2_b", "v1.2_b"),
    ],
)
def test_a_name_for_ollama_is_one_that_it_takes(text: str, name: str) -> None:
    assert ollama_name(text) == name

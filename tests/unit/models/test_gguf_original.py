"""Tests of exports that take tokenizer and metadata from the GGUF file that a model came from."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType

from permille.engines.gguf.export import GGUF_FILE, MODELFILE, export_gguf
from permille.errors import InputError
from permille.models.gguf.config import ROPE_FACTORS
from permille.models.gguf.file import GgufFile
from permille.models.gguf.original import OF_THE_WEIGHTS
from permille.package.reader import Package
from tests.packages import CHATML
from tests.unit.engines.gguf_packages import (
    FAMILIES,
    TEMPLATE,
    VOCABULARY,
    exported_package,
    sentencepiece_tokenizer,
)
from tests.unit.models.gguf_files import packed, rewritten, written

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# Keys as other converters write them. The package cannot hold any of them.
KEYS: dict[str, Any] = {
    "general.alignment": 64,
    "general.author": (b"Jos\xe9", GGUFValueType.STRING),  # not UTF-8
    "general.languages": ["en", "de"],
    "general.sampling.temp": 0.7,
    "quantize.imatrix.chunks_count": (-3, GGUFValueType.INT32),
    "tokenizer.ggml.add_sep_token": False,
    "tokenizer.ggml.fim_pre_token_id": 5,
    "tokenizer.ggml.mask_token_id": (1 << 40, GGUFValueType.UINT64),
    "tokenizer.ggml.precompiled_charsmap": ([-1, 2, 127], GGUFValueType.ARRAY, GGUFValueType.INT8),
    "tokenizer.ggml.remove_extra_whitespaces": (True, GGUFValueType.BOOL),
    "x.flags": ([True, False], GGUFValueType.ARRAY, GGUFValueType.BOOL),
    "x.wide": ([0.1, 1e300], GGUFValueType.ARRAY, GGUFValueType.FLOAT64),
}


def source(folder: Path, family: str = "llama", keys: dict[str, Any] | None = None, **options: Any) -> Path:
    """Write a GGUF file of a random model, with further keys."""
    file = written(exported_package(folder / "blobs", family, **options), folder / "export")
    return rewritten(GGUFReader(file), folder / "source.gguf", {}, keys)


def exported(package: Package, folder: Path, like: Path, kind: str = "f32") -> GgufFile:
    export_gguf(package, None, folder, kind=kind, like=like)
    return GgufFile(folder / GGUF_FILE)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_metadata_of_the_file_survives_in_every_family(family: str, tmp_path: Path) -> None:
    data = sentencepiece_tokenizer() if family.startswith("gemma") else None
    file = source(tmp_path, family, KEYS, tokenizer=data)
    theirs = GgufFile(file)
    ours = exported(packed(file, tmp_path / "package"), tmp_path / "out", file, "q8_0")
    kept = theirs.metadata.keys() - set(OF_THE_WEIGHTS)
    assert ours.metadata.keys() - set(OF_THE_WEIGHTS) == kept
    assert kept >= KEYS.keys() - set(OF_THE_WEIGHTS)
    for key in kept:
        assert (ours.metadata[key], ours.types[key]) == (theirs.metadata[key], theirs.types[key]), key
    assert ours.metadata["general.architecture"] == theirs.metadata["general.architecture"]
    assert ours.metadata["general.file_type"] == 7  # LLAMA_FTYPE_MOSTLY_Q8_0
    assert {name: place.shape for name, place in ours.tensors.items()} == {
        name: place.shape for name, place in theirs.tensors.items()
    }


def test_float32_gives_back_the_numbers_of_the_file(tmp_path: Path) -> None:
    file = source(tmp_path, "gemma3_text", tokenizer=sentencepiece_tokenizer())
    package = packed(file, tmp_path / "package")
    ours, theirs = exported(package, tmp_path / "out", file), GgufFile(file)
    for name in theirs.tensors:
        # The package has 8 bits.
        np.testing.assert_allclose(ours.float32(name), theirs.float32(name), rtol=0, atol=0.02, err_msg=name)


def test_scores_that_a_list_of_merges_cannot_tell_survive(tmp_path: Path) -> None:
    # In Gemma's files, for example, all tokens of line breaks have the same score.
    scores = ([-1000.0] * VOCABULARY, GGUFValueType.ARRAY, GGUFValueType.FLOAT32)
    file = source(tmp_path, keys={"tokenizer.ggml.scores": scores}, tokenizer=sentencepiece_tokenizer())
    package = packed(file, tmp_path / "package")
    with pytest.raises(InputError, match=r"cut a text into other tokens.* name that file with --like"):
        export_gguf(package, None, tmp_path / "out", kind="f32")
    ours = exported(package, tmp_path / "out", file)
    assert ours.metadata["tokenizer.ggml.scores"] == scores[0]


def test_an_empty_list_is_left_out(tmp_path: Path) -> None:
    file = source(tmp_path, keys={"general.tags": ["none"]})
    # The `gguf` package writes no empty list, so make one of as many bytes, with a longer name.
    texts, (one, four, none) = b"\x09\0\0\0\x08\0\0\0", (n.to_bytes(8, "little") for n in (1, 4, 0))
    full = b"\x0c\0\0\0\0\0\0\0general.tags" + texts + one + four + b"none"
    empty = b"\x18\0\0\0\0\0\0\0general.tags.of.the.file" + texts + none
    file.write_bytes(file.read_bytes().replace(full, empty))
    theirs = GgufFile(file).metadata
    assert theirs["general.tags.of.the.file"] == []
    ours = exported(packed(file, tmp_path / "package"), tmp_path / "out", file).metadata
    assert theirs.keys() - ours.keys() == {"general.tags.of.the.file"}


def test_divisors_of_frequencies_are_those_of_the_file(tmp_path: Path) -> None:
    file = source(tmp_path, changes={"rope_parameters": LLAMA3, "max_position_embeddings": 16384})
    factor_E = GgufFile(file).float32(ROPE_FACTORS) * np.float32(1 + 1e-6)
    other = rewritten(
        GGUFReader(file), tmp_path / "other.gguf", {ROPE_FACTORS: (factor_E, GGMLQuantizationType.F32)}
    )
    ours = exported(packed(file, tmp_path / "package"), tmp_path / "out", other)
    np.testing.assert_array_equal(ours.float32(ROPE_FACTORS), factor_E)


def test_the_modelfile_has_the_template_and_the_ends_of_the_file(tmp_path: Path) -> None:
    tokens = {"tokenizer.ggml.eos_token_id": 7, "tokenizer.ggml.eot_token_id": 9}
    keys = {"tokenizer.chat_template": CHATML, **tokens}
    file = source(tmp_path, keys=keys)
    texts = GgufFile(file).metadata["tokenizer.ggml.tokens"]
    exported(packed(file, tmp_path / "package"), tmp_path / "out", file)
    use = (tmp_path / "out" / MODELFILE).read_text(encoding="utf-8")
    stops = re.findall('PARAMETER stop "(.*)"', use)
    assert stops[:2] == [texts[7], texts[9]]
    assert 'TEMPLATE """' in use
    assert TEMPLATE not in use


def test_a_file_of_another_model_is_refused_before_a_tensor_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = source(tmp_path)
    package = packed(file, tmp_path / "package")
    tokens = list(GgufFile(file).metadata["tokenizer.ggml.tokens"])
    tokens[300], tokens[301] = tokens[301], tokens[300]
    merges = list(GgufFile(file).metadata["tokenizer.ggml.merges"])
    merges[0], merges[1] = merges[1], merges[0]
    cases: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
        ("llama", {}, {"tokenizer.ggml.tokens": tokens}, "its token 300 is"),
        ("llama", {}, {"tokenizer.ggml.tokens": tokens[:300]}, "its token 300 is None"),
        ("llama", {}, {"tokenizer.ggml.merges": merges}, "its merge 0 is"),
        ("llama", {}, {"tokenizer.ggml.merges": merges[2:]}, "its merge 0 is"),
        (
            "llama",
            {},
            {"tokenizer.ggml.add_bos_token": True},
            "its bos at the begin of a text is True",
        ),
        ("llama", {}, {"llama.rope.freq_base": 5e5}, r"its llama.rope.freq_base is 500000.0, not 10000.0"),
        ("llama", {"num_hidden_layers": 3}, {}, "its llama.block_count is 3, not 2"),
        ("llama", {"intermediate_size": 96}, {}, "its llama.feed_forward_length is 96, not 44"),
        ("llama", {"attention_bias": False}, {}, r"0.self_attn.q_proj.bias is None, not \(64"),
        ("llama", {"tie_word_embeddings": False}, {}, r"its lm_head.weight is \(512, 64\), not None"),
        ("llama", {"rope_parameters": LLAMA3}, {}, "its rope_freqs.weight is array"),
        ("qwen2", {}, {}, "its general.architecture is 'qwen2', not 'llama'"),
    ]
    others = [
        (source(tmp_path / str(number), family, keys, changes=changes), message)
        for number, (family, changes, keys, message) in enumerate(cases)
    ]
    (tmp_path / "no.gguf").write_bytes(b"PK" + bytes(30))
    others += [(tmp_path / "no.gguf", "is no GGUF file"), (tmp_path / "none.gguf", "There is no file")]

    def never(*_: object) -> None:
        raise AssertionError("the work has begun")

    monkeypatch.setattr("permille.engines.gguf.export._write_model", never)
    for other, message in others:
        with pytest.raises(InputError, match=message):
            export_gguf(package, None, tmp_path / "out", like=other)
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*"))

"""Tests of exported files in llama.cpp itself: tokens of a text, predictions and greedy text are the same."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader, GGUFValueType
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from permille.choices import AdapterKind
from permille.engines.export import export_transformers
from permille.engines.factory import LIGHT, open_engine
from permille.engines.gguf.adapter import ADAPTER_FILE, export_gguf_adapter
from permille.engines.gguf.export import GGUF_FILE, export_gguf
from permille.engines.sampling import TokenSampling
from permille.errors import InputError
from permille.package.build import ChosenAdapter
from permille.package.reader import Package
from permille_agent.embed import package_tokenizer
from permille_lab.exports.llama_cpp import LlamaCpp
from tests.packages import tiny_tokenizer
from tests.unit.engines.gguf_packages import (
    FAMILIES,
    TEMPLATE,
    TEXTS,
    VOCABULARY,
    exported_package,
    sentencepiece_tokenizer,
)
from tests.unit.engines.tiny import POSITIONS, tiny_package, variants
from tests.unit.models.gguf_files import packed, rewritten, written

IDS_T = np.random.default_rng(0).integers(3, 320, 40)
# llama.cpp's GELU uses a float16 table. For GPT-NeoX, it uses the tanh form, too.
GELU = {family for family in FAMILIES if family.startswith(("gemma", "gpt"))}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def divergence(own_TD: NDArray[np.float64], their_TD: NDArray[np.float64]) -> float:
    """Return the Kullback-Leibler divergence in nats per token."""
    return float((np.exp(own_TD) * (own_TD - their_TD)).sum(-1).mean())


def wanted(package: Package, values_K: NDArray[np.float32], folder: Path) -> NDArray[np.float64]:
    """Return the log-probabilities of unmodified transformers."""
    export_transformers(package, values_K, folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.from_numpy(IDS_T)[None]).logits[0]
    return np.asarray(torch.log_softmax(logits.double(), dim=-1).numpy())


def opened(package: Package, values_K: NDArray[np.float32], folder: Path, kind: str) -> LlamaCpp:
    export_gguf(package, values_K, folder, kind=kind)
    return LlamaCpp(folder / GGUF_FILE, context=POSITIONS)


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_is_without_loss(family: str, tmp_path: Path) -> None:
    package = exported_package(tmp_path / "blobs", family)
    values_K = variants(package, 2, scale=0.2)[1]
    expected_TD = wanted(package, values_K, tmp_path / "reference")
    with opened(package, values_K, tmp_path / "out", "f32") as peer:
        assert divergence(expected_TD, peer.log_probs(IDS_T)) < (1e-6 if family in GELU else 1e-11)
        ours = open_engine(package, LIGHT, threads=1).generate(
            values_K, IDS_T[:8], TokenSampling(max_new_tokens=32)
        )
        assert peer.greedy(IDS_T[:8], 32) == list(ours)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_beside_the_base_is_the_personal_model(family: str, tmp_path: Path) -> None:
    package = exported_package(tmp_path / "blobs", family)
    values_K = variants(package, 2, scale=0.2)[1]
    expected_TD = wanted(package, values_K, tmp_path / "reference")
    export_gguf(package, None, tmp_path / "base", kind="f32")
    exported = export_gguf_adapter(package, values_K, tmp_path / "mine")
    assert exported.kept == 1
    base, adapter = tmp_path / "base" / GGUF_FILE, tmp_path / "mine" / ADAPTER_FILE
    assert adapter.stat().st_size == exported.size_bytes < base.stat().st_size
    with LlamaCpp(base, context=POSITIONS, lora=adapter) as peer:
        assert divergence(expected_TD, peer.log_probs(IDS_T)) < (1e-6 if family in GELU else 1e-11)


def test_an_adapter_in_float16_keeps_almost_all(tmp_path: Path) -> None:
    package = exported_package(tmp_path / "blobs", "llama")
    values_K = variants(package, 2, scale=0.2)[1]
    small = export_gguf_adapter(package, values_K, tmp_path / "small", kind="f16")
    exact = export_gguf_adapter(package, values_K, tmp_path / "exact")
    assert 1 - 1e-6 < small.kept < 1 == exact.kept
    assert small.size_bytes < 0.7 * exact.size_bytes


def test_a_trained_adapter_keeps_its_scale(tmp_path: Path) -> None:
    adapter = ChosenAdapter(kind=AdapterKind.LORA, rank=4, alpha=6)
    package = tiny_package(tmp_path / "blobs", "llama", adapter=adapter).package
    values_K = variants(package, 2, scale=0.2)[1]
    exported = export_gguf_adapter(package, values_K, tmp_path / "mine")
    assert exported.largest_rank == 4
    fields = GGUFReader(tmp_path / "mine" / ADAPTER_FILE).fields
    assert fields["adapter.lora.alpha"].contents() == 6


@pytest.mark.parametrize(
    ("kind", "scale", "words"),
    [("q8_0", 0.2, "An adapter is f32 or f16"), ("f32", 0.0, "no change to export")],
)
def test_no_change_and_other_types_are_refused(kind: str, scale: float, words: str, tmp_path: Path) -> None:
    package = exported_package(tmp_path / "blobs", "llama")
    with pytest.raises(InputError, match=words):
        export_gguf_adapter(package, variants(package, 2, scale=scale)[1], tmp_path / "mine", kind=kind)
    assert not (tmp_path / "mine").exists()


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"rope_parameters": LLAMA3, "mlp_bias": True, "head_dim": 32}),
        ("qwen2", {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0}}),
        ("gpt_neox", {"tie_word_embeddings": True, "use_parallel_residual": False}),
        ("gemma3_text", {"tie_word_embeddings": False}),
    ],
)
def test_settings_of_a_family_are_told(family: str, changes: dict[str, object], tmp_path: Path) -> None:
    package = exported_package(tmp_path / "blobs", family, changes=changes)
    expected_TD = wanted(package, package.values(), tmp_path / "reference")
    with opened(package, package.values(), tmp_path / "out", "f32") as peer:
        assert divergence(expected_TD, peer.log_probs(IDS_T)) < 1e-6


@pytest.mark.parametrize(("kind", "most"), [("f16", 1e-5), ("q8_0", 2e-3), ("q4_0", 0.05)])
def test_a_type_costs_what_is_said_of_it(kind: str, most: float, tmp_path: Path) -> None:
    package = exported_package(tmp_path / "blobs", "llama", changes={"intermediate_size": 96})
    values_K = variants(package, 2, scale=0.2)[1]
    expected_TD = wanted(package, values_K, tmp_path / "reference")
    base_TD = wanted(package, package.values(), tmp_path / "base")
    with opened(package, values_K, tmp_path / "out", kind) as peer:
        found = divergence(expected_TD, peer.log_probs(IDS_T))
    assert found < most
    assert found < 0.25 * divergence(expected_TD, base_TD)  # small beside the effect of the personal values


@pytest.mark.parametrize("bytes_only", [True, False])
def test_a_text_has_the_same_tokens(bytes_only: bool, tmp_path: Path) -> None:
    data = tiny_tokenizer(VOCABULARY - 8).to_str().encode() if bytes_only else sentencepiece_tokenizer()
    package = exported_package(tmp_path / "blobs", "llama", tokenizer=data)
    own = package_tokenizer(package)
    with opened(package, package.values(), tmp_path / "out", "f16") as peer:
        for text in TEXTS:
            assert peer.tokens(text) == own.prompt(text).tolist()
        assert peer.chat_template() == TEMPLATE
    own.close()


@pytest.mark.slow
def test_the_guides_python_block_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    package = exported_package(tmp_path / "blobs", "llama")
    export_gguf(package, None, tmp_path / "mine-gguf", kind="q8_0")
    page = (Path(__file__).resolve().parents[3] / "docs/howto/export-a-personal-model.md").read_text("utf-8")
    (block,) = re.findall(r"```python\n(import xllamacpp\n.*?)```", page, flags=re.S)
    exec(block.replace("mine-gguf", str(tmp_path / "mine-gguf")), {})
    assert capsys.readouterr().out.strip()


def test_a_tokenizer_of_another_file_reads_text_as_that_file_does(tmp_path: Path) -> None:
    # Tokens with equal scores, as Gemma's line breaks: `tokenizer.json` cannot hold their order.
    first = exported_package(tmp_path / "blobs", "gemma", tokenizer=sentencepiece_tokenizer())
    scores = ([-1000.0] * VOCABULARY, GGUFValueType.ARRAY, GGUFValueType.FLOAT32)
    file = rewritten(
        GGUFReader(written(first, tmp_path / "first")),
        tmp_path / "source.gguf",
        {},
        {"tokenizer.ggml.scores": scores},
    )
    package = packed(file, tmp_path / "package")
    values_K = variants(package, 2, scale=0.2)[1]
    export_gguf(package, values_K, tmp_path / "out", kind="f32", like=file)
    with (
        LlamaCpp(file, context=POSITIONS) as theirs,
        LlamaCpp(tmp_path / "out" / GGUF_FILE, context=POSITIONS) as ours,
    ):
        for text in TEXTS:
            assert ours.tokens(text) == theirs.tokens(text)
        ids_T = np.array(ours.tokens(TEXTS[0])[:8])
        engine = open_engine(package, LIGHT, threads=1)
        own = engine.generate(values_K, ids_T, TokenSampling(max_new_tokens=32))
        assert ours.greedy(ids_T, 32) == list(own)
        assert ours.greedy(ids_T, 32) != theirs.greedy(ids_T, 32)

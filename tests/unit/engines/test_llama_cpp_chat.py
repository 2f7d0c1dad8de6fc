"""Tests that llama.cpp gives the engine's answers in a chat. It renders the file's own template.

The files are float32, so they hold every number exactly. In q8_0, most answers of a real model differ in
their words. The real model is SmolLM2-135M-Instruct. Its GGUF file is named by PERMILLE_SMOLLM2, or lies in
`build/smollm2`.
"""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from permille.engines.factory import LIGHT, open_engine
from permille.engines.gguf.export import GGUF_FILE, MODELFILE, export_gguf
from permille.engines.gguf.modelfile import chat_parts
from permille.engines.sampling import TokenSampling
from permille.models.checkpoint import Checkpoint
from permille.models.families import scoped_tensors
from permille.package.blobs import BlobFolder
from permille.package.build import ChosenMask, pack_model
from permille.package.reader import Package
from permille.quantization.types import Scheme
from permille_agent.embed import package_tokenizer
from permille_lab.exports.llama_cpp import LlamaCpp
from tests.packages import CHATML
from tests.real_model import smollm2_file

ROOT = Path(__file__).resolve().parents[3]
QUESTIONS = (
    "What is the capital of France?",
    "Name three colours.",
    "How many legs does a spider have?",
    "Who wrote Hamlet?",
    "Say hello in Spanish.",
)
TOKENS = 40


def packed(model: Path, blobs: Path) -> Package:
    """Return a package of a model folder. Its mask has every thousandth weight."""
    checkpoint = Checkpoint(model)
    mask = {
        name: np.arange(0, rows * columns, 1000, dtype=np.uint32)
        for name, (rows, columns) in scoped_tensors(checkpoint.config)
    }
    chosen = ChosenMask(indices=mask, method="random", density=0.001)
    folder = BlobFolder(blobs)
    return Package.open(folder, pack_model(folder, checkpoint, chosen, Scheme.NF4))


def answers(package: Package, folder: Path, context: int) -> tuple[list[str], list[str]]:
    """Return the greedy answers to the questions: the engine's, and llama.cpp's."""
    rng = np.random.default_rng(0)
    values_K = package.values()
    values_K = values_K + (0.2 * values_K.std() * rng.standard_normal(len(values_K))).astype(np.float32)
    engine, tokenizer = open_engine(package, LIGHT, threads=1), package_tokenizer(package)
    sampling = TokenSampling(max_new_tokens=TOKENS, temperature=0.0, stop_ids=tokenizer.stop_ids)
    own = [
        "".join(
            tokenizer.stream(engine.generate(values_K, tokenizer.chat_prompt([("user", asked)]), sampling))
        )
        for asked in QUESTIONS
    ]
    export_gguf(package, values_K, folder, kind="f32")
    parts = chat_parts(package.file("chat_template.jinja").decode(), {"bos_token": tokenizer.bos or ""})
    assert parts is not None
    assert parts.go() in (folder / MODELFILE).read_text()  # Ollama renders the same prompts
    for asked in QUESTIONS:
        own_prompt = tokenizer.template.render([("user", asked)], add_generation_prompt=True)
        assert parts.render([("user", asked)]) == own_prompt
    tokenizer.close()
    with LlamaCpp(folder / GGUF_FILE, context=context) as peer:
        return own, [peer.answer([("user", asked)], TOKENS) for asked in QUESTIONS]


def test_the_example_answers_alike(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(ROOT / "examples/model", model)
    (model / "chat_template.jinja").write_text(CHATML)
    own, theirs = answers(packed(model, tmp_path / "blobs"), tmp_path / "mine", 256)
    assert own == theirs
    assert all(own)


@pytest.mark.slow
def test_a_real_model_answers_alike_and_knows_the_capital_of_france(tmp_path: Path) -> None:
    file, model = smollm2_file(), tmp_path / "model"
    loaded = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = LlamaForCausalLM(config)
    plain.load_state_dict(loaded.state_dict())
    plain.save_pretrained(model)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(model)
    own, theirs = answers(packed(model, tmp_path / "blobs"), tmp_path / "mine", 512)
    assert own == theirs
    assert "Paris" in own[0]

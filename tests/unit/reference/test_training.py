"""Training of the reference model: resumes bit for bit, learns, exports what transformers computes alike."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from permille.errors import InputError
from reference.model import initial, loss, rotation
from reference.muon import Optimizer, orthogonal
from reference.train import Run, train_decay, train_stable
from reference.windows import Windows
from tests.unit.reference.tiny import RECIPE, SHAPE, write_corpus

ROOT = Path(__file__).parents[3]


def run(tmp_path: Path, name: str) -> Run:
    corpus = tmp_path / "corpus"
    return Run(corpus if corpus.exists() else write_corpus(corpus), tmp_path / name, SHAPE, RECIPE, "cpu")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(folder / "stable.pt", weights_only=True)["parameters"]
    return found


def test_a_run_killed_at_any_time_ends_with_the_same_bits(tmp_path: Path) -> None:
    whole = run(tmp_path, "whole")
    train_stable(whole, steps=60, minutes=None, save_every=7)
    command = [sys.executable, "-m", "reference.train", "--corpus", str(tmp_path / "corpus")]
    command += ["--run", str(tmp_path / "killed"), "--steps", "60", "--save-every", "7"]
    run(tmp_path, "killed")  # pins shape and recipe
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    checkpoint = tmp_path / "killed/stable.pt"
    while not checkpoint.exists() and child.poll() is None:
        time.sleep(0.002)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    stopped = torch.load(checkpoint, weights_only=True)["steps"]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    assert stopped < 60
    resumed, straight = weights(tmp_path / "killed"), weights(tmp_path / "whole")
    assert all(torch.equal(value, resumed[name]) for name, value in straight.items())


def test_decay_branches_off_and_leaves_the_stable_run_as_it_was(tmp_path: Path) -> None:
    first = run(tmp_path, "run")
    train_stable(first, steps=40, minutes=None, save_every=20)
    before = (tmp_path / "run/stable.pt").read_bytes()
    out = train_decay(run(tmp_path, "run"), steps=20, save_every=6, out=None)
    assert (tmp_path / "run/stable.pt").read_bytes() == before
    facts = json.loads((out / "recipe.json").read_text())
    assert (facts["steps"], facts["tokens_seen"]) == (60, 60 * 4 * 12)
    again = train_decay(run(tmp_path, "run"), steps=20, save_every=6, out=tmp_path / "again")
    same = (out / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()
    assert same


def test_an_exported_model_is_trained_on_with_windows_it_has_not_read(tmp_path: Path) -> None:
    """What its run would read next; the loss goes on falling from where it was."""
    first = run(tmp_path, "run")
    train_stable(first, steps=30, minutes=None, save_every=30)
    model = train_decay(run(tmp_path, "run"), steps=10, save_every=10, out=tmp_path / "model")
    decayed = Run(tmp_path / "corpus", tmp_path / "run", SHAPE, RECIPE, "cpu")
    decayed.load(tmp_path / "run/decay-30-10.pt")
    going_on = run(tmp_path, "further")
    going_on.begin_from(model)
    assert going_on.validation() == pytest.approx(decayed.validation(), abs=0.01)  # bfloat16 weights
    assert np.array_equal(going_on.windows.batch(40, 4), decayed.windows.batch(40, 4))

    first_part = run(tmp_path, "two parts")
    train_stable(first_part, steps=60, minutes=None, save_every=7, begin_from=model)
    for name in ("two parts", "one"):
        train_stable(run(tmp_path, name), steps=75, minutes=None, save_every=7, begin_from=model)
    whole, resumed = weights(tmp_path / "one"), weights(tmp_path / "two parts")
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())
    out = train_decay(run(tmp_path, "one"), steps=5, save_every=5, out=tmp_path / "longer")
    facts = json.loads((out / "recipe.json").read_text())
    digest = hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()
    assert facts["begun_from"] == {"model_sha256": digest, "steps": 40}
    assert facts["tokens_seen"] == 80 * 4 * 12
    assert facts["validation_loss_nats_per_token"] < decayed.validation(10**9)


@pytest.mark.parametrize(("changed", "named"), [({"seed": 7}, "'seed': 7"), ({"batch": 8}, "'batch': 8")])
def test_a_model_of_another_run_is_not_trained_on(
    tmp_path: Path, changed: dict[str, int], named: str
) -> None:
    train_stable(run(tmp_path, "run"), steps=2, minutes=None, save_every=2)
    model = train_decay(run(tmp_path, "run"), steps=1, save_every=1, out=tmp_path / "model")
    other = Run(tmp_path / "corpus", tmp_path / "other", SHAPE, replace(RECIPE, **changed), "cpu")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=named):
        other.begin_from(model)
    manifest = tmp_path / "model/manifest.json"
    manifest.write_text(manifest.read_text() + " ")
    with pytest.raises(InputError, match="manifest"):
        run(tmp_path, "same").begin_from(model)


def test_bfloat16_learns_as_float32_does(tmp_path: Path) -> None:
    """Its weights and momenta are float32, and it is told by its losses, which are not the same ones."""
    found = {}
    for compute in ("float32", "bfloat16"):
        corpus = tmp_path / "corpus"
        recipe = replace(RECIPE, compute=compute)
        learning = Run(
            corpus if corpus.exists() else write_corpus(corpus), tmp_path / compute, SHAPE, recipe, "cpu"
        )
        train_stable(learning, steps=100, minutes=None, save_every=1000)
        found[compute] = learning.validation()
        state = torch.load(tmp_path / compute / "stable.pt", weights_only=True)
        assert {value.dtype for value in state["parameters"].values()} == {torch.float32}
    assert found["bfloat16"] == pytest.approx(found["float32"], abs=0.05)
    assert found["bfloat16"] != found["float32"]


def test_training_learns_the_chain(tmp_path: Path) -> None:
    learning = run(tmp_path, "run")
    before = learning.validation()
    train_stable(learning, steps=150, minutes=None, save_every=1000)
    assert before == pytest.approx(np.log(64), abs=0.01)
    assert learning.validation() < 1.5  # log 2 = 0.69 is the chain's own entropy


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    broken = run(tmp_path, "run")
    with torch.no_grad():
        broken.parameters["model.norm.weight"].fill_(float("nan"))
    with pytest.raises(InputError, match="finite"):
        broken.step(1.0)


def test_another_corpus_is_refused(tmp_path: Path) -> None:
    """Neither stable steps nor a decay may go on with text that the run did not begin with."""
    train_stable(run(tmp_path, "run"), steps=2, minutes=None, save_every=2)
    manifest = tmp_path / "corpus/manifest.json"
    before, kept = manifest.read_text(), (tmp_path / "run/recipe.json").read_bytes()
    manifest.write_text(before.replace("0.7", "0.6"))
    with pytest.raises(InputError, match="corpus that the run began with"):
        run(tmp_path, "run")
    assert (tmp_path / "run/recipe.json").read_bytes() == kept
    manifest.write_text(before)
    train_decay(run(tmp_path, "run"), steps=1, save_every=1, out=None)


def test_a_run_begun_before_corpora_were_pinned_pins_its_own(tmp_path: Path) -> None:
    run(tmp_path, "run")
    path = tmp_path / "run/recipe.json"
    kept = json.loads(path.read_text())
    pinned = kept.pop("corpus_manifest_sha256")
    path.write_text(json.dumps(kept))
    run(tmp_path, "run")
    assert json.loads(path.read_text())["corpus_manifest_sha256"] == pinned


def test_the_log_holds_no_loss_that_was_not_computed(tmp_path: Path) -> None:
    """The same command again has no step to take, and so no training loss."""
    for _ in range(2):
        train_stable(run(tmp_path, "run"), steps=2, minutes=None, save_every=5)
        train_decay(run(tmp_path, "run"), steps=1, save_every=5, out=None)

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    lines = (tmp_path / "run/log.jsonl").read_text().splitlines()
    rows = [json.loads(line, parse_constant=refuse) for line in lines]
    assert ["training_loss" in row for row in rows] == [True, True, False, False]
    assert all(row["validation_loss"] > 0 for row in rows)


def test_decay_without_a_stable_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="stable checkpoint"):
        train_decay(run(tmp_path, "run"), steps=1, save_every=1, out=None)


@pytest.mark.parametrize("tied", [False, True])
def test_losses_are_those_of_transformers(tied: bool) -> None:
    shape = replace(SHAPE, tied=tied)
    parameters = initial(shape, 3)
    with torch.no_grad():
        for value in parameters.values():  # zero matrices would hide half of the model
            value.add_(torch.randn(value.shape, generator=torch.Generator().manual_seed(1)) * 0.1)
    tokens = torch.randint(0, 64, (3, 13), generator=torch.Generator().manual_seed(2))
    theirs = LlamaForCausalLM(LlamaConfig(**shape.config()))
    state = dict(parameters)
    if tied:
        state["lm_head.weight"] = parameters["model.embed_tokens.weight"]
    theirs.load_state_dict(state)
    expected = theirs(input_ids=tokens, labels=tokens).loss
    ours = loss(parameters, shape, tokens, rotation(12, shape.head))
    assert float(ours.detach()) == pytest.approx(float(expected), abs=2e-6)


def test_the_exported_folder_holds_bfloat16_and_its_papers(tmp_path: Path) -> None:
    first = run(tmp_path, "run")
    train_stable(first, steps=3, minutes=None, save_every=3)
    out = train_decay(run(tmp_path, "run"), steps=2, save_every=2, out=tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.lm_head.weight.dtype == torch.bfloat16
    names = {path.name for path in out.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "recipe.json", "manifest.json"} <= names


def test_orthogonal_brings_singular_values_near_one() -> None:
    rng = torch.Generator().manual_seed(0)
    for rows, columns in ((24, 16), (16, 24)):
        matrix = torch.randn(2, rows, columns, generator=rng)
        found = torch.linalg.svdvals(orthogonal(matrix))
        assert found.min() > 0.6 and found.max() < 1.3


def test_muon_takes_matrices_of_layers_and_adam_the_rest() -> None:
    optimizer = Optimizer(initial(SHAPE, 0))
    stacked = {name for names in optimizer.stacks for name in names}
    assert len(stacked) == 2 * 7
    assert set(optimizer.rest) == set(optimizer.parameters) - stacked
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"} <= set(optimizer.rest)


def test_each_window_of_a_stream_comes_once_an_epoch(tmp_path: Path) -> None:
    windows = Windows(write_corpus(tmp_path / "corpus"), {"first": 1.0}, 12, seed=5)
    each = 900 // 12 - 2
    rows = windows.batch(0, each)
    assert len({row.tobytes() for row in rows}) == each
    again = Windows(tmp_path / "corpus", {"first": 1.0}, 12, seed=5)
    np.testing.assert_array_equal(again.batch(0, each), rows)
    assert not np.array_equal(again.batch(1, each), rows)


def test_a_stream_too_short_for_a_window_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="tokens in second"):
        Windows(write_corpus(tmp_path / "corpus"), {"second": 1.0}, 400, seed=5)

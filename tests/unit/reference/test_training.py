"""Training of the reference model: resumes bit for bit, learns, exports what transformers computes alike."""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import permille_lab.reference.muon as muon_module
from permille.errors import InputError
from permille_lab.reference.model import initial, loss, rotation
from permille_lab.reference.muon import Optimizer, orthogonal
from permille_lab.reference.train import Run, train_decay, train_stable
from permille_lab.reference.windows import Windows
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
    command = [sys.executable, "-m", "permille_lab.reference.train", "--corpus", str(tmp_path / "corpus")]
    command += ["--run", str(tmp_path / "killed"), "--steps", "60", "--save-every", "7"]
    run(tmp_path, "killed").pin()  # shape and recipe
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


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Of three steps."""
    train_stable(run(tmp_path, "of the model"), steps=2, minutes=None, save_every=2)
    return train_decay(run(tmp_path, "of the model"), steps=1, save_every=1, out=tmp_path / "model")


@pytest.mark.parametrize(("changed", "named"), [({"seed": 7}, "'seed': 7"), ({"batch": 8}, "'batch': 8")])
def test_a_model_of_another_run_is_not_trained_on_and_pins_nothing(
    tmp_path: Path, model: Path, changed: dict[str, int], named: str
) -> None:
    recipe = replace(RECIPE, **changed)  # type: ignore[arg-type]
    other = Run(tmp_path / "corpus", tmp_path / "other", SHAPE, recipe, "cpu")
    with pytest.raises(InputError, match=named):
        train_stable(other, steps=5, minutes=None, save_every=2, begin_from=model)
    train_stable(run(tmp_path, "other"), steps=5, minutes=None, save_every=2, begin_from=model)
    assert run(tmp_path, "other").recipe == RECIPE


def test_what_a_run_began_from_is_what_it_goes_on_from(tmp_path: Path, model: Path) -> None:
    for name, begin_from in (("fresh", None), ("further", model)):
        train_stable(run(tmp_path, name), steps=5, minutes=None, save_every=2, begin_from=begin_from)
    train_stable(run(tmp_path, "further"), steps=6, minutes=None, save_every=2, begin_from=model)
    second = train_decay(run(tmp_path, "further"), steps=1, save_every=1, out=tmp_path / "second")
    facts = json.loads((second / "recipe.json").read_text())
    train_stable(run(tmp_path, "third"), steps=8, minutes=None, save_every=2, begin_from=second)
    third = train_decay(run(tmp_path, "third"), steps=1, save_every=1, out=tmp_path / "third-model")
    assert json.loads((third / "recipe.json").read_text())["begun_from"]["begun_from"] == facts["begun_from"]
    for name, wrong in (("fresh", model), ("further", second), ("further", tmp_path / "no model")):
        with pytest.raises(InputError, match=r"to have begun from|that the run began from"):
            train_stable(run(tmp_path, name), steps=9, minutes=None, save_every=2, begin_from=wrong)


@pytest.mark.parametrize(
    "damage",
    [
        lambda model: (model / "recipe.json").unlink(),
        lambda model: (model / "recipe.json").write_text("{}"),
        lambda model: (model / "recipe.json").write_text("no JSON"),
        lambda model: (model / "manifest.json").write_text("{}"),
        lambda model: (model / "model.safetensors").unlink(),
        lambda model: (model / "model.safetensors").write_bytes(b"torn"),
        lambda model: save_file({"other": torch.zeros(2)}, model / "model.safetensors"),
    ],
)
def test_a_damaged_model_is_refused_and_the_folder_named(
    tmp_path: Path, model: Path, damage: Callable[[Path], object]
) -> None:
    damage(model)
    begun = run(tmp_path, "further")
    before = {name: value.detach().clone() for name, value in begun.parameters.items()}
    with pytest.raises(InputError, match=re.escape(str(model))):
        begun.begin_from(model)
    assert all(torch.equal(value, begun.parameters[name]) for name, value in before.items())


def test_bfloat16_computes_products_and_muon_in_it_and_validates_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_corpus(tmp_path / "corpus")
    products: set[torch.dtype] = set()
    iterations: set[torch.dtype] = set()
    linear = torch.nn.functional.linear

    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        found = linear(x, weight)
        products.add(found.dtype)
        return found

    def iterated(g: torch.Tensor) -> torch.Tensor:
        iterations.add(g.dtype)
        return orthogonal(g)

    monkeypatch.setattr(torch.nn.functional, "linear", product)
    monkeypatch.setattr(muon_module, "orthogonal", iterated)
    for compute, expected in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        recipe = replace(RECIPE, compute=compute)
        learning = Run(tmp_path / "corpus", tmp_path / compute, SHAPE, recipe, "cpu")
        products.clear()
        iterations.clear()
        for _ in range(60):
            learning.step(1.0)
        assert (products, iterations) == ({expected}, {expected})
        products.clear()
        assert learning.validation() < 3.2  # from log 64 = 4.2
        assert products == {torch.float32}
        held = [*learning.parameters.values(), *learning.optimizer.state.values()]
        assert {value.dtype for value in held} == {torch.float32}


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
    run(tmp_path, "run").pin()
    path = tmp_path / "run/recipe.json"
    kept = json.loads(path.read_text())
    pinned = kept.pop("corpus_manifest_sha256")
    path.write_text(json.dumps(kept))
    run(tmp_path, "run").pin()
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

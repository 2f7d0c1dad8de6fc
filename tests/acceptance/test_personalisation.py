"""The command line with the real engine: train, compare, generate, export, share."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from permille.engines.light.engine import LightEngine
from permille.package.build import write_manifest
from permille.package.reader import Package
from permille.schemas.runs import LogForm
from permille.training.reference import Reference, make_reference
from permille.training.strength import Strength, scaled
from permille.zo.lattice import state_digest, values
from permille.zo.log import decode_canonical
from permille.zo.packed_state import decode_state
from permille.zo.replay import replay
from permille_agent.cli import main as cli
from permille_agent.state.home import Home
from permille_agent.state.models import InstalledRelease, active_model, record_installed
from permille_agent.training import evaluation
from permille_agent.training.personal import model_values, shareable
from permille_agent.training.run import find_run
from tests.unit.edge_agent.runs import home_with_package, user_text

STEPS = "24"


def _json(home: Home, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    capsys.readouterr()
    code = cli.main(["--home", str(home.root), *arguments, "--json"])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    document: dict[str, Any] = json.loads(captured.out)
    return document


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("personal")


def test_a_users_text_makes_the_model_better_on_text_it_never_saw(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home, package = home_with_package(folder / "home")
    text = str(user_text(folder, 320))

    trained = _json(home, capsys, "train", text, "--steps", STEPS, "--threads", "1", "--share-state")

    decision = trained["decision"]
    against = decision["against_base"]
    assert trained["outcome"] == "adopted"
    assert against["low"] > 0.01

    compared = _json(home, capsys, "compare", "--max-tokens", "8", "--threads", "1")
    assert compared["losses"]["personal"] == decision["loss_personal"]
    measured = _json(home, capsys, "compare", "--data", text, "--max-tokens", "4", "--threads", "1")
    assert measured["losses"]["personal"] < measured["losses"]["base"]

    generated = _json(home, capsys, "generate", "On day", "--max-tokens", "5", "--threads", "1")
    assert generated["model"] == "personal"
    assert generated["completion_tokens"] <= 5

    run = find_run(home, trained["run"])
    state = decode_state(shareable(run, LogForm.STATE, package.blobs), max_bytes=1 << 20, max_k=package.k)
    s_K, exponent = state.s_K, state.header.step_unit_exponent
    digest = state_digest(s_K, mask_digest=package.mask_digest, step_unit_exponent=exponent)
    assert digest == decision["state_digest"]
    active = active_model(home)
    assert active is not None
    assert (model_values(home, active, package) == values(package.values(), s_K, exponent)).all()


def test_two_machines_with_the_same_build_end_with_the_same_bits(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ends = []
    for name in ("first", "second"):
        home, _ = home_with_package(folder / name)
        (folder / name / "text").mkdir()
        text = str(user_text(folder / name / "text", 320))
        trained = _json(home, capsys, "train", text, "--steps", "4", "--threads", "1")
        ends.append((trained["plan"], trained["decision"]))

    assert ends[0] == ends[1]


def test_a_model_keeps_what_it_knows_and_its_log_leads_to_the_same_bits(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    home, bare = home_with_package(folder / "general")
    text_NT = np.random.default_rng(0).integers(0, int(bare.config["vocab_size"]), (16, 32))
    manifest = make_reference(bare, text_NT=text_NT, chat=None, made={}, threads=1)
    write_manifest(bare.blobs, manifest)
    record_installed(home, InstalledRelease(name="tiny", version=2, manifest_digest=manifest.digest))
    package = Package.open(bare.blobs, manifest.digest)
    (folder / "general" / "text").mkdir()
    text = str(user_text(folder / "general" / "text", 320))
    options = (text, "--steps", STEPS, "--threads", "1", "--method", "zeroth-order")

    # The general loss of a random model means nothing, so the strength is fixed.
    monkeypatch.setattr(
        evaluation, "choose_strength", lambda rise_of, *_: Strength(eighths=7, rise=rise_of(7))
    )
    trained = _json(home, capsys, "train", *options)
    decision = trained["decision"]

    assert decision["strength"] == 7
    reference, engine = Reference.of(package), LightEngine(package, threads=1)
    assert reference is not None
    assert decision["general"]["loss_base"] == reference.loss(engine, package.values())
    shared = shareable(find_run(home, trained["run"]), LogForm.LOG, package.blobs)
    log = decode_canonical(shared, max_bytes=1 << 20, max_steps=1000)
    exponent = log.header.step_unit_exponent
    trained_K = replay(log.header, log.coefficients_TQ)
    kept_K = scaled(trained_K, 7)
    digests = [
        state_digest(s_K, mask_digest=package.mask_digest, step_unit_exponent=exponent)
        for s_K in (trained_K, kept_K)
    ]
    assert digests == [decision["state_digest"], decision["scaled_digest"]]
    active = active_model(home)
    assert active is not None and active.run == trained["run"]
    assert (model_values(home, active, package) == values(package.values(), kept_K, exponent)).all()

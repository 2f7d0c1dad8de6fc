"""Tests of packages with a pooled state: the model in use, the start of training, comparison and sharing."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from permille.choices import EstimatorKind
from permille.errors import InputError, PackageError
from permille.package.reader import Package
from permille.schemas.runs import Outcome
from permille.training.pooling import PoolingPlan, pool, write_pooled
from permille.zo.lattice import state_digest, values
from permille.zo.packed_state import StateOrigin, decode_state, pooled_state
from permille_agent.cli.status import Status
from permille_agent.local.compare import compare
from permille_agent.local.model import LocalModel, Sampling, Variant
from permille_agent.local.show import show_run
from permille_agent.state.models import InstalledRelease, record_installed, reset
from permille_agent.training.options import Start
from permille_agent.training.outcome import outcome_words
from permille_agent.training.personal import model_values
from permille_agent.training.run import POOLED_START, BegunRun, find_run
from tests.bigram_engine import BigramEngine, bigram_engine
from tests.packages import pooled_package, sentences, tiny_tokenizer
from tests.unit.edge_agent.runs import TINY_RATE, Device, device_at, train_quickly, user_text

GRADIENT: dict[str, Any] = {
    "estimator": EstimatorKind.GRADIENT,
    "queries": 0,
    "steps": 30,
    "rate_scale": TINY_RATE,
}


def install(device: Device, package: Package, version: int = 2) -> Device:
    """Install `package` as another version of the release. Return the device with it."""
    release = InstalledRelease(name="tiny", version=version, manifest_digest=package.digest)
    record_installed(device.home, release)
    return replace(device, package=package)


@pytest.fixture
def bare(tmp_path: Path) -> Device:
    """Return a device with a package that has no pooled state."""
    return device_at(tmp_path / "home", user_text(tmp_path, 900))


@pytest.fixture
def device(bare: Device, tmp_path: Path) -> Device:
    """Return a device with a package that has a state pooled from other people's sentences."""
    package = bare.package
    tokenizer = tiny_tokenizer()
    ids = [token for text in sentences(400, seed=9) for token in tokenizer.encode(text).ids]
    rows_NT = np.array(ids[: 100 * 24], np.int64).reshape(100, 24)
    plan = PoolingPlan(steps=60, batch_rows=4)
    found = pool(BigramEngine(package), package, rows_NT, plan, checkpoint=tmp_path / "moments")
    assert found.better
    manifest = write_pooled(package.blobs, package.manifest, found, {})
    return install(bare, Package.open(package.blobs, manifest.digest))


def pooled_values(package: Package) -> Any:
    state = pooled_state(package)
    assert state is not None
    return values(package.values(), state.s_K, state.header.step_unit_exponent)


def start_of(device: Device, run: str) -> str | None:
    return find_run(device.home, run).require("run", BegunRun).definition.start


def test_without_a_state_of_its_own_a_device_runs_the_pooled_one(device: Device) -> None:
    pooled_K = pooled_values(device.package)
    assert (pooled_K != device.package.values()).any()
    np.testing.assert_array_equal(device.used_values(), pooled_K)
    with LocalModel(device.home, bigram_engine) as model:
        assert model.variants == (Variant.POOLED, Variant.BASE)
        np.testing.assert_array_equal(model.values(model.variants[0]), pooled_K)
        np.testing.assert_array_equal(model.values(Variant.BASE), device.package.values())
        greedy = Sampling(max_new_tokens=12, temperature=0.0)
        texts = {one: "".join(model.complete("On day", one, greedy)[1]) for one in model.variants}
    assert texts[Variant.POOLED] != texts[Variant.BASE]
    status = Status(device.home)
    assert status.document()["active"] == {
        "package": device.package.digest, "run": None, "personal": False, "pooled": True,
        "trains": device.package.manifest.trains, "metrics": None,
        "part": None, "has_memory": False, "tested": None,
    }  # fmt: skip
    assert dict(status._rows())["active"] == "the pooled model"


def test_training_begins_at_the_pooled_state_and_has_to_beat_it(device: Device) -> None:
    result = device.train(**GRADIENT)
    decision = result.decision
    assert decision is not None and result.outcome is Outcome.ADOPTED
    assert start_of(device, result.run) == POOLED_START
    assert decision.pooled and decision.against_active is not None and decision.against_active.better
    assert decision.reason == "better than the base and than the pooled model on held-out text"
    with LocalModel(device.home, bigram_engine) as model:
        assert model.variants == (Variant.PERSONAL, Variant.POOLED, Variant.BASE)
    again = device.train(**GRADIENT)
    assert (again.run, again.known) == (result.run, True)


def test_comparisons_show_the_pooled_model_beside_base_and_personal(device: Device) -> None:
    result = device.train(**GRADIENT)
    assert result.decision is not None and result.decision.against_active is not None
    sampling = Sampling(max_new_tokens=8)
    with LocalModel(device.home, bigram_engine) as model:
        judged = compare(device.home, model, data_paths=[], prompts=["On day"], sampling=sampling)
        measured = compare(device.home, model, data_paths=[device.text], prompts=["On"], sampling=sampling)
    for losses in (judged.losses, measured.losses):
        assert losses.base is not None and losses.pooled is not None and losses.personal is not None
        assert losses.personal < losses.pooled
        assert losses.improvement_on_pooled is not None and losses.improvement_on_pooled.improvement > 0
    assert judged.losses.improvement_on_pooled == result.decision.against_active
    assert judged.samples[0].pooled is not None
    page = show_run(device.home, None, bigram_engine).read_text()
    assert f"Against the pooled model: {result.decision.against_active}." in page
    assert "<th>pooled model</th>" in page


def test_the_personal_state_is_one_state_relative_to_the_base(device: Device) -> None:
    """The shared state is relative to the base and includes the pooled one. It does not name its start."""
    result = device.train(**GRADIENT, share_state=True)
    assert result.decision is not None and result.metrics is not None
    shared = (find_run(device.home, result.run).path / "shared.log").read_bytes()
    state = decode_state(shared, max_bytes=1 << 20, max_k=device.package.k)
    state.check_binding(
        package_digest=device.package.digest, mask_digest=device.package.mask_digest, k=device.package.k
    )
    assert state.header.origin is StateOrigin.PERSONAL
    exponent = state.header.step_unit_exponent
    digest = state_digest(state.s_K, mask_digest=device.package.mask_digest, step_unit_exponent=exponent)
    assert digest == result.decision.state_digest == result.metrics.state_digest
    np.testing.assert_array_equal(values(device.package.values(), state.s_K, exponent), device.used_values())


def test_reset_goes_back_to_the_pooled_state(device: Device) -> None:
    assert device.train(**GRADIENT).outcome is Outcome.ADOPTED
    reset(device.home)
    np.testing.assert_array_equal(device.used_values(), pooled_values(device.package))


def test_the_start_is_the_users_choice(device: Device) -> None:
    first = device.train(**GRADIENT)
    base = device.train(**GRADIENT, start=Start.BASE, seed=1)
    pooled = device.train(**GRADIENT, start=Start.POOLED, seed=2)
    more = device.train(**GRADIENT, seed=3)
    assert [start_of(device, run.run) for run in (base, pooled)] == [None, POOLED_START]
    active = more.decision and more.decision.incumbent.run
    assert active is not None and start_of(device, more.run) == active
    assert active in {run.run for run in (first, base, pooled)}


def test_what_is_not_surely_better_leaves_the_pooled_model(device: Device) -> None:
    result = device.train(**GRADIENT | {"steps": 1}, start=Start.BASE)
    assert result.outcome is Outcome.KEPT_BASE
    assert outcome_words(result.outcome, result.decision) == "kept the pooled model"
    np.testing.assert_array_equal(device.used_values(), pooled_values(device.package))


def test_a_pooled_state_that_is_not_there_is_no_start(bare: Device, device: Device) -> None:
    with pytest.raises(InputError, match="Train with --method gradient"):
        device.train(start=Start.POOLED)
    device = install(device, bare.package, 3)
    with pytest.raises(InputError, match="no pooled state to begin from"):
        device.train(**GRADIENT, start=Start.POOLED)
    assert start_of(device, device.train(**GRADIENT).run) is None


def test_forward_passes_alone_begin_at_the_base_and_are_compared_with_the_pooled_model(
    device: Device,
) -> None:
    result = device.train()
    assert start_of(device, result.run) is None
    assert result.decision is not None and result.decision.pooled


def test_a_personal_model_goes_on_where_its_package_gets_a_pooled_state(bare: Device, tmp_path: Path) -> None:
    """The new package has the same base values, so the earlier personal state stays valid."""
    first = bare.train(**GRADIENT)
    assert first.outcome is Outcome.ADOPTED
    later = install(bare, pooled_package(bare.package, np.ones(bare.package.k, np.int64), -14))
    bare.text.write_text(bare.text.read_text() + "\n\nA line more, of rivers and days.")
    second = later.train(**GRADIENT)
    assert start_of(later, second.run) == first.run
    run = find_run(later.home, second.run)
    assert run.require("run", BegunRun).definition.package == later.package.digest
    assert second.decision is not None and second.decision.incumbent.run == first.run
    other = model_values(later.home, second.decision.incumbent, bare.package)
    assert (other != bare.package.values()).any()


@pytest.mark.attack(13, "serves a pooled state on so coarse a unit that it leaves the exact range")
def test_a_start_beyond_the_exact_range_is_refused(bare: Device) -> None:
    s_K = np.full(bare.package.k, 1 << 46, np.int64)
    device = install(bare, pooled_package(bare.package, s_K, -4))
    with pytest.raises(PackageError, match=r"^state-limit:"):
        device.train(**GRADIENT)


def test_too_little_text_is_told_what_is_used_meanwhile(device: Device, tmp_path: Path) -> None:
    (tmp_path / "few.txt").write_text("\n\n".join(sentences(10)))
    result = train_quickly(device.home, [tmp_path / "few.txt"])
    assert result.message.startswith("There is too little text: ")
    assert "Until then, the package's pooled model is used" in result.message

"""Tests of runs whose package has a basis: the first steps follow it, and everything can be replayed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from permille.choices import EstimatorKind
from permille.package.basis import write_basis
from permille.package.build import write_manifest
from permille.package.reader import Package
from permille.schemas.runs import LogForm
from permille.training.basis import learn_basis
from permille.zo.journal import read_journal
from permille.zo.log import decode_canonical
from permille.zo.packed_state import decode_state
from permille.zo.records import coefficients_of
from permille.zo.replay import replay
from permille_agent.state.models import InstalledRelease, record_installed
from permille_agent.training.personal import shareable
from permille_agent.training.run import Run, find_run
from permille_agent.training.steps import BASIS_STEPS
from tests.bigram_engine import BigramEngine
from tests.unit.edge_agent.runs import Device, plan_and_train, run_of, user_text
from tests.unit.package.test_basis import with_basis


@pytest.fixture
def package(device: Device) -> Package:
    """Return the device's package with a basis of three columns, installed as a later version."""
    digest = write_manifest(device.package.blobs, with_basis(device.package))
    record_installed(device.home, InstalledRelease(name="tiny", version=2, manifest_digest=digest))
    return Package.open(device.package.blobs, digest)


def test_the_first_steps_follow_the_basis_and_the_others_groups(package: Package, tmp_path: Path) -> None:
    run = run_of(package, BigramEngine(package), user_text(tmp_path), tmp_path / "run")
    plan, selected = plan_and_train(run)
    contents = read_journal(run.folder.journal(0))
    assert contents.header.basis_steps == BASIS_STEPS < len(contents.records)
    # There are three columns for four directions.
    assert all(record.coefficients[3] == 0 for record in contents.records[:BASIS_STEPS])
    assert any(record.coefficients[3] for record in contents.records[BASIS_STEPS:])
    c_TQ = coefficients_of(contents.records, contents.header)[: selected.step]
    np.testing.assert_array_equal(replay(contents.header, c_TQ, basis=package.basis()), selected.s_K)
    assert plan.total_steps == 12


def test_a_killed_run_continues_to_the_same_bits(package: Package, tmp_path: Path) -> None:
    engine, text = BigramEngine(package), user_text(tmp_path)
    whole = run_of(package, engine, text, tmp_path / "whole")
    _, expected = plan_and_train(whole)
    data = whole.folder.journal(0).read_bytes()
    for cut in (60, 150, 250):
        killed = run_of(package, engine, text, tmp_path / f"killed-{cut}")
        plan_and_train(killed)
        killed.folder.journal(0).write_bytes(data[:-cut])
        _, selected = plan_and_train(killed)
        assert killed.folder.journal(0).read_bytes() == data
        np.testing.assert_array_equal(selected.s_K, expected.s_K)


def test_the_users_scale_of_the_rate_scales_the_steps_in_the_basis(package: Package, tmp_path: Path) -> None:
    engine, text, lengths = BigramEngine(package), user_text(tmp_path), []
    for scale in (1.0, 0.25):
        run = run_of(package, engine, text, tmp_path / f"{scale}", rate_scale=scale)
        plan_and_train(run)
        contents = read_journal(run.folder.journal(0))
        unit = 2.0**contents.header.step_unit_exponent
        lengths.append(np.linalg.norm(contents.records[0].coefficients) * unit)
    assert lengths[1] == pytest.approx(lengths[0] / 4, rel=0.02)


@pytest.mark.parametrize("changes", [{"estimator": EstimatorKind.SPSA}, {"first_layer": 1}])
def test_runs_that_cannot_use_the_basis_take_none_of_its_steps(
    package: Package, tmp_path: Path, changes: dict[str, Any]
) -> None:
    run: Run = run_of(package, BigramEngine(package), user_text(tmp_path), tmp_path / "run", **changes)
    assert run.basis is None
    _, selected = plan_and_train(run)
    assert selected.header.basis_steps == 0


def test_an_adopted_model_and_what_it_shares_are_rebuilt_from_its_log(device: Device, tmp_path: Path) -> None:
    engine = BigramEngine(device.package)
    rows_NT = np.random.default_rng(0).integers(3, 300, (40, 16))
    layer = write_basis(device.package.blobs, learn_basis(engine, device.package, rows_NT))
    digest = write_manifest(device.package.blobs, device.package.manifest.with_part(layer, {}))
    record_installed(device.home, InstalledRelease(name="tiny", version=2, manifest_digest=digest))
    package = Package.open(device.package.blobs, digest)
    trained = replace(device, package=package)
    result = trained.train(steps=30, queries=8)
    assert result.outcome.value == "adopted"
    run = find_run(device.home, result.run)
    cached_K = trained.used_values()
    (run.path / "state.i64").unlink()
    np.testing.assert_array_equal(trained.used_values(), cached_K)
    log = decode_canonical(shareable(run, LogForm.LOG, package.blobs), max_bytes=1 << 20, max_steps=100)
    state = decode_state(shareable(run, LogForm.STATE, package.blobs), max_bytes=1 << 20, max_k=package.k)
    assert log.header.basis_steps == BASIS_STEPS
    np.testing.assert_array_equal(replay(log.header, log.coefficients_TQ, basis=package.basis()), state.s_K)

"""Tests of the model that a run starts from: the base, the active model, and models of another package."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from permille.choices import EstimatorKind
from permille.errors import InputError
from permille.schemas.runs import Outcome
from permille_agent.state.models import InstalledRelease, record_installed
from permille_agent.training.options import Start
from permille_agent.training.personal import model_values
from permille_agent.training.run import BegunRun, find_run
from tests.packages import program_package
from tests.unit.edge_agent.runs import TINY_RATE, Device, device_at, user_text

GRADIENT: dict[str, Any] = {
    "estimator": EstimatorKind.GRADIENT,
    "queries": 0,
    "steps": 30,
    "rate_scale": TINY_RATE,
}


@pytest.fixture
def device(tmp_path: Path) -> Device:
    return device_at(tmp_path / "home", user_text(tmp_path, 900))


def start_of(device: Device, run: str) -> str | None:
    return find_run(device.home, run).require("run", BegunRun).definition.start


def test_the_start_is_the_users_choice(device: Device) -> None:
    first = device.train(**GRADIENT)
    base = device.train(**GRADIENT, start=Start.BASE, seed=1)
    more = device.train(**GRADIENT, seed=2)
    assert [start_of(device, run.run) for run in (first, base)] == [None, None]
    active = more.decision and more.decision.incumbent.run
    assert active is not None and start_of(device, more.run) == active
    assert active in {first.run, base.run}


def test_without_an_adopted_round_there_is_no_round_to_begin_from(device: Device) -> None:
    with pytest.raises(InputError, match="No round was adopted to begin from"):
        device.train(**GRADIENT, start=Start.ROUND)


def test_a_personal_model_goes_on_where_its_package_gets_a_program(device: Device) -> None:
    """The new package has the same base values, so the earlier personal state stays valid."""
    first = device.train(**GRADIENT)
    assert first.outcome is Outcome.ADOPTED
    package = program_package(device.package)
    record_installed(device.home, InstalledRelease(name="tiny", version=2, manifest_digest=package.digest))
    later = replace(device, package=package)
    device.text.write_text(device.text.read_text() + "\n\nA line more, of rivers and days.")
    second = later.train(**GRADIENT)
    assert start_of(later, second.run) == first.run
    run = find_run(later.home, second.run)
    assert run.require("run", BegunRun).definition.package == package.digest
    assert second.decision is not None and second.decision.incumbent.run == first.run
    other = model_values(later.home, second.decision.incumbent, device.package)
    assert (other != device.package.values()).any()

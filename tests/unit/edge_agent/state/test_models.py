"""Tests of the active model: atomic switches, rollback, and new packages."""

from pathlib import Path

import pytest

from permille.errors import InputError, OperatorError, RetryableError
from permille_agent.state import models
from permille_agent.state.home import Home, open_home
from permille_agent.state.models import (
    MAX_HISTORY,
    Active,
    InstalledRelease,
    activate,
    active_model,
    history,
    opening,
    record_installed,
    referenced_models,
    reset,
    rollback,
)

OLD, NEW = "sha256:" + "a" * 64, "sha256:" + "b" * 64
BASE = Active(package=OLD)
FIRST, SECOND = Active(package=OLD, run="one"), Active(package=OLD, run="two")


def _install(home: Home, digest: str, version: int = 1) -> None:
    record_installed(home, InstalledRelease(name="tiny", version=version, manifest_digest=digest))


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = open_home(tmp_path / "home")
    _install(home, OLD)
    return home


def test_before_the_first_pull_nothing_is_active(tmp_path: Path) -> None:
    home = open_home(tmp_path / "empty")
    assert active_model(home) is None
    assert referenced_models(home) == ()
    with pytest.raises(InputError, match="permille-agent enroll"):
        reset(home)


def test_a_new_package_replaces_a_base_but_not_a_personalisation(home: Home) -> None:
    assert active_model(home) == BASE
    _install(home, NEW, 2)
    assert active_model(home) == Active(package=NEW)
    activate(home, FIRST, expected=Active(package=NEW))
    _install(home, NEW, 3)
    assert active_model(home) == FIRST
    assert {model.package for model in referenced_models(home)} == {OLD, NEW}


def test_activating_twice_changes_nothing_and_a_decision_against_another_model_is_not_carried_out(
    home: Home,
) -> None:
    activate(home, FIRST, expected=BASE)
    activate(home, FIRST, expected=BASE)
    assert history(home) == (BASE,)
    assert home.current.stat().st_mode & 0o777 == 0o600
    with pytest.raises(RetryableError, match="it was the base of"):
        activate(home, SECOND, expected=BASE)
    assert active_model(home) == FIRST


def test_rollback_goes_back_step_by_step(home: Home) -> None:
    activate(home, FIRST, expected=BASE)
    activate(home, SECOND, expected=FIRST)
    assert {model.run for model in referenced_models(home)} >= {"one", "two"}

    assert rollback(home) == FIRST
    assert rollback(home) == BASE
    assert active_model(home) == BASE


def test_going_back_too_far_loses_no_model(home: Home) -> None:
    with pytest.raises(InputError, match="There is no earlier model"):
        rollback(home)
    activate(home, FIRST, expected=BASE)
    activate(home, SECOND, expected=FIRST)
    assert [rollback(home) for _ in range(4)] == [FIRST, BASE, SECOND, FIRST]
    reset(home)
    assert [rollback(home) for _ in range(3)] == [FIRST, SECOND, BASE]
    assert {model.run for model in referenced_models(home)} == {None, "one", "two"}


def test_reset_goes_to_the_installed_base_and_can_be_rolled_back(home: Home) -> None:
    activate(home, FIRST, expected=BASE)
    _install(home, NEW, 2)

    assert reset(home) == Active(package=NEW)
    assert active_model(home) == Active(package=NEW)
    assert rollback(home) == FIRST


def test_a_full_disk_does_not_keep_a_new_package_from_being_used(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    _install(home, NEW, 2)

    def full(*_: object) -> None:
        raise OperatorError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(models, "write_record", full)
        with opening(home, NEW):
            pass
    assert models.read_releases(home).previous is not None
    with opening(home, NEW):
        pass
    assert models.read_releases(home).previous is None


def test_the_history_is_bounded(home: Home) -> None:
    before = BASE
    for number in range(MAX_HISTORY + 5):
        new = Active(package=OLD, run=f"run-{number}")
        activate(home, new, expected=before)
        before = new
    assert len(history(home)) == MAX_HISTORY
    assert history(home)[-1] == Active(package=OLD, run=f"run-{MAX_HISTORY + 3}")


@pytest.mark.parametrize("entry", ['"text"', '{"run": "x"}', "[1]"])
def test_a_damaged_file_is_refused(home: Home, entry: str) -> None:
    home.current.write_text(f'{{"active": {entry}, "history": []}}')
    with pytest.raises(OperatorError, match="and holds no Current"):
        active_model(home)

"""The commands of the agent, and errors of those of the operator."""

import json
from pathlib import Path

import pytest

from permille_agent.cli.main import main as agent
from permille_agent.state.home import open_home
from permille_service.cli.main import main as operator
from tests.enrolled import Device


def test_a_registry_is_chosen_shown_and_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = ["--home", str(open_home(tmp_path / "home").root), "registry"]

    def said(*arguments: str) -> object:
        assert agent([*home, *arguments, "--json"]) == 0
        return json.loads(capsys.readouterr().out)["address"]

    assert said("show") is None
    assert said("use", "oci://registry.example.org/a") == said("show") == "oci://registry.example.org/a"
    assert agent([*home[:2], "status"]) == 0
    assert "oci://registry.example.org/a" in capsys.readouterr().out
    assert said("off") is said("off") is said("show") is None


def test_a_choice_leads_to_a_pull_and_before_that_to_an_enrolment(
    new_device: Device, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for home, then in (
        (open_home(tmp_path / "empty"), "enroll SERVER INVITATION"),
        (new_device.home, "pull"),
    ):
        assert agent(["--home", str(home.root), "registry", "use", "oci://registry.example.org/a"]) == 0
        assert capsys.readouterr().out.endswith(f"next: permille-agent {then}\n")


@pytest.mark.parametrize(
    ("address", "error"),
    [
        ("registry.example.org/a", "not the address"),
        ("oci://registry.example.org/a:stable", "Leave out :stable"),
    ],
)
def test_a_device_takes_no_other_address(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], address: str, error: str
) -> None:
    home = open_home(tmp_path / "home")
    assert agent(["--home", str(home.root), "registry", "use", address]) == 3
    assert error in capsys.readouterr().err and not home.registry.exists()


def test_an_operators_address_is_checked_first(capsys: pytest.CaptureFixture[str]) -> None:
    place = [
        "--url",
        "http://127.0.0.1:1",
        "--token",
        "t",
        "releases",
        "push",
        "tiny",
        "registry.example.org/a",
    ]
    assert operator(place) == 3
    assert "not the address of a repository" in capsys.readouterr().err

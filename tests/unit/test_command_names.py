"""Tests of commands given to the wrong program: the error names the right one."""

import pytest
from typer.main import get_command

from permille.command_names import ProgramGroup, commands
from permille_agent.cli.main import app as agent_app
from permille_agent.cli.main import main as agent_main
from permille_service.cli.main import app as operator_app
from permille_service.cli.main import main as operator_main


def test_the_listed_commands_are_those_that_one_program_alone_has() -> None:
    programs = {"permille": get_command(operator_app), "permille-agent": get_command(agent_app)}
    names = {}
    for program, group in programs.items():
        assert isinstance(group, ProgramGroup)
        names[program] = set(group.commands)
    both = set.intersection(*names.values())
    assert {program: found - both for program, found in names.items()} == commands()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "--port", "8081"], "permille-agent serve"),
        (["chat"], "permille-agent chat"),
    ],
)
def test_an_operator_who_types_a_devices_command_is_sent_there(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert operator_main(arguments) == 2
    assert f"Type `{words}`" in " ".join(capsys.readouterr().err.split())


def test_a_person_who_types_an_operators_command_is_sent_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert agent_main(["personalise", "--gguf", "model.gguf"]) == 2
    assert "Type `permille personalise`" in " ".join(capsys.readouterr().err.split())
    assert agent_main(["enrol"]) == 2
    assert "Did you mean 'enroll'" in " ".join(capsys.readouterr().err.split())

"""Tests of the later stages of `permille personalise`, with unwelcome answers of the device."""

import shlex
from pathlib import Path
from typing import Any, cast

import pytest

from permille_service.cli.exits import CommandError, Exit
from permille_service.personal import command
from permille_service.personal.programs import Programs


class Device:
    """A device that answers as `permille-agent` does."""

    def __init__(
        self, *, code: int = 0, answer: str = "", personal: bool = False, types: tuple[str, ...] = ()
    ) -> None:
        self.code, self.answer, self.personal, self.types = code, answer, personal, types
        self.enrolment: str | None = "http://127.0.0.1:1"

    def show_agent(self, *_: str, quiet: bool = False) -> tuple[int, str]:
        return self.code, self.answer

    def agent(self, name: str, *arguments: str) -> Any:
        if name == "status":
            return {"active": {"personal": self.personal}, "enrolment": self.enrolment}
        if name == "unenroll":
            assert self.enrolment is not None and arguments == ("--local-only",)
            self.enrolment = None
            return {}
        if arguments[-1] not in self.types:
            raise CommandError("Only 93.5% of the personal change fits into source", Exit.REFUSED)
        folder = Path(arguments[0])
        folder.mkdir()
        (folder / "model.gguf").write_bytes(b"GGUF")
        (folder / "Modelfile").write_text("FROM ./model.gguf\nTEMPLATE {{ .Prompt }}\n")
        return {}


def request(folder: Path) -> command.Request:
    return command.Request(
        model=folder / "model.gguf",
        texts=(folder,),
        out=folder / "mine.gguf",
        corpus=None,
        density=0.001,
        scheme=command.BaseScheme.SOURCE,
        key="",
        work=folder,
        training=(),
    )


def test_a_change_that_four_bits_lose_is_written_in_eight(tmp_path: Path) -> None:
    said: list[str] = []
    command._export(request(tmp_path), cast(Programs, Device(types=("q8_0",))), said.append)
    assert (tmp_path / "mine.gguf").read_bytes() == b"GGUF"
    assert (tmp_path / "mine.Modelfile").read_text().startswith("FROM ./mine.gguf\n")
    assert "Q8_0" in said[0]
    with pytest.raises(CommandError, match="personal change"):
        command._export(request(tmp_path), cast(Programs, Device()), said.append)


def test_a_training_that_loses_to_the_model_in_use_exports_that_one(tmp_path: Path) -> None:
    lost = Device(code=command.KEPT_BASE, personal=True)
    assert not command._train(request(tmp_path), cast(Programs, lost), quiet=True)
    assert command._train(request(tmp_path), cast(Programs, Device()), quiet=True)
    with pytest.raises(CommandError, match="nothing is exported"):
        kept = Device(code=command.KEPT_BASE)
        command._train(request(tmp_path), cast(Programs, kept), quiet=True)


def test_an_enrolment_ends_also_if_a_run_was_killed_after_the_pull() -> None:
    device = Device()
    for _ in range(2):
        command._end_enrolment(cast(Programs, device))
        assert device.enrolment is None


def test_the_reason_why_a_text_is_refused_is_told_even_if_nothing_is_printed(tmp_path: Path) -> None:
    for answer, told in (('{"message": "There is too little text."}', "too little text"), ("", "see above")):
        refusing = Device(code=command.REFUSED_DATA, answer=answer)
        with pytest.raises(CommandError, match=told):
            command._train(request(tmp_path), cast(Programs, refusing), quiet=True)


def test_the_commands_at_the_end_can_be_pasted_into_a_shell(tmp_path: Path) -> None:
    home = tmp_path / "my models" / "device"
    assert shlex.split(command.agent_line(home, "chat")) == ["permille-agent", "--home", str(home), "chat"]

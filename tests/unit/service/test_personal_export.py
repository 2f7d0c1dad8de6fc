"""Tests of the later stages of `permille personalise`, with unwelcome answers of the device."""

import json
import shlex
import shutil
from pathlib import Path
from typing import Any, cast

import pytest
from transformers import AutoTokenizer

from permille.errors import InputError
from permille_service.cli.exits import CommandError, Exit
from permille_service.personal import command
from permille_service.personal.programs import Programs

EXAMPLE = Path(__file__).resolve().parents[3] / "examples/model"


class Device:
    """A device that answers as `permille-agent` does."""

    def __init__(
        self, *, code: int = 0, answer: str = "", personal: bool = False, types: tuple[str, ...] = ()
    ) -> None:
        self.code, self.answer, self.personal, self.types = code, answer, personal, types
        self.enrolment: str | None = "http://127.0.0.1:1"
        self.exports: list[tuple[str, ...]] = []

    def show_agent(self, *_: str, quiet: bool = False) -> tuple[int, str]:
        return self.code, self.answer

    def agent(self, name: str, *arguments: str) -> Any:
        if name == "status":
            return {"active": {"personal": self.personal}, "enrolment": self.enrolment}
        if name == "unenroll":
            assert self.enrolment is not None and arguments == ("--local-only",)
            self.enrolment = None
            return {}
        self.exports.append(arguments)
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


def test_an_export_is_like_the_gguf_file_of_the_model(tmp_path: Path) -> None:
    device = Device(types=("gguf", "q8_0", str(tmp_path / "model.gguf")))
    folder = str(tmp_path / "export")
    command._export(request(tmp_path), cast(Programs, device), print)
    assert device.exports == [(folder, "--format", "gguf")], "the model is a folder"
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    command._export(request(tmp_path), cast(Programs, device), print)
    assert device.exports[1:] == [(folder, "--format", "gguf", "--like", str(tmp_path / "model.gguf"))]


def test_a_file_that_cannot_be_moved_to_its_place_leaves_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: Path, target: Path) -> None:
        target.write_bytes(source.read_bytes()[:2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "move", full)
    with pytest.raises(OSError, match="No space"):
        command._export(request(tmp_path), cast(Programs, Device(types=("gguf",))), print)
    assert not list(tmp_path.iterdir())


def model_folder(folder: Path, **config: Any) -> Path:
    """Copy the example's config and tokenizer, with changes of the config."""
    folder.mkdir()
    for path in (EXAMPLE / "tokenizer.json", EXAMPLE / "tokenizer_config.json"):
        (folder / path.name).symlink_to(path)  # as in a cache of the hub
    document = json.loads((EXAMPLE / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(document | config))
    return folder


def test_a_form_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    good, out = model_folder(tmp_path / "good"), tmp_path / "mine.gguf"
    command._check_form(good, out)
    activation = model_folder(tmp_path / "activation", hidden_act="gelu")
    cutting = model_folder(tmp_path / "cutting")
    tokenizer = json.loads((EXAMPLE / "tokenizer.json").read_text())
    (cutting / "tokenizer.json").unlink()
    (cutting / "tokenizer.json").write_text(json.dumps(tokenizer | {"normalizer": {"type": "Lowercase"}}))
    for folder, message in ((activation, "needs activation silu"), (cutting, "cut a text as this tokenizer")):
        with pytest.raises(CommandError, match=f"{folder.name} cannot be written as .*{message}") as refused:
            command._check_form(folder, out)
        assert refused.value.code is Exit.REFUSED
        command._check_form(folder, tmp_path / "mine")  # for transformers
    (activation / "config.json").write_text("{")
    with pytest.raises(InputError, match=r"config\.json"):
        command._check_form(activation, out)


def test_a_slow_tokenizer_is_converted_before_it_is_checked(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "slow", vocab_size=2304)  # GPT-2 has one token more
    files = AutoTokenizer.from_pretrained(EXAMPLE).backend_tokenizer.model.save(str(folder))
    assert {Path(name).name for name in files} == {"vocab.json", "merges.txt"}
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    command._check_form(folder, tmp_path / "mine.gguf")
    assert not (folder / "tokenizer.json").exists()


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

"""Tests of the later stages of `permille personalise`, with unwelcome answers of the device."""

import json
import shlex
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from permille.engines.gguf.blocks import BlockType
from permille.engines.gguf.export import ChangeLostError, export_gguf
from permille.errors import InputError
from permille.exits import CommandError, Exit, ExitCode
from permille_agent.embed import Home
from permille_personal import run
from permille_personal.command import Shown
from permille_personal.request import (
    BaseScheme,
    Form,
    Request,
    check_form,
    check_numbers,
    chosen_form,
    chosen_scheme,
    home_of,
    key_of,
)
from tests.unit.engines.gguf_packages import exported_package

EXAMPLE = Path(__file__).resolve().parents[3] / "examples/model"
QUIET = Shown(quiet=True)


def request(folder: Path) -> Request:
    return Request(
        model=folder / "model.gguf",
        texts=(folder,),
        out=folder / "mine.gguf",
        form=Form.GGUF,
        corpus=None,
        density=0.001,
        scheme=BaseScheme.SOURCE,
        key="",
        work=folder,
        training={"steps": 4, "rate_scale": 0.5},
    )


class Exports(list[tuple[BlockType | None, Path | None]]):
    """Writes a file of the types that hold the change, and keeps what was asked for."""

    def __init__(self, *types: BlockType | None) -> None:
        super().__init__()
        self.types = types

    def __call__(
        self,
        _package: object,
        _values: object,
        folder: Path,
        *,
        kind: BlockType | None = None,
        like: Path | None,
    ) -> None:
        self.append((kind, like))
        if kind not in self.types:
            raise ChangeLostError("too coarse", BlockType.F32 if kind else BlockType.Q8_0)
        folder.mkdir()
        (folder / "model.gguf").write_bytes(b"GGUF")
        (folder / "Modelfile").write_text("FROM ./model.gguf\nTEMPLATE {{ .Prompt }}\n")


@pytest.fixture
def export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Exports], None]:
    """Return a function that exports the model of a device whose package is no package."""
    monkeypatch.setattr(run, "Package", SimpleNamespace(open=lambda *_: None))
    monkeypatch.setattr(run, "require_active", lambda _: SimpleNamespace(package="sha256:0", run="a"))
    monkeypatch.setattr(run, "model_values", lambda *_: None)

    def exported(exports: Exports) -> None:
        monkeypatch.setattr(run, "export_gguf", exports)
        run._export(request(tmp_path), Home(tmp_path), QUIET)

    return exported


def test_a_change_that_four_bits_lose_is_written_in_eight(
    export: Callable[[Exports], None], tmp_path: Path
) -> None:
    exports = Exports(BlockType.Q8_0)
    export(exports)
    assert exports == [(None, None), (BlockType.Q8_0, None)]
    assert (tmp_path / "mine.gguf").read_bytes() == b"GGUF"
    assert (tmp_path / "mine.Modelfile").read_text().startswith("FROM ./mine.gguf\n")
    with pytest.raises(ChangeLostError):
        export(Exports())


def test_an_export_is_like_the_gguf_file_of_the_model(
    export: Callable[[Exports], None], tmp_path: Path
) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    exports = Exports(None)
    export(exports)
    assert exports == [(None, tmp_path / "model.gguf")]


def test_nobody_else_can_read_the_file_while_it_is_copied(
    export: Callable[[Exports], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another file system, a move is a copy of the bytes and then of the mode."""
    modes: list[int] = []

    def move(source: Path, target: Path) -> None:
        modes.extend(stat.S_IMODE(path.stat().st_mode) for path in (source, target))
        target.write_bytes(source.read_bytes())
        modes.append(stat.S_IMODE(target.stat().st_mode))
        shutil.copystat(source, target)
        source.unlink()

    monkeypatch.setattr(shutil, "move", move)
    export(Exports(None))
    assert modes == [0o600] * 3
    assert stat.S_IMODE((tmp_path / "mine.gguf").stat().st_mode) == 0o600


def test_a_file_that_cannot_be_moved_to_its_place_leaves_no_part(
    export: Callable[[Exports], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: Path, target: Path) -> None:
        target.write_bytes(source.read_bytes()[:2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "move", full)
    with pytest.raises(OSError, match="No space"):
        export(Exports(None))
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
    good = model_folder(tmp_path / "good")
    check_form(good, Form.GGUF)
    activation = model_folder(tmp_path / "activation", hidden_act="gelu")
    cutting = model_folder(tmp_path / "cutting")
    tokenizer = json.loads((EXAMPLE / "tokenizer.json").read_text())
    (cutting / "tokenizer.json").unlink()
    (cutting / "tokenizer.json").write_text(json.dumps(tokenizer | {"normalizer": {"type": "Lowercase"}}))
    for folder, message in ((activation, "needs activation silu"), (cutting, "cut a text as this tokenizer")):
        with pytest.raises(CommandError, match=f"{folder.name} cannot be written as .*{message}") as refused:
            check_form(folder, Form.GGUF)
        assert refused.value.code is Exit.REFUSED
        check_form(folder, Form.TRANSFORMERS)
    (activation / "config.json").write_text("{")
    with pytest.raises(InputError, match=r"config\.json"):
        check_form(activation, Form.GGUF)


def test_a_form_fits_the_name_of_the_result() -> None:
    file, folder = Path("mine.gguf"), Path("mine")
    assert [chosen_form(None, out) for out in (file, folder)] == [Form.GGUF, Form.TRANSFORMERS]
    assert chosen_form(None, file.with_suffix(".GGUF")) is Form.GGUF
    assert chosen_form(Form.LORA, file) is Form.LORA
    for form, out in ((Form.LORA, folder), (Form.GGUF, folder), (Form.TRANSFORMERS, file)):
        with pytest.raises(CommandError, match=f"--format {form} writes a .*, but --out is {out.name}") as no:
            chosen_form(form, out)
        assert no.value.code is Exit.USAGE


def test_an_adapter_needs_a_gguf_file_whose_codes_are_kept(tmp_path: Path) -> None:
    package = exported_package(tmp_path / "blobs", "llama", changes={"intermediate_size": 96})
    for kind in ("q8_0", "f16"):
        export_gguf(package, None, tmp_path / kind, kind=kind)
    kept, lost = (tmp_path / name / "model.gguf" for name in ("q8_0", "f16"))
    assert chosen_scheme(kept, None, Form.LORA) is BaseScheme.SOURCE
    assert chosen_scheme(lost, None, Form.GGUF) is BaseScheme.NF4
    with pytest.raises(CommandError, match="has weights of types other than Q4_0"):
        chosen_scheme(lost, None, Form.LORA)
    for model, scheme in ((kept, BaseScheme.NF4), (tmp_path, None)):
        with pytest.raises(CommandError, match="--format lora needs a GGUF file whose codes") as refused:
            chosen_scheme(model, scheme, Form.LORA)
        assert refused.value.code is Exit.USAGE


@pytest.mark.slow
def test_a_slow_tokenizer_is_converted_before_it_is_checked(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "slow", vocab_size=2304)  # GPT-2 has one token more
    files = AutoTokenizer.from_pretrained(EXAMPLE).backend_tokenizer.model.save(str(folder))
    assert {Path(name).name for name in files} == {"vocab.json", "merges.txt"}
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    check_form(folder, Form.GGUF)
    assert not (folder / "tokenizer.json").exists()


def train(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    *,
    answer: str = "",
    run_in_use: str | None = None,
) -> bool:
    """Train with an agent that answers with this exit code."""
    monkeypatch.setattr(run, "_agent", lambda *_, **__: (code, answer))
    monkeypatch.setattr(run, "require_active", lambda _: SimpleNamespace(run=run_in_use))
    return run._train(request(folder), Home(folder), QUIET)


def test_a_training_that_loses_to_the_model_in_use_exports_that_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train(tmp_path, monkeypatch, ExitCode.OK)
    assert not train(tmp_path, monkeypatch, ExitCode.KEPT_BASE, run_in_use="earlier")
    with pytest.raises(CommandError, match="nothing is exported"):
        train(tmp_path, monkeypatch, ExitCode.KEPT_BASE)


@pytest.mark.parametrize(
    ("code", "answer", "told", "exit_code"),
    [
        (ExitCode.INPUT_REFUSED, '{"message": "There is too little text."}', "too little text", Exit.REFUSED),
        (ExitCode.INPUT_REFUSED, "", "see above", Exit.REFUSED),
        (ExitCode.TRY_LATER, "", "Run the command again", Exit.RETRY),
        (ExitCode.OPERATOR, "", "exit code 6", Exit.FAILED),
        (-9, "", "exit code -9", Exit.FAILED),
    ],
)
def test_the_end_of_a_training_is_told_with_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, answer: str, told: str, exit_code: Exit
) -> None:
    with pytest.raises(CommandError, match=told) as ended:
        train(tmp_path, monkeypatch, code, answer=answer)
    assert ended.value.code is exit_code


def test_a_training_that_was_interrupted_interrupts_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, monkeypatch, ExitCode.INTERRUPTED)


def test_a_training_gets_the_options_of_the_person(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def agent(arguments: list[str], *, quiet: bool) -> tuple[int, str]:
        asked.extend(arguments)
        return ExitCode.OK, ""

    monkeypatch.setattr(run, "_agent", agent)
    assert run._train(request(tmp_path), Home(tmp_path), QUIET)
    options = ["--steps", "4", "--rate-scale", "0.5", "--json"]
    assert asked == ["--home", str(tmp_path), "train", str(tmp_path), "--memory", "0", *options]


def test_numbers_have_the_ranges_of_the_build_and_of_the_training() -> None:
    check_numbers(0.5, {"steps": 1, "keep_general": 0, "learn": "user"})
    check_numbers(1e-6, {"rate_scale": 16})
    wrong: list[tuple[float, dict[str, Any], str]] = [
        (0.51, {}, "--density must be"),
        (float("nan"), {}, "--density must be"),
        (0.1, {"steps": 1_000_001}, "--steps must be 1 to 1,000,000"),
        (0.1, {"steps": 5, "minutes": 5}, "Give either --steps or --minutes"),
        (0.1, {"keep_general": -0.1}, "--keep-general must be 0 to 100"),
        (0.1, {"rate_scale": 0}, "--rate-scale must be above 0"),
    ]
    for density, training, told in wrong:
        with pytest.raises(CommandError, match=told) as refused:
            check_numbers(density, training)
        assert refused.value.code is Exit.USAGE


def test_a_folder_of_other_files_is_no_work_folder(tmp_path: Path) -> None:
    (tmp_path / "export").mkdir()
    with pytest.raises(CommandError, match="such as export") as refused:
        run.run(request(tmp_path), QUIET)
    assert refused.value.code is Exit.REFUSED
    assert (tmp_path / "export").is_dir()


def test_names_that_are_not_utf_8_have_keys(tmp_path: Path) -> None:
    model = tmp_path / "mod\udce9l.gguf"
    model.write_bytes(b"GGUF")
    key = key_of(model, None, 0.001, BaseScheme.NF4)
    assert key != key_of(model.rename(tmp_path / "other.gguf"), None, 0.001, BaseScheme.NF4)
    assert home_of((tmp_path / "n\udce9tes",)) != home_of((tmp_path / "n\udceates",))


def test_the_commands_at_the_end_can_be_pasted_into_a_shell(tmp_path: Path) -> None:
    home = tmp_path / "my models" / "device"
    assert shlex.split(run.agent_line(home, "chat")) == ["permille-agent", "--home", str(home), "chat"]

"""`make demo` on the example model, and on SmolLM2 if `make smollm2` has fetched it."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from examples import demo
from examples.demo import MODELS, SMOLLM2, run
from examples.programs import Programs
from permille.exits import CommandError
from tests.acceptance.environments import ROOT
from tests.running_service import environment

LINE = re.compile(
    r"demo: held-out loss (?P<base>[\d.]+) -> (?P<personal>[\d.]+) \([\d.]+% lower\)"
    r"(, [\d.]+ with the memory)?, "
    r"general loss (?P<general>[\d.]+) -> (?P<after>[\d.]+)(?P<beside>, [\d.]+ with the memory)?, "
    r"package \d+ bytes, "
    r"(zeroth-order log \d+ bytes, replay exact|no zeroth-order log)"
)
KEEP_GENERAL = 0.1
"""Largest rise of the general loss in nats per token (`permille-agent train --keep-general`)."""


def _demo(*arguments: str, stack: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "examples.demo", *arguments],
        cwd=ROOT,
        env=environment() | {"STACK": stack},
        capture_output=True,
        text=True,
        check=False,
    )


def _gains_and_keeps(printed: str, folder: Path) -> re.Match[str]:
    line = LINE.fullmatch(printed)
    assert line is not None, printed
    assert (folder / "show.html").is_file()
    assert list((folder / "model").glob("*.gguf"))
    assert not (folder / "run").exists()
    assert float(line["personal"]) < float(line["base"])
    # losses are printed with three digits
    assert float(line["after"]) - float(line["general"]) <= KEEP_GENERAL + 0.001
    return line


def test_commands_are_told_as_a_shell_reads_them(tmp_path: Path) -> None:
    told: list[str] = []
    programs = Programs(work=tmp_path, tell=told.append)
    with pytest.raises(CommandError):
        programs.agent("generate", "What is it?", "--wrong")
    assert told == ["permille-agent generate 'What is it?' --wrong"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stack", ["", "full"])
def test_demo_of_the_example_model(stack: str, tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    done = _demo("example", str(folder), stack=stack)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("Celery took the jobs from Redis" in done.stdout) is bool(stack)
    _gains_and_keeps(done.stdout.splitlines()[-1], folder)


@pytest.mark.slow
@pytest.mark.skipif(
    not SMOLLM2.is_file(), reason=f"no {SMOLLM2.name}: `make smollm2` fetches it where an index is reached"
)
@pytest.mark.timeout(1200)
def test_a_real_chat_model_gains_and_keeps_its_head(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A basis and its steps take minutes. The test of the example model covers this part, and `make demo` runs
    # it on SmolLM2.
    monkeypatch.setattr(demo, "zeroth_order", lambda *_: 0)
    short = replace(
        MODELS["smollm2"], build=("--sequences", "2", "--length", "128"), gradient=("--steps", "6")
    )
    line = _gains_and_keeps(run(short, tmp_path / "demo"), tmp_path / "demo")
    assert line["beside"], "the general loss with the memory is missing"
    printed = capsys.readouterr().out
    asked = printed.partition("   What is the capital of France?\n")[2].splitlines()
    assert "Paris" in asked[0]
    assert "Paris" in asked[1]


def test_a_model_without_a_name_is_refused() -> None:
    done = _demo("none")
    assert done.returncode == 2
    assert "choose smollm2 or example" in done.stderr

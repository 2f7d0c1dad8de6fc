"""Tests of the plugin for `llm`: in the program itself, and the choices of its options."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import llm
import pytest

import permille_llm
from permille_agent.local.model import Generated, Sampling, Variant
from permille_agent.state.home import HOME_VARIABLE
from tests.packages import CHATML
from tests.unit.edge_agent.runs import home_with_package

ROOT = Path(__file__).resolve().parents[2]
QUESTION = "Who crossed the garden?"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An environment in which `llm` finds the entry point of `pyproject.toml`, installed or not."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    metadata = tmp_path / "found" / "permille_llm-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: permille_llm\nVersion: 0\n")
    lines = [f"{name} = {module}\n" for name, module in groups["llm"].items()]
    (metadata / "entry_points.txt").write_text("[llm]\n" + "".join(lines))
    path = os.pathsep.join([str(tmp_path / "found"), os.environ.get("PYTHONPATH", ""), *sys.path])
    return {**os.environ, "PYTHONPATH": path, "LLM_USER_PATH": str(tmp_path / "llm")}


def run(environment: dict[str, str], *command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *command], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_program_writes_what_the_agent_writes(tmp_path: Path, environment: dict[str, str]) -> None:
    home, _ = home_with_package(tmp_path / "home", chat_template=CHATML)
    environment[HOME_VARIABLE] = str(home.root)
    asked = ("-m", permille_llm.MODEL_ID, "-o", "temperature", "0", "-o", "max_tokens", "12")
    answer = run(environment, "llm", "prompt", QUESTION, *asked)
    greedy = ("--chat", "--temperature", "0", "--max-tokens", "12", "--json")
    own = json.loads(run(environment, "permille_agent", "generate", QUESTION, *greedy))
    assert answer.rstrip("\n") == own["text"].rstrip("\n")
    assert own["completion_tokens"] > 0
    (logged,) = json.loads(run(environment, "llm", "logs", "--json"))
    assert (logged["input_tokens"], logged["output_tokens"]) == (
        own["prompt_tokens"],
        own["completion_tokens"],
    )
    listed = run(environment, "llm", "models", "--options")
    assert "permille/home" in listed and "Use the model as it was before training." in listed


def test_the_options_choose_the_model_and_the_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[list[tuple[str, str]], Variant, Sampling]] = []

    def reply(turns: list[tuple[str, str]], variant: Variant, sampling: Sampling) -> Any:
        calls.append((turns, variant, sampling))
        return Generated(prompt_tokens=9, completion_tokens=2), iter(["By ", "boat."])

    variants = (Variant.PERSONAL, Variant.PERSONAL_WITHOUT_MEMORY, Variant.BASE)
    kept_up: list[int] = []
    fake = SimpleNamespace(
        sampling=Sampling(top_p=0.8),
        variants=variants,
        reply=reply,
        keep_up=lambda: kept_up.append(len(calls)),
    )
    monkeypatch.setattr(permille_llm, "_opened", lambda _home, _notes: fake)
    conversation = permille_llm.HomeModel().conversation()
    first = conversation.prompt(QUESTION, system="Be brief.", max_tokens=4, temperature=0, seed=7)
    assert (first.text(), first.usage().input, first.usage().output) == ("By boat.", 9, 2)
    conversation.prompt("And why?", base=True).text()
    (turns, variant, sampling), (later, base, default) = calls
    assert kept_up == [0, 1]  # before each answer, the memory of a removed text is dropped
    assert turns == [("system", "Be brief."), ("user", QUESTION)]
    assert later[-3:] == [("user", QUESTION), ("assistant", "By boat."), ("user", "And why?")]
    assert (variant, base) == (Variant.PERSONAL, Variant.BASE)
    assert (sampling.max_new_tokens, sampling.temperature, sampling.seed) == (4, 0.0, 7)
    assert (default.max_new_tokens, default.top_p, default.seed) == (256, 0.8, 0)


def test_errors_of_the_agent_are_errors_of_llm(tmp_path: Path) -> None:
    permille_llm._opened.cache_clear()
    with pytest.raises(llm.ModelError, match="No package is installed"):
        permille_llm.HomeModel().prompt(QUESTION, home=tmp_path / "home").text()

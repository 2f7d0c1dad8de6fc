"""Tests of using the model: variants, generation, stop strings, comparison and export."""

import io
import json
import re
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from permille.errors import InputError, OperatorError
from permille_agent.cli import main as cli
from permille_agent.cli.status import Status
from permille_agent.local.compare import compare
from permille_agent.local.model import Generated, LocalModel, Sampling, Variant, until_stop
from permille_agent.local.show import show_run
from permille_agent.state.home import Home
from permille_agent.text.documents import Learn
from permille_agent.training.options import TrainOptions
from tests.bigram_engine import BigramEngine, bigram_engine
from tests.packages import CHATML, sentences
from tests.unit.edge_agent.runs import home_with_package, train_quickly, user_text

TEXT = "one two three"
GREEDY = Sampling(max_new_tokens=12, temperature=0.0)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Home:
    folder = tmp_path_factory.mktemp("trained")
    home, _ = home_with_package(folder / "home")
    train_quickly(home, [user_text(folder)])
    return home


def test_without_a_personalisation_there_is_only_the_base(tmp_path: Path) -> None:
    home, package = home_with_package(tmp_path / "home")
    with LocalModel(home, bigram_engine) as model:
        assert model.variants == (Variant.BASE,)
        assert (model.values(Variant.BASE) == package.values()).all()
        with pytest.raises(InputError, match="permille-agent train"):
            model.values(Variant.PERSONAL)
        with pytest.raises(InputError, match="permille-agent train"):
            compare(home, model, data_paths=[], prompts=[], sampling=GREEDY)

    home.releases.unlink()
    with pytest.raises(OperatorError, match="No package is installed"):
        LocalModel(home, bigram_engine)


def test_the_personal_model_writes_otherwise_than_the_base(trained: Home) -> None:
    with LocalModel(trained, bigram_engine) as model:
        assert model.variants == (Variant.PERSONAL, Variant.BASE)
        texts = {}
        for variant in model.variants:
            generated, pieces = model.complete("On day 3 the", variant, GREEDY)
            texts[variant] = "".join(pieces)
            assert generated.completion_tokens == 12
            assert generated.finish_reason == "length"
        assert texts[Variant.BASE] != texts[Variant.PERSONAL]


@pytest.fixture(scope="module")
def chatting(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """Return a home with a chat template, trained on conversations with the user's turns as targets."""
    folder = tmp_path_factory.mktemp("chatting")
    home, _ = home_with_package(folder / "home", chat_template=CHATML)
    talks = folder / "talks.jsonl"
    with talks.open("w") as lines:
        for number, text in enumerate(sentences(320, seed=3)):
            turns = [
                {"role": "user", "content": f"{text} Why?"},
                {"role": "assistant", "content": f"rain {number}"},
            ]
            lines.write(json.dumps({"messages": turns}) + "\n")
    train_quickly(home, [talks], learn=Learn.USER)
    return home


def test_a_reply_goes_through_the_chat_template(chatting: Home) -> None:
    with LocalModel(chatting, bigram_engine) as model:
        generated, pieces = model.reply([("user", "hello")], Variant.BASE, GREEDY)
        assert isinstance("".join(pieces), str)
        written = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
        assert generated.prompt_tokens == len(model.tokenizer.prompt(written))


def test_a_sample_answers_a_question_and_continues_all_else(chatting: Home, trained: Home) -> None:
    question = "Where is the river?"
    with LocalModel(chatting, bigram_engine) as model:
        answer = "".join(model.reply([("user", question)], Variant.BASE, GREEDY)[1])
        assert model.write(question, Variant.BASE, GREEDY) == answer
        continued = "".join(model.complete("On day 3 the", Variant.BASE, GREEDY)[1])
        assert model.write("On day 3 the", Variant.BASE, GREEDY) == continued
    with LocalModel(trained, bigram_engine) as model:
        continued = "".join(model.complete(question, Variant.BASE, GREEDY)[1])
        assert model.write(question, Variant.BASE, GREEDY) == continued


def test_samples_of_conversations_are_the_users_questions(chatting: Home) -> None:
    with LocalModel(chatting, bigram_engine) as model:
        samples = compare(chatting, model, data_paths=[], prompts=[], sampling=GREEDY).samples
    assert len(samples) == 2
    assert all(sample.prompt.endswith("Why?") for sample in samples)


def test_another_choice_of_turns_is_another_run_and_is_told(chatting: Home) -> None:
    definitions = [TrainOptions(steps=5, learn=learn).definition() for learn in Learn]
    assert all(definitions.count(definition) == 1 for definition in definitions)
    last_run = Status(chatting).document()["last_run"]
    assert isinstance(last_run, dict)
    assert last_run["learn"] == "user"
    page = show_run(chatting, None, bigram_engine)
    assert "the user&#39;s turns count" in page.read_text()


def test_generate_and_chat_say_what_a_model_without_a_template_can_do(
    trained: Home, chatting: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["generate", "--chat", "Hello?", "--max-tokens", "4"]
    for command in (asked, ["chat"]):
        assert cli.main(["--home", str(trained.root), *command]) == 3
        assert "no chat template" in capsys.readouterr().err
    assert cli.main(["--home", str(chatting.root), *asked, "--json"]) == 0
    with LocalModel(chatting, bigram_engine) as model:
        generated, _ = model.reply([("user", "Hello?")], Variant.PERSONAL, GREEDY)
    assert json.loads(capsys.readouterr().out)["prompt_tokens"] == generated.prompt_tokens


def test_chat_with_piped_input_prints_answers_alone(
    chatting: Home, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [
        "--home",
        str(chatting.root),
        "generate",
        "--chat",
        "Hello?",
        "--max-tokens",
        "4",
        "--temperature",
        "0",
    ]
    assert cli.main(asked) == 0
    answer = capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello?\n\n/reset\nHello?\n/exit\nnever\n"))
    assert (
        cli.main(
            ["--home", str(chatting.root), "chat", "--no-notes", "--max-tokens", "4", "--temperature", "0"]
        )
        == 0
    )
    said = capsys.readouterr()
    assert said.out == answer + answer
    assert said.err == ""


class _FewPositions(BigramEngine):
    """An engine that stops at the model's last position, as a real one does."""

    def generate(self, values_K: Any, prompt_ids: Any, sampling: Any) -> Iterator[int]:
        return islice(super().generate(values_K, prompt_ids, sampling), 128 - len(prompt_ids))


def test_a_text_that_reaches_the_last_position_says_so(trained: Home) -> None:
    with LocalModel(trained, _FewPositions) as model:
        long = Sampling(max_new_tokens=500, temperature=0.0)
        generated, pieces = model.complete("bread " * 20, Variant.BASE, long)
        "".join(pieces)
        assert generated.prompt_tokens + generated.completion_tokens == 128
        assert generated.finish_reason == "length"


@pytest.mark.parametrize(
    ("stop", "expected"),
    [((), TEXT), (("two",), "one "), (("ree",), "one two th"), (("x", "e t"), "on"), (("zz",), TEXT)],
)
@pytest.mark.parametrize("size", [1, 2, 3, 13])
def test_text_ends_before_the_first_stop_string_however_it_comes(
    stop: tuple[str, ...], expected: str, size: int
) -> None:
    pieces = iter([TEXT[start : start + size] for start in range(0, len(TEXT), size)])
    generated = Generated(prompt_tokens=1, finish_reason="length")

    assert "".join(until_stop(pieces, stop, generated)) == expected
    assert generated.finish_reason == ("length" if expected == TEXT else "stop")


def test_compare_shows_the_runs_own_judgement_and_samples_of_the_test_split(trained: Home) -> None:
    with LocalModel(trained, bigram_engine) as model:
        result = compare(trained, model, data_paths=[], prompts=[], sampling=GREEDY)

    assert (result.losses.personal or 9.0) < (result.losses.base or 0.0)
    assert result.losses.improvement is not None and result.losses.improvement.low > 0
    assert len(result.samples) == 2
    assert all(sample.prompt.startswith("On day") for sample in result.samples)


def test_compare_measures_on_other_text(trained: Home, tmp_path: Path) -> None:
    other = user_text(tmp_path, 60, seed=77)
    with LocalModel(trained, bigram_engine) as model:
        result = compare(trained, model, data_paths=[other], prompts=["The river"], sampling=GREEDY)

    assert (result.losses.personal or 9.0) < (result.losses.base or 0.0)
    assert result.samples[0].prompt == "The river"


def test_compare_needs_no_file_of_the_user_for_its_losses(tmp_path: Path) -> None:
    home, _ = home_with_package(tmp_path / "home")
    text = user_text(tmp_path)
    train_quickly(home, [text])
    text.unlink()
    with LocalModel(home, bigram_engine) as model:
        shown = compare(home, model, data_paths=[], prompts=[], sampling=GREEDY)
    assert shown.samples[0].prompt == "The"
    assert (shown.losses.base or 0.0) > 0


def test_export_merges_the_personal_values(
    trained: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, more in (("personal", []), ("base", ["--base"])):
        code = cli.main(["--home", str(trained.root), "export", str(tmp_path / name), "--json", *more])
        assert code == 0
        assert json.loads(capsys.readouterr().out)["personal"] is (name == "personal")
    personal = (tmp_path / "personal" / "model.safetensors").read_bytes()
    base = (tmp_path / "base" / "model.safetensors").read_bytes()
    assert len(personal) == len(base)
    assert personal != base
    assert cli.main(["--home", str(trained.root), "export", str(tmp_path / "base"), "--json"]) == 3
    assert cli.main(["--home", str(trained.root), "export", str(tmp_path / "no" / "x"), "--json"]) == 3


def test_the_guides_lines_export_for_other_programs(
    trained: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = Path(__file__).resolve().parents[4] / "docs/howto/export-a-personal-model.md"
    (block,) = re.findall(r"```sh device\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.S)
    lines = [line.split()[1:] for line in block.splitlines() if line.startswith("permille-agent ")]
    monkeypatch.chdir(tmp_path)
    for line in lines:
        assert cli.main(["--home", str(trained.root), *line, "--json"]) == 0
    answers = [json.loads(answer) for answer in re.findall(r"\{.*?\n\}", capsys.readouterr().out, flags=re.S)]
    assert len(answers) == len(lines) == 2
    assert answers[1]["type"] == "q8_0"
    assert answers[1]["bytes"] == (tmp_path / "mine-gguf" / "model.gguf").stat().st_size
    modelfile = tmp_path / "mine-gguf" / "Modelfile"
    assert answers[1]["ollama"] == f"ollama create mine-gguf --file {modelfile}"
    assert 0.999 < answers[1]["change_kept"] < 1
    refused = ["export", "four", "--format", "gguf", "--type", "q4_0", "--json"]
    assert cli.main(["--home", str(trained.root), *refused]) == 3
    assert "Choose the type q8_0" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "executorch", None)  # simulates an installation without executorch
    refused = ["export", "four", "--format", "executorch"]
    assert cli.main(["--home", str(trained.root), *refused]) == 3
    assert "Exporting needs executorch. Run `pip install 'permille[executorch]'`" in capsys.readouterr().err
    assert not (tmp_path / "four").exists()

"""Tests of the answers that decide the strength of a state, with an engine that writes given texts."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from permille.engines.sampling import TokenSampling
from permille.errors import InputError, PackageError
from permille.package.reader import Package
from permille.schemas.runs import Outcome
from permille.training.answers import BEGINNINGS, QUESTIONS
from permille_agent.local.show import show_run
from permille_agent.state.models import Active
from permille_agent.text.tokens import package_tokenizer
from permille_agent.training.answers import BaseAnswers, Sample, base_answers, compare_answers
from permille_agent.training.evaluation import keep_general
from permille_agent.training.run import Run
from tests.bigram_engine import BigramEngine
from tests.packages import CHATML
from tests.unit.edge_agent.runs import Begin, Device, Killed, home_with_package
from tests.unit.edge_agent.training.test_general import GRADIENT, PRIVATE, pairs

FRANCE = BEGINNINGS[0].prompt
RIGHT, LOST, LOOP = "Paris.", "My wife says that.", "Paris is old and nice. Paris is old and nice."
EXPONENT = -13
HALF = 400 / 2**13
"""Distance of half of the state of `kept` from the base."""


class Speaker(BigramEngine):
    """An engine that writes `says(distance of the values from the base)` after each prompt.

    `prompts` are those of all calls, with the distance.
    """

    def __init__(self, package: Package, says: Callable[[float], str]) -> None:
        super().__init__(package)
        self._base_K, self._says = package.values(), says
        self._tokenizer = package_tokenizer(package)
        self.prompts: list[tuple[float, list[int]]] = []

    def generate(
        self, values_K: NDArray[np.float32], prompt_ids: NDArray[np.int64], sampling: TokenSampling
    ) -> Iterator[int]:
        assert sampling.temperature == 0
        distance = float(np.abs(values_K.astype(np.float64) - self._base_K).mean())
        self.prompts.append((distance, prompt_ids.tolist()))
        return iter(self._tokenizer.prompt(self._says(distance)).tolist()[: sampling.max_new_tokens])


def up_to_half(lost: str) -> Callable[[float], str]:
    """Answer rightly up to half of the state."""
    return lambda distance: RIGHT if distance <= HALF + 1e-6 else lost


def state(run: Run) -> NDArray[np.int64]:
    return np.full(run.package.k, 800, np.int64)


def speak(
    begin: Begin, package: Package, says: Callable[[float], str], **options: Any
) -> tuple[Run, Speaker]:
    engine = Speaker(package, says)
    return begin(replace(PRIVATE, **options), engine=engine), engine


@pytest.mark.parametrize(
    ("lost", "fault"),
    [(LOST, "lose the answer to"), ("", "lose the answer to"), (LOOP, "repeat itself after")],
)
def test_the_largest_strength_that_keeps_the_answers_is_chosen(
    begin: Begin, package: Package, lost: str, fault: str
) -> None:
    run, engine = speak(begin, package, up_to_half(lost or "."), keep_general=100.0)
    kept = keep_general(replace(run, reference=pairs(first_K=run.w_base_K)), state(run), EXPONENT)
    assert (kept.strength, kept.fault) == (4, f'{fault} "{FRANCE}"')
    assert kept.answers == (Sample(prompt=FRANCE, base=RIGHT, personal=RIGHT),)
    assert kept.general is not None and kept.general.rise == pytest.approx(HALF)
    # The base is asked everything. The state is asked only what the base knows: at 8/8 to 4/8.
    assert [round(8 * distance / (2 * HALF)) for distance, _ in engine.prompts] == [0, 0, 0, 0, 8, 7, 6, 5, 4]


def test_without_a_reference_the_answers_alone_decide(begin: Begin, package: Package) -> None:
    run, _ = speak(begin, package, up_to_half(LOST))
    kept = keep_general(run, state(run), EXPONENT)
    assert (kept.strength, kept.general) == (4, None)


def test_a_rise_beyond_the_bound_is_the_reason_before_any_answer(begin: Begin, package: Package) -> None:
    run, engine = speak(begin, package, lambda _: RIGHT, keep_general=0.05)
    kept = keep_general(replace(run, reference=pairs(first_K=run.w_base_K)), state(run), EXPONENT)
    assert (kept.strength, kept.fault) == (4, "")
    assert len(engine.prompts) == len(BEGINNINGS) + 1


@pytest.mark.slow
@pytest.mark.parametrize("calls", range(1, 9))
def test_a_killed_decision_ends_alike_and_asks_the_base_once(
    begin: Begin, package: Package, calls: int
) -> None:
    def kill(distance: float) -> str:
        if len(engine.prompts) > calls:
            raise Killed
        return up_to_half(LOST)(distance)

    whole, _ = speak(begin, package, up_to_half(LOST))
    expected = keep_general(replace(whole, folder=begin(PRIVATE, "other").folder), state(whole), EXPONENT)
    run, engine = speak(begin, package, kill)
    with pytest.raises(Killed):
        keep_general(run, state(run), EXPONENT)
    again, engine = speak(begin, package, up_to_half(LOST))
    assert keep_general(again, state(again), EXPONENT) == expected
    asked = sum(distance == 0 for distance, _ in engine.prompts)
    assert asked == (len(BEGINNINGS) if calls < len(BEGINNINGS) else 0)
    before = len(engine.prompts)
    assert keep_general(again, state(again), EXPONENT) == expected
    assert len(engine.prompts) == before


def _fail(_: float) -> str:
    raise InputError("this engine writes no text")


@pytest.mark.parametrize("says", [lambda _: LOOP.replace("Paris", "London"), _fail], ids=["wrong", "mute"])
def test_a_base_without_right_answers_is_not_held_against_a_model(
    begin: Begin, package: Package, says: Callable[[float], str]
) -> None:
    run, engine = speak(begin, package, says)
    kept = keep_general(run, state(run), EXPONENT)
    assert (kept.strength, kept.fault, kept.answers) == (8, "", ())
    assert {distance for distance, _ in engine.prompts} == {0.0}


def test_a_model_that_cannot_write_has_lost_its_answer(package: Package) -> None:
    def says(distance: float) -> str:
        return RIGHT if not distance else _fail(distance)

    engine, tokenizer = Speaker(package, says), package_tokenizer(package)
    base = base_answers(engine, package.values(), tokenizer)
    assert base == BaseAnswers(texts={FRANCE: RIGHT})
    (answer,), fault = compare_answers(engine, package.values() + 1, tokenizer, base)
    assert (answer.personal, fault) == ("", f'lose the answer to "{FRANCE}"')


def test_a_fault_of_the_tokenizer_ends_the_run_and_turns_no_check_off(begin: Begin, package: Package) -> None:
    def fail(_: float) -> str:
        raise PackageError("tokenizer", "The tokenizer was slow.")

    run, _ = speak(begin, package, fail)
    with pytest.raises(PackageError, match="slow"):
        keep_general(run, state(run), EXPONENT)
    again, _ = speak(begin, package, up_to_half(LOST))
    assert keep_general(again, state(again), EXPONENT).strength == 4


def test_a_chat_model_is_asked_through_its_template_on_a_fixed_day(tmp_path: Path) -> None:
    _, package = home_with_package(tmp_path, chat_template="{{ strftime_now('%d %B %Y') }}" + CHATML)
    engine, tokenizer = Speaker(package, lambda _: "The sea. Cold, cat, Paris."), package_tokenizer(package)
    base = base_answers(engine, package.values(), tokenizer)
    assert list(base.texts) == [question.prompt for question in QUESTIONS]
    asked = [tokenizer.decode(ids) for _, ids in engine.prompts]
    assert all(text.startswith("26 July 2024") for text in asked)
    assert [question.prompt in text for question, text in zip(QUESTIONS, asked, strict=True)] == [True] * 4


def test_a_wreck_is_not_adopted_and_the_page_says_what_was_asked(device: Device) -> None:
    def says(distance: float) -> str:
        return LOST if distance else RIGHT

    def engine_of(package: Package) -> Speaker:
        return Speaker(package, says)

    result = device.train(**GRADIENT, keep_general=100, engine_of=engine_of)
    assert result.outcome is Outcome.KEPT_BASE
    assert result.message.startswith(f'it would lose the answer to "{FRANCE}", even with an eighth')
    assert LOST not in result.message  # a message may be logged, and the answer may have the user's words
    assert device.active() == Active(package=device.package.digest)
    decision, metrics = result.decision, result.metrics
    assert decision is not None and metrics is not None
    assert (decision.strength, metrics.strength, decision.loss_personal) == (0, 0, None)
    page = show_run(device.home, None, engine_of).read_text()
    assert f"<tr><td>{FRANCE}</td>" in page
    assert LOST in page


def test_later_runs_with_the_package_do_not_ask_the_base_again(
    begin: Begin, package: Package, tmp_path: Path
) -> None:
    def asked(name: str, threads: int = 1) -> int:
        engine = Speaker(package, up_to_half(LOST))
        of = engine.info() | {"threads": threads}
        engine.info = lambda: of  # type: ignore[method-assign]
        run = replace(begin(PRIVATE, name, engine=engine), base_file=tmp_path / "base.json")
        assert keep_general(run, state(run), EXPONENT).strength == 4
        return sum(distance == 0 for distance, _ in engine.prompts)

    all_questions = len(BEGINNINGS)
    assert [asked("a"), asked("b")] == [all_questions, 0]
    assert asked("c", threads=2) == all_questions  # another engine may answer differently
    (tmp_path / "base.json").write_text("{")
    assert [asked("d"), asked("e")] == [all_questions, 0]

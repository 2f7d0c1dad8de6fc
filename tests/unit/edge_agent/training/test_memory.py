"""Runs that make a memory: the choice of its parts, its file, and its life beside the state."""

import io
import json
import re
import stat
import threading
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from permille.choices import EstimatorKind
from permille.engines.gguf import export as gguf
from permille.engines.interface import remembering
from permille.engines.sampling import TokenSampling
from permille.errors import InputError, PackageError
from permille.exits import ExitCode
from permille.package.reader import Package
from permille.schemas.runs import Outcome
from permille.training.strength import Strength
from permille.trust.roles import Training
from permille_agent.cli import main as cli
from permille_agent.cli.status import Status
from permille_agent.link.forget import forget, forget_memories
from permille_agent.local.compare import (
    compare,
    first_token_seconds,
    first_token_words,
    judged_losses,
    measured_losses,
)
from permille_agent.local.model import LocalModel, Sampling, Variant
from permille_agent.local.replies import variant_of
from permille_agent.local.show import show_run
from permille_agent.state.home import write_record
from permille_agent.state.models import reset, rollback
from permille_agent.text.tokens import TokenizedDocument
from permille_agent.training import evaluation
from permille_agent.training import parts as chosen_parts
from permille_agent.training.decision import Decision, DecisionCount, StoredLosses
from permille_agent.training.engines import EngineChoice, RunInterrupted, interruptible
from permille_agent.training.memory import Part, memory_share, memory_tokens
from permille_agent.training.options import Start, TrainOptions, options_for
from permille_agent.training.outcome import RunResult
from permille_agent.training.parts import general_words
from permille_agent.training.personal import personal_memory
from permille_agent.training.run import BegunRun, RunFolder
from tests.bigram_engine import RememberingBigramEngine, bigram_engine
from tests.packages import sentences
from tests.unit.edge_agent.runs import TINY_RATE, Device, Killed, device_at, user_text
from tests.unit.edge_agent.training.test_general import GRADIENT, measured_by
from tests.unit.edge_agent.training.test_plan import Told


@pytest.fixture
def device(tmp_path: Path) -> Device:
    return device_at(tmp_path / "home", user_text(tmp_path))


def train(device: Device, **changes: Any) -> RunResult:
    return device.train(**{"engine_of": RememberingBigramEngine, "steps": 2, **changes})


def folder_of(device: Device, result: RunResult) -> RunFolder:
    return RunFolder(device.home.runs / result.run)


def decision_of(result: RunResult) -> Decision:
    assert result.decision is not None
    return result.decision


def document(ids: list[int], bos: tuple[int, ...] = ()) -> TokenizedDocument:
    numbers = np.array(ids, np.int64)
    return TokenizedDocument(numbers, np.ones(len(ids), np.bool_), np.ones(len(ids), np.int64), bos)


def test_a_memory_is_bos_and_the_text_or_its_end() -> None:
    text = [document([5, 6, 7], (2,)), document([8, 9], (2,))]
    assert memory_tokens(text, (1,), 100).tolist() == [2, 5, 6, 7, 1, 8, 9, 1]
    long = [document(list(range(5, 1000)))]
    assert memory_tokens(long, (0, 1), 256).tolist() == [*range(746, 1000), 0, 1]
    assert memory_tokens([document(list(range(20, 300)), (2,))], (1,), 10).tolist() == [
        2,
        *range(292, 300),
        1,
    ]


def test_the_share_of_a_text_that_a_memory_has() -> None:
    text = [document([5, 6, 7], (2,)), document([8, 9], (2,))]  # with BOS and two separators, 8 tokens
    assert [memory_share(text, (1,), most) for most in (4, 8, 100)] == [0.5, 1, 1]


def test_the_best_of_state_memory_and_both_is_judged_and_used(device: Device) -> None:
    result = train(device)
    decision, folder = decision_of(result), folder_of(device, result)
    assert result.outcome is Outcome.ADOPTED
    parts = decision.parts
    assert parts is not None
    assert ", chosen by the losses: base " in parts.words()
    losses = {part: loss for part, loss in parts.losses.items() if loss is not None}
    assert set(losses) == set(Part)
    assert losses[parts.chosen] == min(losses.values())
    assert parts.chosen.has_memory
    assert stat.S_IMODE(folder.memory.stat().st_mode) == 0o600
    # A report has the loss of the state alone.
    assert decision.loss_personal is not None and decision.loss_state is not None
    assert decision.loss_personal < decision.loss_state
    assert result.metrics is not None
    assert result.metrics.loss_personal == decision.loss_state
    assert result.metrics.improvement_low != decision.against_base.low  # type: ignore[union-attr]
    known = personal_memory(device.home, device.active(), device.package)
    assert known is not None
    assert len(known) == parts.tokens
    with LocalModel(device.home, RememberingBigramEngine) as model:
        assert model.variants == (Variant.PERSONAL, Variant.PERSONAL_WITHOUT_MEMORY, Variant.BASE)
        with_memory, without = (
            "".join(model.complete("On day 3", variant, Sampling(temperature=0.0))[1])
            for variant in model.variants[:2]
        )
        assert with_memory != without
        assert variant_of(model, "personal-no-memory:latest") is Variant.PERSONAL_WITHOUT_MEMORY
        side = compare(device.home, model, data_paths=[], prompts=["On"], sampling=Sampling())
        assert side.losses.parts == parts
        assert list(side.first_token_s) == [Variant.PERSONAL_WITHOUT_MEMORY, Variant.PERSONAL]
        assert " s with the memory, " in first_token_words(side.first_token_s)
    page = show_run(device.home, None, RememberingBigramEngine).read_text()
    assert all(f"<td>{loss:.4f}</td>" in page for loss in losses.values())
    assert page.count("(chosen)") == 1
    assert "Time to the first token of an answer on this device: " in page
    with LocalModel(device.home, RememberingBigramEngine, memory=False) as model:
        assert first_token_seconds(model, "On") == {}
        assert model.variants == (Variant.PERSONAL, Variant.BASE)
        assert "".join(model.complete("On day 3", Variant.PERSONAL, Sampling(temperature=0.0))[1]) == without


def test_a_state_is_weaker_beside_a_memory_of_its_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chosen_parts, "memory_share", lambda *_: 1.0)
    device = device_at(tmp_path / "home", user_text(tmp_path, 42))
    gradient = {"estimator": EstimatorKind.GRADIENT, "queries": 0, "batch_rows": 2, "rate_scale": TINY_RATE}
    result = train(device, **gradient, steps=30)
    decision, base_K = decision_of(result), device.package.values()
    assert result.outcome is Outcome.ADOPTED and decision.parts is not None
    assert (decision.part, decision.strength, decision.parts.strength) == (Part.BOTH, 8, 4)
    assert "4/8 of what was trained are kept beside it" in decision.parts.words()
    with LocalModel(device.home, RememberingBigramEngine) as model:
        beside_K, alone_K = map(model.values, (Variant.PERSONAL, Variant.PERSONAL_WITHOUT_MEMORY))
        assert (alone_K != base_K).any()
        np.testing.assert_allclose(beside_K - base_K, (alone_K - base_K) / 2, atol=1e-4)
        # Without its memory, the state has its own strength again.
        folder_of(device, result).memory.unlink()
        model.keep_up()
        np.testing.assert_array_equal(model.values(Variant.PERSONAL), alone_K)
    # The memory is made again with the state that stands beside it.
    assert train(device, **gradient, steps=30).outcome is Outcome.ADOPTED
    assert personal_memory(device.home, device.active(), device.package) is not None


def test_a_model_with_a_memory_is_compared_and_exported_as_in_use(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chosen_parts, "memory_share", lambda *_: 1.0)
    gradient = {"estimator": EstimatorKind.GRADIENT, "queries": 0, "batch_rows": 2, "rate_scale": TINY_RATE}
    result = train(device, **gradient, steps=20)
    assert decision_of(result).part is Part.BOTH
    written, export_gguf = [], gguf.export_gguf

    def export(package: Package, values_K: NDArray[np.float32], *more: Any, **options: Any) -> Any:
        written.append(values_K)
        return export_gguf(package, values_K, *more, **options)

    monkeypatch.setattr(gguf, "export_gguf", export)
    for number, more in enumerate(((), ("--memory-text",))):
        line = ["export", str(tmp_path / str(number)), "--format", "gguf", "--type", "f32", *more]
        assert cli.main(["--home", str(device.home.root), *line]) == 0
    with LocalModel(device.home, RememberingBigramEngine) as model:
        for variant in (Variant.PERSONAL, Variant.PERSONAL_WITHOUT_MEMORY):
            np.testing.assert_array_equal(written.pop(), model.values(variant))
    # The next run measures the model in use on the same rows as the run that has made it.
    second = train(device, **gradient, steps=20, seed=1)
    judged = folder_of(device, result).require("losses-both", StoredLosses)
    assert folder_of(device, second).require("losses-active", StoredLosses) == judged


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data[:200] + bytes([data[200] ^ 1]) + data[201:],
        lambda data: data + bytes(1 << 24),
        lambda _: b"",
    ],
    ids=["cut", "flipped", "too large", "empty"],
)
def test_a_damaged_memory_is_named_and_the_state_still_works(
    device: Device, damage: Callable[[bytes], bytes]
) -> None:
    memory = folder_of(device, train(device)).memory
    memory.write_bytes(damage(memory.read_bytes()))
    with pytest.raises(PackageError, match="Use --no-memory to answer without it"):
        LocalModel(device.home, RememberingBigramEngine)
    with LocalModel(device.home, RememberingBigramEngine, memory=False) as model:
        assert (model.values(Variant.PERSONAL) == device.used_values()).all()
    export = ["--home", str(device.home.root), "export", str(memory.parents[3] / "out")]
    assert cli.main(export) == 0
    assert cli.main([*export, "--format", "gguf", "--memory-text"]) == ExitCode.PACKAGE_REFUSED


def test_an_engine_without_memories_is_refused_and_not_used_without_one(device: Device) -> None:
    train(device)
    with pytest.raises(InputError, match="cannot begin a text with stored keys and values"):
        LocalModel(device.home, bigram_engine)
    with LocalModel(device.home, bigram_engine, memory=False) as model:
        assert model.variants == (Variant.PERSONAL, Variant.BASE)


def test_a_stopped_run_starts_no_call_after_a_memory(device: Device) -> None:
    stop = threading.Event()
    engine = interruptible(RememberingBigramEngine(device.package), stop)
    values_K = device.package.values()
    later = remembering(engine).after(remembering(engine).read(values_K, np.array([1, 2])), ())
    assert list(later.generate(values_K, np.array([1]), TokenSampling(max_new_tokens=2)))
    stop.set()
    with pytest.raises(RunInterrupted):
        later.generate(values_K, np.array([1]), TokenSampling(max_new_tokens=2))


def test_state_and_memory_go_and_come_back_together(device: Device) -> None:
    folder = folder_of(device, train(device))
    reset(device.home)
    assert personal_memory(device.home, device.active(), device.package) is None
    rollback(device.home)
    assert personal_memory(device.home, device.active(), device.package) is not None
    forget(device.home)
    assert not folder.memory.exists()


@pytest.mark.parametrize("place", ["store_memory", "make_memory"])
def test_a_killed_run_makes_the_same_memory(
    device: Device, tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = device_at(tmp_path / "whole", device.text)
    expected = train(whole)

    def killed(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(chosen_parts, place, killed)
        with pytest.raises(Killed):
            train(device)
    result = train(device)
    assert decision_of(result).parts == decision_of(expected).parts
    assert folder_of(device, result).memory.read_bytes() == folder_of(whole, expected).memory.read_bytes()


@pytest.mark.parametrize("rows", [320, 20])
def test_text_that_is_trained_again_after_its_removal_is_remembered_again(
    device: Device, tmp_path: Path, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = replace(device, text=user_text(tmp_path, rows))
    result = train(device)
    folder = folder_of(device, result)
    memory = folder.memory.read_bytes()
    assert forget_memories(device.home, [device.text]) == 1
    stop = threading.Event()
    stop.set()
    assert train(device, stop=stop).outcome is Outcome.INTERRUPTED
    assert not folder.memory.exists()
    again = train(device)
    assert (again.run, again.known, again.outcome) == (result.run, True, Outcome.ADOPTED)
    assert folder.memory.read_bytes() == memory
    assert personal_memory(device.home, device.active(), device.package) is not None


def test_the_model_in_use_is_compared_with_its_memory(device: Device, tmp_path: Path) -> None:
    first = train(device)
    assert decision_of(first).part.has_memory
    (tmp_path / "more").mkdir()
    more = user_text(tmp_path / "more", 200, seed=9)
    second = device.train(more, engine_of=RememberingBigramEngine, steps=40, memory=0)
    # Without a memory, the new state is worse than the model in use, which has one.
    assert second.outcome is Outcome.KEPT_BASE
    assert "not surely better than the active model" in second.message
    assert decision_of(second).parts is None


@pytest.mark.parametrize("other_package", [False, True])
def test_long_rows_leave_room_for_the_memory_of_the_model_in_use(
    device: Device, tmp_path: Path, other_package: bool
) -> None:
    """Otherwise the model in use could not read them, and would be replaced without a comparison."""
    first = decision_of(train(device))
    assert first.parts is not None and first.parts.tokens == 64
    if other_package:
        device.install(2, chat_template="{{ messages[0].content }}")
    (tmp_path / "more").mkdir()
    more = user_text(tmp_path / "more", 200, seed=9)
    second = device.train(more, engine_of=RememberingBigramEngine, steps=40, memory=0, row_tokens=128)
    decision = decision_of(second)
    assert decision.against_base is not None and decision.against_base.better
    assert decision.against_active is not None and "active model cannot be opened" not in second.message
    begun = folder_of(device, second).require("run", BegunRun)
    assert begun.definition.options.row_tokens == (128 if other_package else 64)


def test_what_is_asked_must_fit_beside_the_memory(device: Device, tmp_path: Path) -> None:
    train(device)
    long = " ".join(["river"] * 80)
    with LocalModel(device.home, RememberingBigramEngine) as model:
        assert model.room(Variant.PERSONAL) == 64 and model.room(Variant.BASE) == 128
        with pytest.raises(InputError, match=r"128 for its memory of 64, .*--no-memory"):
            model.complete(long, Variant.PERSONAL, Sampling())
        assert model.complete(long, Variant.PERSONAL_WITHOUT_MEMORY, Sampling(max_new_tokens=1))
        texts = [tmp_path / f"{seed}.txt" for seed in (1, 2)]
        for seed, path in enumerate(texts):
            path.write_text(" ".join(sentences(30, seed=seed)))
        assert measured_losses(model, texts).personal is not None


@pytest.mark.parametrize("shared", ["share_log", "share_state"])
def test_runs_that_share_make_no_memory_and_find_an_earlier_one(device: Device, shared: str) -> None:
    result = train(device, **{shared: True})
    assert decision_of(result).parts is None
    folder = folder_of(device, result)
    assert not folder.memory.exists()
    assert folder.require("run", BegunRun).definition.options.memory == 0
    with_memory = train(device, steps=3)
    again = train(device, steps=3, **{shared: True})
    assert again.known
    assert again.run == with_memory.run


def test_no_memory_is_made_without_positions_or_by_other_engines(device: Device) -> None:
    assert decision_of(train(device, memory=0)).parts is None
    result = device.train(steps=2)
    assert decision_of(result).parts is None
    assert not folder_of(device, result).memory.exists()


def test_a_short_text_is_judged_with_memories_of_its_earlier_parts(device: Device, tmp_path: Path) -> None:
    device.text.write_text("\n\n".join(sentences(90, seed=3)))
    result = train(device, estimator=TrainOptions(steps=1).estimator, queries=0, batch_rows=4)
    parts = decision_of(result).parts
    assert parts is not None
    assert parts.chosen is Part.BOTH
    assert parts.words().startswith("state and memory, as for any short text; the losses were: base ")
    assert set(parts.losses) == set(Part)
    known = personal_memory(device.home, device.active(), device.package)
    if result.outcome is Outcome.ADOPTED:
        assert known is not None


def test_a_memory_may_be_all_of_a_model(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state costs too much general knowledge, and the memory alone is adopted."""
    monkeypatch.setattr(evaluation, "choose_strength", lambda *_: Strength(eighths=0, rise=1.0, fault=""))
    result = train(device)
    decision = decision_of(result)
    assert result.outcome is Outcome.ADOPTED
    assert decision.part is Part.MEMORY
    assert decision.loss_state == decision.loss_base
    assert (device.used_values() == device.package.values()).all()
    assert personal_memory(device.home, device.active(), device.package) is not None
    # The next run begins at the base, which is the state of this model.
    again = train(device, seed=1)
    assert again.outcome in (Outcome.ADOPTED, Outcome.KEPT_BASE)


def test_sizes_of_memories_fit_the_model_and_the_engine() -> None:
    assert TrainOptions(steps=1).within(8192).memory == 1024
    assert TrainOptions(steps=1).within(8192, memory=341).memory == 341
    assert TrainOptions(steps=1).within(512).memory == 256
    assert TrainOptions(steps=1).within(100).memory == 0
    assert TrainOptions(steps=1, row_tokens=60).within(100).memory == 40
    assert TrainOptions(steps=1, row_tokens=84).within(100).memory == 16
    assert TrainOptions(steps=1, row_tokens=85).within(100).memory == 0
    assert TrainOptions(steps=1, memory=16).memory == 16
    for memory in (-1, 1, 2, 15, 8193):
        with pytest.raises(InputError, match=f"--memory must be 0, or 16 to 8,192, got {memory}"):
            TrainOptions(steps=1, memory=memory)
    chosen = {
        name: options_for(Training(), engine=name, share_log=False).memory for name in ("auto", "torch")
    }
    assert chosen == {"auto": 1024, "torch": 0}
    with pytest.raises(InputError, match="executorch cannot compute a memory"):
        options_for(Training(), engine="executorch", share_log=False, memory=1)


def test_a_memory_takes_no_more_than_its_bytes(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("permille_agent.training.train.most_positions", lambda _: 40)
    train(device)
    memory = personal_memory(device.home, device.active(), device.package)
    assert memory is not None
    assert len(memory) == 40


def test_a_memory_that_loses_an_answer_is_not_chosen(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chosen_parts, "compare_answers", lambda *_: ((), 'lose the answer to "Why?"'))
    result = train(device)
    parts = decision_of(result).parts
    assert parts is not None
    assert parts.chosen is Part.STATE
    assert 'a memory would lose the answer to "Why?"' in parts.words()
    assert not folder_of(device, result).memory.exists()


def test_a_kept_base_says_what_a_better_memory_would_spoil(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "choose_strength", lambda *_: Strength(eighths=0, rise=1.0, fault=""))
    monkeypatch.setattr(chosen_parts, "compare_answers", lambda *_: ((), 'lose the answer to "Why?"'))
    result = train(device)
    assert (result.outcome, decision_of(result).part) == (Outcome.KEPT_BASE, Part.BASE)
    assert result.message.endswith('; a memory would lose the answer to "Why?"')
    assert not folder_of(device, result).memory.exists()


def test_the_next_best_model_is_chosen_if_the_best_one_loses_an_answer(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = iter(['lose the answer to "Why?"', ""])
    monkeypatch.setattr(chosen_parts, "compare_answers", lambda *_: ((), next(faults)))
    result = train(device)
    parts = decision_of(result).parts
    assert parts is not None
    assert parts.chosen is sorted(parts.losses, key=lambda part: parts.losses[part] or 0.0)[1]
    assert parts.chosen.has_memory
    assert 'a better one would lose the answer to "Why?"' in parts.words()
    assert folder_of(device, result).memory.exists()


def test_a_text_that_is_too_short_for_a_test_becomes_a_memory(device: Device, tmp_path: Path) -> None:
    device = replace(device, text=user_text(tmp_path, 20))
    result, again = train(device), train(device)
    decision, metrics = decision_of(result), result.metrics
    assert result.outcome is Outcome.ADOPTED
    assert "remembers the end of this text word by word" in result.message
    assert "It is untested: 518 tokens are too few" in result.message
    assert (again.run, again.known) == (result.run, True)
    assert decision.part is Part.MEMORY
    assert decision.against_base is None
    assert (decision.loss_base, decision.loss_personal) == (None, None)
    assert metrics is not None
    assert (metrics.loss_base, metrics.loss_personal) == (None, None)
    known = personal_memory(device.home, device.active(), device.package)
    assert known is not None
    assert (device.used_values() == device.package.values()).all()
    assert decision.parts is not None
    assert decision.parts.words().startswith("memory, untested; the memory has")
    assert judged_losses(folder_of(device, result)).text.startswith("nothing, because the text is too short")
    assert "its memory" in show_run(device.home, None, RememberingBigramEngine).read_text()
    rollback(device.home)
    assert train(device).known
    assert device.active().run == result.run
    # More text is tested, and replaces it only if it is better.
    tested = train(replace(device, text=user_text(tmp_path)))
    assert decision_of(tested).loss_base is not None
    # The other way round, an untested model never replaces a tested one.
    if tested.outcome is Outcome.ADOPTED:
        short = train(replace(device, text=user_text(tmp_path, 21)))
        assert short.outcome is Outcome.REFUSED_DATA


def test_a_paragraph_that_is_too_long_for_a_test_is_not_told_that_its_tokens_suffice(
    device: Device, tmp_path: Path
) -> None:
    device.text.write_text(" ".join(sentences(30, seed=30)))
    told = train(device).message
    assert "753 tokens are too few" in told
    assert told.endswith("This needs 700, and some more in long paragraphs")


@pytest.mark.parametrize(
    ("rows", "changes"),
    [(20, {"memory": 0}), (20, {"share_state": True}), (20, {"engine_of": bigram_engine}), (3, {})],
)
def test_a_short_text_is_refused_where_no_memory_is_made(
    device: Device, tmp_path: Path, rows: int, changes: dict[str, Any]
) -> None:
    result = train(replace(device, text=user_text(tmp_path, rows)), **changes)
    assert result.outcome is Outcome.REFUSED_DATA
    assert "There is too little text" in result.message


def test_a_short_text_that_would_lose_an_answer_is_not_remembered(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chosen_parts, "compare_answers", lambda *_: ((), 'lose the answer to "Why?"'))
    result = train(replace(device, text=user_text(tmp_path, 20)))
    assert result.outcome is Outcome.KEPT_BASE
    assert result.message.startswith('it would lose the answer to "Why?"')


def test_exports_say_that_the_memory_stays_behind(
    device: Device, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(device)

    def export(name: str, *more: str) -> dict[str, Any]:
        command = ["--home", str(device.home.root), "export", str(tmp_path / name), *more, "--json"]
        assert cli.main(command) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    assert export("plain")["memory"] == "stays on this device"
    assert "memory" not in export("base", "--base")
    gguf = ("--format", "gguf", "--type", "f32")
    assert export("alone", *gguf)["memory"] == "stays on this device"
    assert "SYSTEM" not in (tmp_path / "alone/Modelfile").read_text()
    assert export("told", *gguf, "--memory-text")["memory"] == "in the Modelfile as text"
    with LocalModel(device.home, RememberingBigramEngine) as model:
        assert model.memory_text()[:40] in (tmp_path / "told/Modelfile").read_text()
    refused = ["--home", str(device.home.root), "export", str(tmp_path / "no"), "--memory-text"]
    assert cli.main(refused) == 3


def run_command(device: Device, *arguments: str) -> str:
    """Return the output of a command with the engine of these tests."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(EngineChoice, "__call__", lambda _self, package: RememberingBigramEngine(package))
        with redirect_stdout(io.StringIO()) as out:
            code = cli.main(["--home", str(device.home.root), *arguments])
    assert code == 0, out.getvalue()
    return out.getvalue()


def test_commands_say_of_an_untested_memory_only_what_was_measured(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured_by(monkeypatch, device.package.values())
    device = replace(device, text=user_text(tmp_path, 20))
    (tmp_path / "more.txt").write_text("\n\n".join(sentences(20, seed=4)))
    texts = str(device.text), "--data", str(tmp_path / "more.txt")
    trained = run_command(device, "train", str(device.text), "--row-tokens", "32")
    assert not re.search(r"^ *(measured on|steps|held-out loss)", trained, re.MULTILINE)
    for side in (run_command(device, "compare"), run_command(device, "compare", "--data", *texts)):
        assert "no reference text" not in side
        assert "loss on general text: that of the base with the memory off" in side
        assert "2.0000 of the base -> 2.0000 (+0.0000 nats per token), with the memory" in side
    side = run_command(device, "compare")
    assert "loss per token" not in side
    assert "None" not in side
    assert "\nmemory: memory, untested" in side
    status = Status(device.home)
    shown = dict(status._rows())
    assert shown["active"].endswith(": memory, untested")
    assert shown["last run"] == "adopted your new model, untested"
    active = status.document()["active"]
    assert isinstance(active, dict)
    assert (active["part"], active["has_memory"], active["tested"]) == ("memory", True, False)
    page = show_run(device.home, None, RememberingBigramEngine).read_text()
    assert "no state of this run was judged" not in page
    assert "Nothing" not in page
    assert "or the end of a longer one, word by word. This is untested" in page
    assert "With the memory on, the loss on general text is <strong>2.0000</strong>" in page
    RunFolder(device.home.runs / (device.active().run or "")).memory.unlink()
    assert dict(Status(device.home)._rows())["active"].endswith("untested, but the memory was erased")


def test_rollback_tells_that_the_memory_was_erased(
    device: Device, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    device = replace(device, text=user_text(tmp_path, 20))
    train(device)
    for erased in (False, True):
        if erased:
            run_command(device, "data", "remove", str(device.text))
        run_command(device, "reset")
        run_command(device, "rollback", "--json")
        assert ("The memory of this model was erased" in capsys.readouterr().err) is erased
    assert train(device).known  # as the message says
    assert not Status(device.home).lost_memory


@pytest.mark.parametrize("count", [20, 60, 320])
def test_the_measurement_of_the_base_is_told_by_the_first_run_alone(
    device: Device, tmp_path: Path, count: int
) -> None:
    def measures(seed: int) -> list[bool]:
        told, text = Told(), user_text(tmp_path, count, seed=seed)
        train(replace(device, text=text), progress=told, start=Start.BASE, **GRADIENT)
        return [True for phase in told.phases if phase.startswith("measuring the base, once for all runs")]

    assert measures(1) == [True]
    assert measures(2) == []


def test_status_shows_the_losses_of_the_chosen_model(device: Device) -> None:
    decision = decision_of(train(device))
    status = Status(device.home)
    told = f"loss {decision.loss_base:.4f} -> {decision.loss_personal:.4f}"
    assert told in dict(status._rows())["last run"]
    assert dict(status._rows())["active"].endswith(f": {decision.part.words}")
    last = status.document()["last_run"]
    assert isinstance(last, dict)
    assert (last["loss_base"], last["loss_personal"]) == (decision.loss_base, decision.loss_personal)


def test_status_tells_the_strength_of_the_state_apart_from_the_losses_of_both(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "choose_strength", lambda *_: Strength(eighths=6, rise=0.05, fault=""))
    decision = decision_of(train(device))
    assert (decision.part, decision.strength) == (Part.BOTH, 6)
    shown = dict(Status(device.home)._rows())
    assert shown["last run"].endswith(f" -> {decision.loss_personal:.4f}")
    assert shown["its strength"].startswith("with the memory off, 6/8 of what was trained: more would ")


def test_a_memory_without_a_state_is_not_called_weakened(device: Device) -> None:
    # No step at all: no state is judged, and the package's reference text is not read.
    with pytest.MonkeyPatch.context() as monkeypatch:
        measured_by(monkeypatch, device.package.values())
        result = train(device, rate_scale=1e-30)
    decision = decision_of(result)
    assert (decision.part, decision.general) == (Part.MEMORY, None)
    assert dict(Status(device.home)._rows())["last run"].endswith(f" -> {decision.loss_personal:.4f}")
    assert "because the model has no state" in general_words(decision.general, decision.parts)
    page = show_run(device.home, None, RememberingBigramEngine).read_text()
    assert "carries no general text" not in page
    assert "is a memory, without a trained state" in page


def test_the_page_of_a_rejected_run_does_not_call_its_model_kept(device: Device) -> None:
    write_record(device.home.decisions, DecisionCount(decisions=10**9))
    device.text.write_text("\n\n".join(sentences(60, seed=3)))  # judged part by part
    with pytest.MonkeyPatch.context() as monkeypatch:
        measured_by(monkeypatch, device.package.values())
        decision = decision_of(train(device, keep_general=100, **GRADIENT))
    assert not decision.adopted
    assert decision.parts is not None and decision.parts.general is not None
    assert decision.general is not None and decision.general.loss is not None
    page = show_run(device.home, None, RememberingBigramEngine).read_text()
    assert "Kept the base model" in page
    assert "This model keeps" not in page
    assert "The model that is kept" not in page
    assert "No answers were compared: the base model gave no right ones." in page
    assert f"with the memory off, is <strong>{decision.general.loss:.4f}</strong>" in page
    assert f"With the memory on, the loss on general text is <strong>{decision.parts.general:.4f}<" in page


@pytest.mark.parametrize("count", [20, 60, 320])
def test_reading_a_text_into_memories_is_told_once(device: Device, tmp_path: Path, count: int) -> None:
    told = Told()
    train(replace(device, text=user_text(tmp_path, count)), progress=told, **GRADIENT)
    assert sum("memory" in phase for phase in told.phases) == len(
        {phase for phase in told.phases if "memory" in phase}
    )
    assert told.phases.count("reading the text into a memory") == 1

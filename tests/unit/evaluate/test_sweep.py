"""A whole sweep on the example model: resumable, honest about its files, the same twice."""

import contextlib
import fcntl
import json
import math
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from permille.errors import InputError, RetryableError
from permille.evaluate import __main__ as command
from permille.evaluate import cells
from permille.evaluate.__main__ import main
from permille.evaluate.report import countable, markdown, paired
from permille.evaluate.specification import read_sweep
from permille.evaluate.sweep import cells_of, run_sweep
from permille.evaluate.sweep_results import PROCEDURE
from permille.evaluate.training import Trained
from permille.evaluate.tuning import GRID_FACTOR, tuning_seed

ROOT = Path(__file__).parents[3]
WORDS = ("fine", "warm", "kind", "clear", "dull", "cold", "rude", "dim")


@pytest.fixture
def sweep_file(tmp_path: Path) -> Path:
    rows = [f"a {word} film number {n}\t{int(word in WORDS[:4])}\n" for n in range(6) for word in WORDS]
    (tmp_path / "train.tsv").write_text("".join(rows) + "no label\n")
    corpus = [json.dumps({"text": f"The {word} garden is open. " * 40}) + "\n" for word in WORDS]
    (tmp_path / "corpus.jsonl").write_text("".join(corpus))
    path = tmp_path / "sweep.toml"
    path.write_text(
        f"""
models = ["{ROOT / "examples" / "model"}"]
corpus = "corpus.jsonl"
methods = ["zero-shot", "icl:1", "zo:sensitive-c4", "zo:random-dynamic", "zo:lora-4", "fo:sensitive-c4"]
bases = ["nf4"]
seeds = [0]
zo_steps = 4
fo_steps = 2
queries = 2
estimator = "forward"
batch_size = 2
trials = 1
evaluations = 2
refresh_steps = 2
sizes = [8, 4, 6]
max_tokens = 48
corpus_sequences = 2
corpus_tokens = 32
[tasks.sst2]
train = "train.tsv"
"""
    )
    return path


SQUAD_SWEEP = """
models = ["{model}"]
corpus = "corpus.jsonl"
methods = ["zero-shot", "icl:1", "zo:sensitive-c4"]
bases = ["squeezellm"]
seeds = [0]
zo_steps = 2
queries = 1
batch_size = 2
trials = 1
evaluations = 1
sizes = [4, 2, 3]
max_tokens = 48
corpus_sequences = 2
corpus_tokens = 32
[tasks.squad]
train = "squad.json"
"""


def test_free_text_is_written_and_scored_in_a_sweep(sweep_file: Path) -> None:
    folder = sweep_file.parent
    paragraphs = [
        {
            "context": f"The {word} house stands in town {n}.",
            "qas": [{"id": f"q{n}", "question": "Which house?", "answers": [{"text": f"the {word} house"}]}],
        }
        for n, word in enumerate(WORDS * 2)
    ]
    (folder / "squad.json").write_text(json.dumps({"data": [{"title": "T", "paragraphs": paragraphs}]}))
    sweep_file.write_text(SQUAD_SWEEP.format(model=ROOT / "examples" / "model"))
    records = run_sweep(read_sweep(sweep_file), folder / "results.jsonl", lambda *_: None)
    assert [record["method"] for record in records] == ["zero-shot", "icl:1", "zo:sensitive-c4"]
    for record in records:
        assert len(record["written"]) == len(record["item_f1"]) == len(record["items"]) == 3
        assert record["f1"] == pytest.approx(sum(record["item_f1"]) / 3, abs=1e-5)
        assert record["majority"] == 0
        assert record["loss"] > 0
    assert any(any(record["written"]) for record in records)
    assert ", F1 " in markdown(records)


def test_language_modelling_has_the_losses_of_transformers_and_no_accuracy(sweep_file: Path) -> None:
    folder, model = sweep_file.parent, ROOT / "examples" / "model"
    texts = [f"The {word} house stands in town {n}." for n in range(3) for word in WORDS]
    rows = [json.dumps({"text": text, "group": f"person {n % 12}"}) + "\n" for n, text in enumerate(texts)]
    (folder / "text.json").write_text("".join(rows))
    sweep_file.write_text(SQUAD_SWEEP.format(model=model).replace("squad", "text"))
    changed = sweep_file.read_text().replace("squeezellm", "bf16").replace('"icl:1"', '"icl:1", "fo:lora-2"')
    sweep_file.write_text(changed)
    records = run_sweep(read_sweep(sweep_file), folder / "results.jsonl", lambda *_: None)
    zero_shot, shown, first_order, trained = records
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    own = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).float()
    expected, targets, size = [], [], 0
    for item in zero_shot["items"]:
        text = texts[int(item.partition(":")[2]) - 1]
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        with torch.no_grad():
            expected.append(float(own(ids, labels=ids).loss))
        targets.append(ids.shape[1] - 1)
        size += len(text.encode()) - len(tokenizer.decode(ids[0, :1], skip_special_tokens=True).encode())
    assert zero_shot["item_losses"] == pytest.approx(expected, rel=1e-3)
    assert shown["shots"] == 1
    assert shown["item_losses"] != zero_shot["item_losses"]
    for record in records:  # the same tokens and bytes, whatever stands before them
        nats = sum(loss * count for loss, count in zip(record["item_losses"], targets, strict=True))
        assert record["bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-4)
    assert len({first_order["loss"], trained["loss"], zero_shot["loss"]}) == 3
    for record in records:
        assert (record["accuracy"], record["majority"], record["correct"]) == (None, None, None)
    lines = markdown(records).splitlines()
    assert any(line.startswith("| method | text | rank |") for line in lines)
    told = f"{zero_shot['loss']:.3f}; {zero_shot['bits_per_byte']:.3f} bits per byte"
    assert f"| zero-shot | ({told}) |" in markdown(records)
    # What was measured before bits were has none to tell.
    del zero_shot["bits_per_byte"]
    assert f"| zero-shot | ({zero_shot['loss']:.3f}) |" in markdown(records)


def test_a_task_with_too_little_is_refused_before_any_cell(sweep_file: Path, tmp_path: Path) -> None:
    rows = [json.dumps({"text": f"Sentence {n}.", "group": "one person"}) + "\n" for n in range(40)]
    (tmp_path / "own.jsonl").write_text("".join(rows))
    sweep_file.write_text(sweep_file.read_text() + '[tasks.text]\ntrain = "own.jsonl"\n')
    told: list[object] = []
    with pytest.raises(
        InputError, match=r"^text: expected examples .*40 examples in 1 groups in .*own\.jsonl"
    ):
        run_sweep(read_sweep(sweep_file), tmp_path / "results.jsonl", lambda *_: told.append(_))
    assert not told


def test_a_results_file_that_was_edited_is_refused_with_its_line(sweep_file: Path, tmp_path: Path) -> None:
    sweep_file.write_text(sweep_file.read_text().replace('"zero-shot", "icl:1", ', '"zero-shot"]\n#'))
    results = tmp_path / "results.jsonl"
    run_sweep(read_sweep(sweep_file), results, lambda *_: None)
    header, *others, cell = results.read_text().splitlines(keepends=True)
    for name, value in (
        ("loss", None),
        ("loss", math.nan),
        ("accuracy", "50"),
        ("accuracy", None),
        ("majority", "x"),
        ("cut_examples", "x"),
        ("bits_per_byte", "x"),
        ("model", "another"),
    ):
        edited = json.dumps(json.loads(cell) | {name: value}) + "\n"
        results.write_text("".join([header, *others, edited]))
        with pytest.raises(InputError, match=f"expected a result in line {len(others) + 2} of "):
            run_sweep(read_sweep(sweep_file), results, lambda *_: None)
    results.write_text("".join([header, *others, cell]))
    run_sweep(read_sweep(sweep_file), results, lambda *_: None)


def test_notes_of_a_method_are_told_by_task() -> None:
    base: dict[str, Any] = {
        "model": "m",
        "base": "bf16",
        "seed": 0,
        "loss": 1.0,
        "on_edge": False,
        "shots": 0.0,
    }
    base |= {"items": ["a", "b", "c"], "cut_examples": 0}
    text = base | {"task": "text", "accuracy": None, "majority": None}
    other = base | {"task": "wsc", "accuracy": 0.5, "majority": 0.5}
    records = [
        line | {"method": method} | changed
        for method, shots in (("zero-shot", 0.0), ("icl:4", 1.5))
        for line, changed in ((text, {"cut_examples": 2, "shots": shots}), (other, {}))
    ]
    again = [record | {"seed": 1} for record in records]
    table = markdown([*records, *again])
    assert "| zero-shot (text: 2 of 3 cut) |" in table
    assert "| icl:4 (text: 1.5 shots fitted, text: 2 of 3 cut, wsc: 0.0 shots fitted) |" in table


COPA_SWEEP = """
models = ["{model}"]
corpus = "corpus.jsonl"
methods = ["zero-shot", "fo:sensitive-c4"]
bases = ["nf4"]
seeds = [0, 1]
fo_steps = 1
batch_size = 2
trials = 1
evaluations = 1
sizes = [20, 20, 22]
max_tokens = 32
corpus_sequences = 2
corpus_tokens = 32
[tasks.copa]
train = "copa.jsonl"
"""


def _bad_rows(results: Path) -> set[str]:
    lines = map(json.loads, results.read_text().splitlines())
    return {line["key"] for line in lines if line["kind"] == "bad-row"}


def _interrupt_at(cell: int) -> Callable[[int, int, str], None]:
    def progress(done: int, total: int, _: str) -> None:
        if done == cell:
            raise KeyboardInterrupt

    return progress


def test_an_answer_that_does_not_fit_is_a_bad_row_and_ends_nothing(sweep_file: Path) -> None:
    folder, answers = sweep_file.parent, ["it rained", "it was dark"]
    rows = [
        {"premise": f"The {word} road {n} was wet.", "question": "cause", "label": n % 2}
        | {"choice1": answers[0], "choice2": answers[1]}
        for n in range(9)
        for word in WORDS
    ]
    rows[5]["choice2"] = "it rained and it rained " * 9
    file = folder / "copa.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sweep_file.write_text(COPA_SWEEP.format(model=ROOT / "examples" / "model"))
    results = folder / "results.jsonl"
    records = run_sweep(read_sweep(sweep_file), results, lambda *_: None)
    bad = _bad_rows(results)
    assert len(bad) == 1
    assert min(bad).startswith("copa, model: copa.jsonl:6: expected 1 to")
    assert min(sum(record["examples"].values()) for record in records) == 61
    assert all("copa.jsonl:6" not in record["items"] for record in records)
    (folder / "short.toml").write_text(
        sweep_file.read_text().replace("sizes = [20, 20, 22]", "sizes = [40, 8, 22]")
    )
    short = folder / "short.jsonl"
    with pytest.raises(KeyboardInterrupt):
        run_sweep(read_sweep(folder / "short.toml"), short, _interrupt_at(1))
    run_sweep(read_sweep(folder / "short.toml"), short, lambda *_: None)
    whole = folder / "whole.jsonl"
    run_sweep(read_sweep(folder / "short.toml"), whole, lambda *_: None)
    assert _bad_rows(short) == _bad_rows(whole) == bad
    for row in rows:
        row["choice1"] = "it rained and it rained " * 9
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(InputError, match="fit 32 tokens, got 22 of 22"):
        run_sweep(read_sweep(sweep_file), folder / "others.jsonl", lambda *_: None)
    assert len(_bad_rows(folder / "others.jsonl")) == 22


class Stopped(Exception):  # noqa: N818 - an interruption
    """As a person would."""


def test_a_sweep_that_is_stopped_goes_on_and_ends_as_one_that_was_not(
    sweep_file: Path, tmp_path: Path
) -> None:
    sweep = read_sweep(sweep_file)

    def stop_at_three(done: int, total: int, _: str) -> None:
        if done == 3:
            raise Stopped

    results = tmp_path / "stopped.jsonl"
    with pytest.raises(Stopped):
        run_sweep(sweep, results, stop_at_three)
    with results.open("ab") as file:
        file.write(b'{"kind":"cell","key":"torn')
    told: list[tuple[int, int]] = []
    records = run_sweep(sweep, results, lambda done, total, _: told.append((done, total)))
    assert told[-1] == (6, 6)
    whole = run_sweep(sweep, tmp_path / "whole.jsonl", lambda *_: None)
    for record in (*records, *whole):
        del record["seconds"]
    assert records == whole
    assert [record["method"] for record in records] == [cell.method.name for cell in cells_of(sweep)]
    for record in records:
        assert len(record["correct"]) == len(record["items"]) == record["examples"]["test"]
        assert record["accuracy"] == record["correct"].count("1") / len(record["correct"])
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    assert [line["key"] for line in lines if line["kind"] == "bad-row"] == [
        "sst2: train.tsv:49: expected a sentence and a label, got 1 cells"
    ]
    # A method without training is the same before and after; trained ones have a curve.
    assert [record["curve"] is None for record in records] == [True, True, False, False, False, False]
    table = markdown(records)
    assert table.count("\n| zo:") == 3
    assert "| sst2? (" in table  # six items are too few to know


def test_one_process_at_a_time_writes_results(sweep_file: Path, tmp_path: Path) -> None:
    sweep, results = read_sweep(sweep_file), tmp_path / "results.jsonl"

    def another(done: int, total: int, _: str) -> None:
        with pytest.raises(RetryableError, match=r"the only sweep on .*results\.jsonl, got another one"):
            run_sweep(sweep, results, lambda *_: None)
        raise Stopped

    for _ in range(2):  # whoever stops lets the next one in
        with pytest.raises(Stopped):
            run_sweep(sweep, results, another)


def test_segments_keep_their_mask_and_are_plain_training_where_there_is_one(
    sweep_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The set that moves differs from its control by the mask alone."""
    text = sweep_file.read_text().replace('"nf4"', '"bf16"').replace("zo_steps = 4", "zo_steps = 6")
    text = text.replace("evaluations = 2", "evaluations = 3")
    names = ["zo:sensitive-task", "zo:sensitive-task-segments", "zo:sensitive-task-dynamic"]
    text = text.replace("methods = [", f"methods = {json.dumps(names)}\n#")
    masks: dict[str, list[dict[str, list[int]]]] = {}
    own = cells.Bench._mask

    def spied(bench: Any, cell: Any, *given: Any) -> Any:
        found = own(bench, cell, *given)
        assert found is not None
        masks.setdefault(cell.method.name, []).append({name: list(at) for name, at in found.items()})
        return found

    monkeypatch.setattr(cells.Bench, "_mask", spied)
    sweep_file.write_text(text)
    plain, fixed, moving = run_sweep(read_sweep(sweep_file), tmp_path / "three.jsonl", lambda *_: None)
    # Of the one trial and the run: a mask each, or one of each of three segments.
    assert [len(masks[name]) for name in names] == [2, 2, 6]
    assert masks[names[0]][-1] == masks[names[1]][-1] == masks[names[2]][-3]
    assert masks[names[2]][-3] != masks[names[2]][-1]
    assert len({record["loss"] for record in (plain, fixed, moving)}) == 3
    sweep_file.write_text(text.replace("refresh_steps = 2", "refresh_steps = 6"))
    results = run_sweep(read_sweep(sweep_file), tmp_path / "one.jsonl", lambda *_: None)
    assert len({json.dumps(record["curve"]) for record in results}) == 1
    assert len({record["loss"] for record in results}) == 1


def test_tuning_seeds_are_others_and_reported_runs_alone_begin_anew(
    sweep_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is trained, by whom and with which seed: every trial once, then the reported run."""
    text = sweep_file.read_text().replace("trials = 1", "trials = 3\ntuning_seeds = 3")
    methods = 'methods = ["zo:sensitive-c4", "zo:random-dynamic"]\n#'
    sweep_file.write_text(text.replace("methods = [", methods))
    runs: list[tuple[str, int, float]] = []

    def spied(name: str) -> Callable[..., Trained]:
        trained = getattr(cells, name)

        def run(*given: Any) -> Trained:
            runs.append((name, given[-1].seed, given[-1].step_factor))
            found: Trained = trained(*given)
            return found

        return run

    for name in ("train", "train_safely"):
        monkeypatch.setattr(cells, name, spied(name))
    record, moving = run_sweep(read_sweep(sweep_file), tmp_path / "results.jsonl", lambda *_: None)
    segments = 2  # of the set that is selected again; its seeds are further apart
    searched = runs[: runs.index(("train_safely", 0, record["tuned_step_factor"]))]
    assert {name for name, _, _ in searched} == {"train"}
    assert {seed for _, seed, _ in searched} == {tuning_seed(0) + n for n in range(3)}
    assert len(set(searched)) == len(searched)
    by_seed = [sum(seed == tuning_seed(0) + n for _, seed, _ in searched) for n in range(3)]
    assert min(by_seed) >= 2
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    search, other = (line for line in lines if line["kind"] == "tuning")
    assert [len(of_seed) for of_seed in search["runs"]] == by_seed
    assert search["losses"].items() <= {power: run[0] for power, run in search["runs"][0].items()}.items()
    assert search["medians"].keys() <= search["losses"].keys()
    factor = round(math.log(search["step_factor"], GRID_FACTOR))
    assert search["medians"][str(factor)] == min(search["medians"].values())
    shorter = [record["tuned_step_factor"] / GRID_FACTOR**n for n in range(record["attempts"])]
    assert record["step_factor"] in [pytest.approx(factor) for factor in shorter]
    after = runs[len(searched) + 1 :]
    assert {name for name, _, _ in after} == {"train"}
    assert [(seed, step) for _, seed, step in after[-segments:]] == [
        (0, moving["step_factor"]),
        (2 * 1_000_003, moving["step_factor"]),
    ]
    assert (moving["attempts"], moving["tuned_step_factor"]) == (1, other["step_factor"])


def test_seeds_that_are_added_leave_what_is_finished_as_it_is(sweep_file: Path, tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    three = sweep_file.read_text().replace('"icl:1", "zo:sensitive-c4", ', "").replace('"zo:lora-4", ', "")
    sweep_file.write_text(three.replace("seeds = [0]", "seeds = [0, 1, 2]"))
    run_sweep(read_sweep(sweep_file), results, lambda *_: None)
    before = results.read_bytes()
    sweep_file.write_text(sweep_file.read_text().replace("seeds = [0, 1, 2]", "seeds = [0, 1, 2, 3]"))
    records = run_sweep(read_sweep(sweep_file), results, lambda *_: None)
    assert results.read_bytes().startswith(before)
    assert len(before.splitlines()) < len(results.read_bytes().splitlines())
    whole = run_sweep(read_sweep(sweep_file), tmp_path / "whole.jsonl", lambda *_: None)
    for record in (*records, *whole):
        del record["seconds"]
    assert records == whole
    # Other seeds are another sweep: their tunings would not be these.
    sweep_file.write_text(sweep_file.read_text().replace("seeds = [0, 1, 2, 3]", "seeds = [1, 0, 2]"))
    with pytest.raises(InputError, match="another one"):
        run_sweep(read_sweep(sweep_file), results, lambda *_: None)


def test_results_of_another_sweep_are_refused(sweep_file: Path, tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    sweep_file.write_text(sweep_file.read_text().replace('"zero-shot", "icl:1", ', '"zero-shot"]\n#'))
    run_sweep(read_sweep(sweep_file), results, lambda *_: None)
    (tmp_path / "train.tsv").write_text((tmp_path / "train.tsv").read_text().replace("film", "play"))
    with pytest.raises(InputError, match="another one"):
        run_sweep(read_sweep(sweep_file), results, lambda *_: None)
    header, *rest = results.read_text().splitlines(keepends=True)
    for procedure in ({}, {"procedure": PROCEDURE + 1}):
        other = {key: value for key, value in json.loads(header).items() if key != "procedure"} | procedure
        results.write_text("".join([json.dumps(other, separators=(",", ":")) + "\n", *rest]))
        with pytest.raises(InputError, match=f"expected results of procedure {PROCEDURE}"):
            run_sweep(read_sweep(sweep_file), results, lambda *_: None)
    results.write_text('{"kind":"sweep"}\nnonsense\n')
    with pytest.raises(InputError, match="line 1"):
        run_sweep(read_sweep(sweep_file), results, lambda *_: None)


def test_the_command_prints_the_table_and_refuses_with_a_message(
    sweep_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep_file.write_text(sweep_file.read_text().replace('"zero-shot", "icl:1", ', '"zero-shot"]\n#'))
    assert main([str(sweep_file)]) == 0
    assert "| zero-shot |" in capsys.readouterr().out
    assert (tmp_path / "sweep.results.jsonl").exists()
    assert main([str(tmp_path / "absent.toml")]) == 3
    assert "expected a sweep as TOML" in capsys.readouterr().err
    # A full disk loses nothing.
    whole = (tmp_path / "sweep.results.jsonl").read_bytes()
    assert main([str(sweep_file), "--table", "/dev/full"]) == 1
    assert "No space left on device; all results are kept" in capsys.readouterr().err
    assert (tmp_path / "sweep.results.jsonl").read_bytes() == whole
    table = tmp_path / "new" / "table.md"
    assert main([str(sweep_file), "--table", str(table)]) == 0
    assert "| zero-shot |" in table.read_text()
    # What would lose results or end in nothing is refused at once.
    results = str(tmp_path / "sweep.results.jsonl")
    for own, message in (
        (["--table", results], "in different files"),
        (["--results", str(sweep_file)], "in different files"),
        (["--results", str(tmp_path)], "results in a file"),
        (["--results", "/dev/full"], "results in a file"),
        (["--table", str(tmp_path)], "table in a file"),
        (["--results", f"{sweep_file}/below.jsonl"], "a folder for"),
    ):
        assert main([str(sweep_file), *own]) == 3
        assert message in capsys.readouterr().err
    assert (tmp_path / "sweep.results.jsonl").read_bytes() == whole


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("zo_steps = 4", "zo_steps = 0", "zo_steps as an integer of at least 1"),
        ("zo_steps = 4", "zo_step = 4", "expected keys of"),
        ('bases = ["nf4"]', 'bases = ["nf3"]', "bases of float32"),
        ("seeds = [0]", "seeds = [2000000]", "seeds from 0"),
        ("trials = 1", "trials = 2", "odd number"),
        ("sizes = [8, 4, 6]", "sizes = [8, 4]", "train, validation and test"),
        ('corpus = "corpus.jsonl"', 'corpus = "absent.jsonl"', "corpus to exist"),
        ("[tasks.sst2]", "[tasks.sst3]", "tasks of sst2"),
        ('train = "train.tsv"', 'train = "train.tsv"\nvalid = "x"', "train and perhaps test"),
        ('estimator = "forward"', 'estimator = "exact"', "estimator of spsa"),
        ('estimator = "forward"', 'estimator = "split"', "without blocks"),
        ("queries = 2", "density = 2.0", "density as a number above 0"),
        ("max_tokens = 48", "max_tokens = 4096", "max_tokens of at most the .* positions of model, got 4096"),
        ("corpus_tokens = 32", "corpus_tokens = 4096", "corpus_tokens of at most the"),
        ('"zo:lora-4"', '"zo:lora"', "lora-<rank>"),
        ("seeds = [0]", "seeds = [0, 0]", "one or more of seeds, each once"),
        (str(ROOT / "examples" / "model"), str(ROOT / "docs"), "config.json and tokenizer.json"),
    ],
)
def test_a_wrong_sweep_is_refused(sweep_file: Path, old: str, new: str, message: str) -> None:
    text = sweep_file.read_text()
    assert old in text
    sweep_file.write_text(text.replace(old, new))
    with pytest.raises(InputError, match=message):
        read_sweep(sweep_file)


def outcome(method: str, correct: str, *, seed: int = 0, validation_loss: float = 1.0) -> dict[str, object]:
    return {
        "method": method,
        "seed": seed,
        "items": [str(n) for n in range(len(correct))],
        "correct": correct,
        "accuracy": correct.count("1") / len(correct),
        "majority": 0.5,
        "validation_loss": validation_loss,
    }


def right(number: int, of: int = 400) -> str:
    return "1" * number + "0" * (of - number)


def test_a_task_counts_only_where_first_order_training_clearly_gains() -> None:
    zero_shot = {("zero-shot", "sst2"): [outcome("zero-shot", right(210))]}
    assert countable(zero_shot | {("fo:full", "sst2"): [outcome("fo:full", right(300))]}, "sst2")
    assert countable(zero_shot | {("fo:full", "sst2"): [outcome("fo:full", right(225))]}, "sst2") is False
    assert countable({("fo:full", "sst2"): [outcome("fo:full", right(300))]}, "sst2") is None
    few = {
        ("zero-shot", "sst2"): [outcome("zero-shot", "00")],
        ("fo:full", "sst2"): [outcome("fo:full", "11")],
    }
    assert countable(few, "sst2") is None


def test_the_first_order_method_is_chosen_by_validation_not_by_its_test_items() -> None:
    lucky = {
        ("zero-shot", "sst2"): [outcome("zero-shot", right(210))],
        ("fo:full", "sst2"): [outcome("fo:full", right(225), validation_loss=0.5)],
        ("fo:lora-8", "sst2"): [outcome("fo:lora-8", right(300), validation_loss=0.9)],
    }
    assert not countable(lucky, "sst2")


def test_seeds_are_averaged_item_by_item() -> None:
    first = [outcome("a", "110", seed=0), outcome("a", "100", seed=1)]
    one_N, other_N, cluster_N = paired(first, [outcome("b", "011")])
    assert one_N.tolist() == [1.0, 0.5, 0.0]
    assert other_N.tolist() == [0.0, 1.0, 1.0]
    assert len(set(cluster_N.tolist())) == 3
    # One record that names the passages is enough, whichever it is.
    named = outcome("b", "011") | {"groups": ["p", "p", "q"]}
    assert paired(first, [named])[2].tolist() == ["p", "p", "q"]
    assert paired([first[0], first[1] | {"groups": ["p", "p", "q"]}], [outcome("b", "011")])[2].tolist() == [
        "p",
        "p",
        "q",
    ]
    twice = outcome("b", "01") | {"items": ["x", "x"]}
    with pytest.raises(InputError, match="twice"):
        paired(first, [twice])


@pytest.mark.parametrize(
    "content", [b"keep me", b"line\nno newline", b"x" * 1000, b'{"kind":"sweep"}\nlost', b"[]\n{"]
)
def test_a_file_that_is_no_results_is_refused_and_left_as_it_is(
    content: bytes, sweep_file: Path, tmp_path: Path
) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(InputError, match="expected"):
        run_sweep(read_sweep(sweep_file), path, lambda *_: None)
    assert path.read_bytes() == content


def test_a_first_line_that_was_torn_is_written_again(sweep_file: Path, tmp_path: Path) -> None:
    sweep_file.write_text(sweep_file.read_text().replace('"zero-shot", "icl:1", ', '"zero-shot"]\n#'))
    path = tmp_path / "results.jsonl"
    run_sweep(read_sweep(sweep_file), path, lambda *_: None)
    whole = path.read_bytes()
    path.write_bytes(whole[:20])
    run_sweep(read_sweep(sweep_file), path, lambda *_: None)
    assert path.read_bytes().splitlines()[0] == whole.splitlines()[0]


def test_the_operators_command_runs_a_sweep_and_tells_refusals(
    sweep_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from service.cli.main import main as permille

    sweep_file.write_text(sweep_file.read_text().replace('"zero-shot", "icl:1", ', '"zero-shot"]\n#'))
    table = tmp_path / "table.md"
    assert permille(["evaluate", str(sweep_file), "--table", str(table)]) == 0
    assert "| zero-shot |" in table.read_text()
    whole = sweep_file.read_text()
    sweep_file.write_text("models = 3")
    assert permille(["evaluate", str(sweep_file)]) == 3
    assert "expected corpus, methods, tasks" in capfd.readouterr().err
    with (tmp_path / "sweep.results.jsonl").open("ab") as busy:
        fcntl.flock(busy, fcntl.LOCK_EX)
        sweep_file.write_text(whole)
        assert permille(["evaluate", str(sweep_file)]) == 5
    assert "to be the only sweep on" in capfd.readouterr().err
    assert permille(["evaluate", str(tmp_path / "absent.toml")]) == 2


def test_a_signal_whose_exception_was_lost_ends_the_sweep_at_the_next_cell(
    sweep_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setattr(command, "_told_to_end", [])
    run = cells.Bench.run

    def losing(*given: Any) -> Any:
        with contextlib.suppress(KeyboardInterrupt):
            command._interrupt(signal.SIGTERM, None)
        return run(*given)

    monkeypatch.setattr(cells.Bench, "run", losing)
    try:
        assert main([str(sweep_file)]) == 130
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    told = capsys.readouterr().err
    assert "[0/6]" in told and "[1/6]" not in told
    assert "keeps what is done" in told


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_operators_command_takes_its_process_with_it(number: signal.Signals, sweep_file: Path) -> None:
    """To the end of its standard error, which the process that measures holds as well."""
    code = "import sys; from service.cli.main import main; sys.exit(main(sys.argv[1:]))"
    arguments = [sys.executable, "-c", code, "evaluate", str(sweep_file)]
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("[1/"):
                break
        process.send_signal(number)  # to it alone, as no terminal does
        _, told = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted; " in told
    assert "[6/6]" not in told

"""Tests of whole sweeps on the example model: tasks, searches, and refusals before the start."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from permille.errors import InputError
from permille_lab.evaluate import cells
from permille_lab.evaluate.command import _evaluated
from permille_lab.evaluate.report import markdown
from permille_lab.evaluate.specification import read_sweep
from permille_lab.evaluate.sweep import CellsFailedError, run_sweep
from permille_lab.evaluate.training import Trained
from permille_lab.evaluate.tuning import GRID_FACTOR, tuning_seed
from tests.sweep_files import EXAMPLE_MODEL, ROOT, WORDS
from tests.tiny_model import spoil_weights

TEXT_SWEEP = """
models = ["{model}"]
corpus = "corpus.jsonl"
methods = ["zero-shot", "icl:1", "fo:lora-2", "zo:sensitive-c4"]
bases = ["bf16"]
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
[tasks.text]
train = "text.json"
"""


@pytest.mark.slow
def test_language_modelling_has_the_losses_of_transformers_and_no_accuracy(sweep_file: Path) -> None:
    folder, model = sweep_file.parent, EXAMPLE_MODEL
    texts = [f"The {word} house stands in town {n}." for n in range(3) for word in WORDS]
    rows = [json.dumps({"text": text, "group": f"person {n % 12}"}) + "\n" for n, text in enumerate(texts)]
    (folder / "text.json").write_text("".join(rows))
    sweep_file.write_text(TEXT_SWEEP.format(model=model))
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
    for record in records:  # the same target tokens and bytes, regardless of the text before them
        nats = sum(loss * count for loss, count in zip(record["item_losses"], targets, strict=True))
        assert record["bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-4)
    assert len({first_order["loss"], trained["loss"], zero_shot["loss"]}) == 3
    for record in records:
        assert [record[name] for name in ("accuracy", "majority", "correct", "prior_loss")] == [None] * 4
    lines = markdown(records).splitlines()
    assert any(line.startswith("| method | text | rank |") for line in lines)
    told = f"{zero_shot['loss']:.3f}; {zero_shot['bits_per_byte']:.3f} bits per byte"
    assert f"| zero-shot | ({told}) |" in markdown(records)
    # Older results have no bits per byte.
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


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ('{"body": "x"}\nno JSON\n', r"2 of 2 rows are broken.*: 1 no-text-field .*, 1 not-json"),
        ("", r"0 rows \(none\) in .*corpus\.jsonl"),
    ],
)
def test_a_corpus_without_text_is_refused_before_any_cell(
    sweep_file: Path, tmp_path: Path, content: str, told: str
) -> None:
    (tmp_path / "corpus.jsonl").write_text(content)
    begun: list[object] = []
    with pytest.raises(InputError, match=told):
        run_sweep(read_sweep(sweep_file), tmp_path / "results.jsonl", lambda *_: begun.append(_))
    assert not begun


def _not_a_number(model: Path) -> Path:
    """Return a copy of the example model with a NaN weight."""
    shutil.copytree(EXAMPLE_MODEL, model)
    spoil_weights(model)
    return model


def test_a_damaged_model_takes_nothing_from_the_others(
    sweep_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The damaged model comes first. The table of the good one is still printed.

    After a repair, the same results file is completed.
    """
    damaged = _not_a_number(tmp_path / "damaged")
    text = sweep_file.read_text().replace("models = [", f'models = ["{damaged}", ')
    sweep_file.write_text(text.replace('"zero-shot", "icl:1", ', '"zero-shot", "icl:1"]\n#'))
    results = tmp_path / "results.jsonl"
    with pytest.raises(CellsFailedError, match=r"of 4 cells, got 2, which are kept; damaged/.* and 1 more: "):
        run_sweep(read_sweep(sweep_file), results, lambda *_: None)
    capsys.readouterr()
    assert _evaluated(sweep_file, results, None) == 3
    printed = capsys.readouterr()
    assert "## model, nf4" in printed.out and "## damaged" not in printed.out
    told = printed.out.partition("could not be measured:\n\n- expected ")[2]
    assert told.rstrip().endswith(": damaged/nf4/zero-shot/sst2/0, damaged/nf4/icl:1/sst2/0")
    assert "damaged/" in printed.err and "keeps what is done" in printed.err


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


@pytest.mark.slow
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
    sweep_file.write_text(COPA_SWEEP.format(model=EXAMPLE_MODEL))
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
    # More than the 22 test rows, because the cells of both seeds were tried.
    assert 22 < len(_bad_rows(folder / "others.jsonl")) <= len(rows)


@pytest.mark.slow
def test_segments_keep_their_mask_and_are_plain_training_where_there_is_one(
    sweep_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The moving set differs from its control only in the mask."""
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
    # One mask per run, because a single trial needs no search. The moving set has three, one per segment.
    assert [len(masks[name]) for name in names] == [1, 1, 3]
    assert masks[names[0]][-1] == masks[names[1]][-1] == masks[names[2]][-3]
    assert masks[names[2]][-3] != masks[names[2]][-1]
    assert len({record["loss"] for record in (plain, fixed, moving)}) == 3
    sweep_file.write_text(text.replace("refresh_steps = 2", "refresh_steps = 6"))
    results = run_sweep(read_sweep(sweep_file), tmp_path / "one.jsonl", lambda *_: None)
    assert len({json.dumps(record["curve"]) for record in results}) == 1
    assert len({record["loss"] for record in results}) == 1


@pytest.mark.slow
def test_tuning_seeds_are_others_and_reported_runs_alone_begin_anew(
    sweep_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every trial trains once with each tuning seed. Then the reported run trains with its own seed."""
    text = sweep_file.read_text().replace("trials = 1", "trials = 3\ntrial_steps = 2\ntuning_seeds = 3")
    methods = 'methods = ["zo:sensitive-c4", "zo:random-dynamic"]\n#'
    sweep_file.write_text(text.replace("methods = [", methods))
    runs: list[tuple[str, int, float]] = []
    lengths: list[int] = []

    def spied(name: str) -> Callable[..., Trained]:
        trained = getattr(cells, name)

        def run(*given: Any) -> Trained:
            recipe = given[3]
            runs.append((name, recipe.seed, recipe.step_factor))
            lengths.append(recipe.steps)
            found: Trained = trained(*given)
            return found

        return run

    for name in ("train", "train_safely"):
        monkeypatch.setattr(cells, name, spied(name))
    record, moving = run_sweep(read_sweep(sweep_file), tmp_path / "results.jsonl", lambda *_: None)
    segments = 2  # of the method that selects its mask again, with seeds far apart
    searched = runs[: runs.index(("train_safely", 0, record["tuned_step_factor"]))]
    assert {name for name, _, _ in searched} == {"train"}
    assert set(lengths[: len(searched)]) == {2} and lengths[len(searched)] == 4
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


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("zo_steps = 4", "zo_steps = 0", "zo_steps: .*greater than or equal to 1, got 0"),
        ("zo_steps = 4", "zo_steps = true", "zo_steps: .*valid integer, got True"),
        ("zo_steps = 4", "zo_step = 4", "zo_step: Extra inputs"),
        ('corpus = "corpus.jsonl"', "", "corpus: Field required"),
        ('bases = ["nf4"]', 'bases = ["nf3"]', "bases.0: .*'float32'.*, got 'nf3'"),
        ("seeds = [0]", "seeds = [2000000]", "seeds.0: .*less than 1000000"),
        ("trials = 1", "trials = 2", "odd number of trials, got 2"),
        ("sizes = [8, 4, 6]", "sizes = [8, 4]", "sizes.2: Field required"),
        ('corpus = "corpus.jsonl"', 'corpus = "absent.jsonl"', "corpus: expected it to exist, got .*absent"),
        ("[tasks.sst2]", "[tasks.sst3]", "tasks.sst3"),
        ('train = "train.tsv"', 'train = "train.tsv"\nvalid = "x"', "valid: Extra inputs"),
        ('estimator = "forward"', 'estimator = "exact"', "estimator: .*'spsa'"),
        ('estimator = "forward"', 'estimator = "split"', "without blocks"),
        ("queries = 2", "density = 2.0", "density: .*less than or equal to 1"),
        ("max_tokens = 48", "max_tokens = 4096", "max_tokens of at most the .* positions of model, got 4096"),
        ("corpus_tokens = 32", "corpus_tokens = 4096", "corpus_tokens of at most the"),
        ('"zo:lora-4"', '"zo:lora"', "lora-<rank>"),
        ("seeds = [0]", "seeds = [0, 0]", "seeds: expected one or more, each once"),
        ("seeds = [0]", "seeds = []", "seeds: expected one or more"),
        (str(EXAMPLE_MODEL), str(ROOT / "docs"), "config.json and tokenizer.json"),
    ],
)
def test_a_wrong_sweep_is_refused(sweep_file: Path, old: str, new: str, message: str) -> None:
    text = sweep_file.read_text()
    assert old in text
    sweep_file.write_text(text.replace(old, new))
    with pytest.raises(InputError, match=message):
        read_sweep(sweep_file)

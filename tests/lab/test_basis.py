"""Tests of the comparison of a basis with groups, and of its page."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from permille.choices import EstimatorKind
from permille.engines.light.engine import LightEngine
from permille.package.basis import Basis, write_basis
from permille.package.build import write_manifest
from permille.package.reader import Package
from permille.training.reference import MEASURING_QUESTIONS, Reference, make_reference
from permille_agent.embed import (
    TrainOptions,
    batch_of,
    mean_loss,
    package_tokenizer,
    prepare,
    read_documents,
)
from permille_lab.learning.runs import TextRun
from permille_lab.measuring.cells import Cells
from permille_lab.real.basis import General, measure
from permille_lab.real.basis_page import BASIS, BETTER, GRADIENT, GROUPS, THEN, passes_of, tables
from tests.packages import TINY_LLAMA, tiny_package
from tests.unit.edge_agent.runs import user_text


class Chat:
    """A chat template that adds nothing to a question, which is any three tokens."""

    def prompt(self, question: str) -> NDArray[np.int64]:
        """Return tokens that depend on the question's length."""
        return np.arange(3, 6, dtype=np.int64) + len(question) % 7

    def stop_ids(self) -> frozenset[int]:
        """Return no token, so each answer has the greatest length."""
        return frozenset()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TextRun:
    """Return a run with a reference, and a basis of two random columns."""
    folder = tmp_path_factory.mktemp("basis")
    bare = tiny_package(folder / "blobs")
    columns_RK = np.random.default_rng(0).choice(np.array([-127, 127], np.int8), (2, bare.k))
    text_NT = np.random.default_rng(1).integers(3, TINY_LLAMA["vocab_size"], (4, 12))
    manifest = make_reference(bare, text_NT=text_NT, chat=Chat(), made={})
    layer = write_basis(bare.blobs, Basis(columns_RK=columns_RK, reach=0.5, length=0.5))
    package = Package.open(bare.blobs, write_manifest(bare.blobs, manifest.with_part(layer, {})))
    documents, _ = read_documents([user_text(folder)])
    prepared = prepare(documents, package_tokenizer(package), row_tokens=32)
    return TextRun(package=package, engine=LightEngine(package), prepared=prepared, seed=0)


@pytest.fixture(scope="module")
def general(run: TextRun) -> General:
    """Return the measures, with the text that selects as general text."""
    return General(run.package, [batch_of(run.prepared.select)], 1)


def test_a_cell_is_a_run_of_the_agent_and_leaves_no_files(
    run: TextRun, general: General, tmp_path: Path
) -> None:
    options = TrainOptions.of(EstimatorKind.ONE_SIDED, steps=5)
    found = measure(run, options, run.package.values(), general, tmp_path / "run")
    assert found["curve"][0] == [0, found["before"]]
    assert found["curve"][-1][0] == 5
    assert found["after"] == pytest.approx(min(loss for _, loss in found["curve"]))
    assert found["general"] == pytest.approx([found["before"], found["after"]]), "the same text judges both"
    assert not (tmp_path / "run").exists()


def test_a_better_base_is_judged_as_it_is(run: TextRun, general: General, tmp_path: Path) -> None:
    better_K = 1.5 * run.package.values()
    found = measure(run, None, better_K, general, tmp_path / "run")
    assert found["curve"] == []
    assert found["after"] == mean_loss(run.engine, better_K, run.prepared.select)


def test_chats_are_judged_by_turns_that_pull_no_step(run: TextRun, general: General) -> None:
    found = general.of(1.5 * run.package.values())
    reference = Reference.of(run.package)
    assert reference is not None
    turns = reference.texts(pulls=False, chat=True)
    assert len(turns) == len(MEASURING_QUESTIONS)
    losses = [run.engine.losses(run.package.values()[None], turn)[0] for turn in turns]
    assert found["chat"][0] == pytest.approx(np.mean(losses), rel=1e-4)
    assert found["chat"][1] > found["chat"][0], "the base's own answers are its likeliest"


def test_passes_are_those_of_the_columns_and_of_the_groups() -> None:
    assert passes_of(GROUPS, 8) == 8 * 2 * 16
    assert passes_of(BASIS, 4) == 4 * 2 * 8
    assert passes_of(GRADIENT, 12) == 12 * 4 * 3
    assert passes_of(BETTER, 0) == 0
    assert passes_of(THEN, 8) == 4 * 2 * 8 + 4 * 2 * 16


def test_the_page_counts_the_texts_on_which_groups_need_more_passes(tmp_path: Path) -> None:
    cells = Cells(tmp_path / "basis.jsonl")
    for text, basis in {"one": 0.12, "two": 0.30, "three": 0.05, "four": 0.20}.items():
        for method, fall in ((GROUPS, 0.20), (BASIS, basis)):
            for seed in (0, 1):
                before = 5.0 + 0.01 * (seed - 0.5)
                curve = [[0, before], [4, 4.9], [6, 4.95], [8, 4.8]]
                lost = "one is lost" if text == "two" and method == BASIS else ""
                cells.keep(
                    "basis",
                    {"person": text, "method": method, "steps": 8 if method == GROUPS else 4, "seed": seed},
                    {"before": before, "after": 5.0 - fall, "curve": curve, "general": [4.0, 3.9]}
                    | {"chat": [1.0, 1.2], "fault": lost, "cpu_s": 2.0},
                )
    cells.keep(
        "basis",
        {"person": "alone", "method": BASIS, "steps": 4, "seed": 0},
        {"before": 5.0, "after": 4.9, "general": [4.0, 4.0], "chat": [1.0, 1.0], "fault": "", "cpu_s": 1.0},
    )
    then = {
        "before": 5.0,
        "after": 4.85,
        "general": [4.0, 4.0],
        "chat": [1.0, 1.1],
        "fault": "",
        "cpu_s": 1.0,
    }
    cells.keep("basis", {"person": "one", "method": THEN, "steps": 8, "seed": 0}, then)
    found = tables(tmp_path)
    assert (found["ahead"], found["later"]) == ("2", "0.04 to 0.04")
    # The best checkpoints of groups fall by 0.1 in 128 passes and in 192, and by 0.2 in 256.
    assert (found["texts"], found["won"]) == ("4", "2")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in found["falls"].splitlines()]
    assert rows[0] == ["text", "basis, 64", "basis, then groups, 192", "groups, 256", "ratio"]
    assert rows[2] == ["one", "0.120 (0.115 to 0.125)", "0.150", "0.200 (0.195 to 0.205)", "3.2"]
    assert [row[-1] for row in rows[3:]] == ["> 4", "1.0", "4.0", ""]
    methods = [[cell.strip() for cell in line.split("|")[1:-1]] for line in found["methods"].splitlines()]
    expected = ["basis", "64", "9", "0.154", "0.050", "-0.080", "+0.160", "+0.200", "1.0", "two (2)", "2"]
    assert methods[2] == expected

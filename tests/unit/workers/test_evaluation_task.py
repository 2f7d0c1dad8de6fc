"""The evaluation job on a tiny random model: found, resumed, refused."""

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from permille.store import claims, corpora, evaluations, jobs, models
from permille.store.database import Database
from permille.store.tables import Evaluation, Job, Model
from permille_lab.evaluate import sweep as sweeps
from permille_lab.evaluate.__main__ import main as evaluate
from permille_lab.evaluate.cells import Bench as SweepBench
from permille_lab.evaluate.outcomes import Cell, Outcome
from permille_lab.evaluate.specification import Sweep
from permille_workers.child import attempt
from permille_workers.context import Progress
from permille_workers.tasks import TASKS
from permille_workers.work_folders import remove_ended
from tests.tiny_model import spoil_weights, write_sst2
from tests.unit.workers.conftest import Bench, save_model
from tests.unit.workers.test_tasks import failed, succeeded

SMALL: dict[str, Any] = {
    "methods": ["zero-shot", "zo:random", "fo:sensitive-c4"],
    "bases": ["nf4"],
    "seeds": [0],
    "density": 0.01,
    "zo_steps": 2,
    "fo_steps": 1,
    "queries": 1,
    "batch_size": 2,
    "trials": 1,
    "evaluations": 1,
    "sizes": [8, 4, 6],
    "max_tokens": 32,
    "corpus_sequences": 2,
    "corpus_tokens": 16,
}
UNTRAINED = ["zero-shot", "icl:1", "icl:2"]
TASK = {"sst2": {"train": "sst2/train.tsv", "test": None}}


class Killed(BaseException):
    """Ends an attempt as nothing that it catches does."""


def payload_of(bench: Bench, **changes: Any) -> dict[str, Any]:
    write_sst2(bench.root / "corpora" / "sst2" / "train.tsv")
    return {
        "model_ids": [bench.model.id],
        "corpus_id": bench.corpus.id,
        "tasks": TASK,
        **SMALL,
        **changes,
    }


def evaluation_of(bench: Bench, job: Job) -> Evaluation:
    assert succeeded(job).result_kind == "evaluation"
    with bench.db.read() as session:
        return evaluations.get(session, tenant_id=bench.tenant_id, evaluation_id=str(job.result_id))


def lines_of(bench: Bench, evaluation: Evaluation) -> list[dict[str, Any]]:
    content = bench.blobs.read(evaluation.results_digest, limit=1 << 24)
    assert len(content) == evaluation.size_bytes
    return [json.loads(line) for line in content.splitlines()]


def spied(monkeypatch: pytest.MonkeyPatch, before: Callable[[int], None] = lambda _: None) -> list[str]:
    """The keys of the cells that run from now on; `before` is told how many there were."""
    seen: list[str] = []
    original = SweepBench.run

    def run(self: SweepBench, cell: Cell, seed: int, step_factor: float | None) -> Outcome:
        before(len(seen))
        seen.append(cell.key)
        return original(self, cell, seed, step_factor)

    monkeypatch.setattr(SweepBench, "run", run)
    return seen


def first_attempt(bench: Bench, **changes: Any) -> Job:
    """Claim a job and run it until something stops it."""
    with bench.db.write() as session:
        job = jobs.submit(
            session, tenant_id=bench.tenant_id, kind="evaluation", payload=payload_of(bench, **changes)
        )
        claim = claims.claim(session, worker="first", lease_s=600)
    assert claim is not None
    try:
        attempt(TASKS, bench.db, claim, bench.settings)
    except Killed:
        with bench.db.write() as session:
            claims.release(session, claim)
    return bench.read(job)


def test_an_evaluation_keeps_results_tables_and_where_they_come_from(bench: Bench) -> None:
    evaluation = evaluation_of(bench, bench.finish("evaluation", payload_of(bench)))
    cells = [line for line in lines_of(bench, evaluation) if line["kind"] == "cell"]
    assert [cell["method"] for cell in cells] == SMALL["methods"]
    assert {cell["model"] for cell in cells} == {"tiny"}
    assert (evaluation.cells, evaluation.bad_rows) == (3, 1)
    table = bench.blobs.read(evaluation.report_digest, limit=1 << 20).decode()
    assert table.startswith("## tiny, nf4") and "| zo:random" in table
    assert evaluation.provenance["models"][0]["digest"].startswith("sha256:")
    assert set(evaluation.provenance["tasks"]) == {"sst2.train"}
    assert evaluation.options["tasks"] == {"sst2": {"train": "sst2/train.tsv"}}
    with bench.db.read() as session:
        assert evaluations.model_ids_of(session, evaluation=evaluation) == [bench.model.id]


def test_the_job_finds_what_the_command_finds(bench: Bench, tmp_path: Path) -> None:
    evaluation = evaluation_of(bench, bench.finish("evaluation", payload_of(bench)))
    choices = "".join(f"{name} = {json.dumps(value)}\n" for name, value in SMALL.items())
    sweep = bench.root / "sweep.toml"
    sweep.write_text(
        f'models = ["models/tiny"]\ncorpus = "corpora/rows.jsonl"\n{choices}'
        '[tasks.sst2]\ntrain = "corpora/sst2/train.tsv"\n'
    )
    results, table = tmp_path / "results.jsonl", tmp_path / "table.md"
    assert evaluate([str(sweep), "--results", str(results), "--table", str(table)]) == 0
    ours, theirs = lines_of(bench, evaluation), list(map(json.loads, results.read_text().splitlines()))
    for line in (*ours, *theirs):
        line.pop("seconds", None)
    assert ours == theirs  # also the first line: it is the same sweep
    assert bench.blobs.read(evaluation.report_digest, limit=1 << 20).decode() == table.read_text()


def test_a_stopped_attempt_is_taken_up_after_its_last_cell(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(done: int) -> None:
        if done == 2:
            raise Killed

    with monkeypatch.context() as patched:
        before = spied(patched, stop)
        job = first_attempt(bench, methods=UNTRAINED)
    assert (job.state, len(before)) == ("queued", 2)
    (results,) = (bench.root / "work" / "jobs" / job.id).glob("results-*.jsonl")
    with results.open("ab") as file:
        file.write(b'{"kind":"cell","key":"torn')
    told: list[float] = []
    original = Progress.__call__

    def spy(progress: Progress, fraction: float, message: str) -> None:
        told.append(fraction)
        original(progress, fraction, message)

    monkeypatch.setattr(Progress, "__call__", spy)
    after = spied(monkeypatch)
    bench.run_queued()
    evaluation = evaluation_of(bench, bench.read(job))
    assert len(after) == 1 and not set(after) & set(before)
    cells = [line["key"] for line in lines_of(bench, evaluation) if line["kind"] == "cell"]
    assert cells == before + after
    assert told == sorted(told)  # and not from 0: the time left is told by the pace of this attempt
    assert told[0] == pytest.approx(0.99 * 2 / 3)


def test_progress_counts_cells_and_names_the_one_that_runs(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[float, str]] = []

    def spy(_: object, fraction: float, message: str) -> None:
        told.append((fraction, message))

    monkeypatch.setattr("permille_workers.context.Progress.__call__", spy)
    succeeded(bench.finish("evaluation", payload_of(bench, methods=UNTRAINED)))
    messages = [message for _, message in told]
    assert messages[-4:] == [
        *(f"cell {n}/3 tiny/nf4/{m}/sst2/0" for n, m in enumerate(UNTRAINED, 1)),
        "reporting",
    ]
    shares = [fraction for fraction, _ in told]
    assert shares == sorted(shares) and shares[-1] < 1


def test_a_cancelled_evaluation_stops_between_cells_and_goes_on_when_it_is_retried(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cancel(done: int) -> None:
        if done == 1:
            with bench.db.write() as session:
                (job,) = jobs.list_jobs(session, tenant_id=bench.tenant_id, kind="evaluation").items
                jobs.request_cancel(session, tenant_id=bench.tenant_id, job_id=job.id)

    # Progress writes at most once a second; here it must not pass over the cancel.
    monkeypatch.setattr("permille_workers.context.REPORT_EVERY_S", 0.0)
    with monkeypatch.context() as patched:
        before = spied(patched, cancel)
        job = first_attempt(bench, methods=UNTRAINED)
    assert (job.state, len(before)) == ("cancelled", 2)
    assert remove_ended(bench.db, bench.settings.work_root) == []
    with bench.db.read() as session:
        assert not evaluations.list_evaluations(session, tenant_id=bench.tenant_id).items
    with bench.db.write() as session:
        jobs.retry(session, tenant_id=bench.tenant_id, job_id=job.id)
    after = spied(monkeypatch)
    bench.run_queued()
    assert evaluation_of(bench, bench.read(job)).cells == 3
    assert len(after) == 1


def test_the_folder_of_an_ended_evaluation_is_removed_in_time(bench: Bench) -> None:
    done = succeeded(bench.finish("evaluation", payload_of(bench, methods=["zero-shot"])))
    refused = bench.finish("evaluation", payload_of(bench, methods=["nonsense"]))
    assert refused.state == "failed"
    assert remove_ended(bench.db, bench.settings.work_root) == [done.id]
    later = Database(bench.db.url, clock=lambda: datetime.now(UTC) + timedelta(days=7, minutes=1))
    assert remove_ended(later, bench.settings.work_root) == [refused.id]
    later.close()


def test_cells_of_changed_task_files_are_not_mixed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(done: int) -> None:
        if done == 2:
            raise Killed

    with monkeypatch.context() as patched:
        spied(patched, stop)
        job = first_attempt(bench, methods=UNTRAINED)
    write_sst2(bench.root / "corpora" / "sst2" / "train.tsv", rows=30)
    after = spied(monkeypatch)
    bench.run_queued()
    evaluation = evaluation_of(bench, bench.read(job))
    assert len(after) == 3
    assert sum(line["kind"] == "cell" for line in lines_of(bench, evaluation)) == 3


def not_a_number(bench: Bench, name: str) -> Model:
    """A registered model with a weight that is none."""
    folder = bench.root / "models" / name
    save_model(folder, seed=1)
    spoil_weights(folder)
    with bench.db.write() as session:
        return models.register(session, tenant_id=bench.tenant_id, name=name, kind="folder", location=name)


def test_cells_that_cannot_be_measured_take_nothing_from_the_others(bench: Bench) -> None:
    damaged = [not_a_number(bench, name).id for name in ("damaged", "worse")]
    payload = payload_of(bench, model_ids=[*damaged, bench.model.id], methods=["zero-shot", "icl:1"])
    evaluation = evaluation_of(bench, bench.finish("evaluation", payload))
    assert (evaluation.cells, evaluation.failed_cells) == (2, 4)
    assert {line["model"] for line in lines_of(bench, evaluation) if line["kind"] == "cell"} == {"tiny"}
    table = bench.blobs.read(evaluation.report_digest, limit=1 << 20).decode()
    assert "## tiny, nf4" in table
    told = table.partition("could not be measured:")[2]
    cells = [
        f"{name}/nf4/{method}/sst2/0" for name in ("damaged", "worse") for method in ("zero-shot", "icl:1")
    ]
    assert all(told.count(cell) == 1 for cell in cells)  # each by name: nothing else has them
    alone = payload_of(bench, model_ids=damaged[:1], methods=["zero-shot"])
    assert "expected all of 1 cells, got 0" in failed(bench, "evaluation", alone)


def test_models_of_one_name_are_told_apart_by_their_ids(bench: Bench) -> None:
    with bench.db.write() as session:
        twin = models.register(
            session, tenant_id=bench.tenant_id, name="tiny", kind="folder", location="tiny"
        )
    payload = payload_of(bench, model_ids=[twin.id, bench.model.id], methods=["zero-shot"])
    evaluation = evaluation_of(bench, bench.finish("evaluation", payload))
    names = [line["model"] for line in lines_of(bench, evaluation) if line["kind"] == "cell"]
    assert names == [twin.id, bench.model.id]
    with bench.db.read() as session:
        assert evaluations.model_ids_of(session, evaluation=evaluation) == names


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_ids": ["model_none"]}, "no model"),
        ({"model_ids": []}, "one or more of models"),
        ({"corpus_id": "corpus_none"}, "no corpus"),
        ({"tasks": {"sst2": {"train": "../models/tiny/config.json"}}}, "leads out of it"),
        ({"tasks": {"sst2": {"train": "/etc/passwd"}}}, "relative to the root"),
        ({"tasks": {"sst2": {"train": "sst2/absent.tsv"}}}, "below the root, got none"),
        ({"tasks": {"sst2": {"train": "rows.jsonl"}}}, "expected labelled rows of sst2"),
        ({"tasks": {"glue": {"train": "sst2/train.tsv"}}}, "tasks of sst2"),
        ({"methods": ["zo:everything"]}, "expected zero-shot"),
        ({"density": 2.0}, "density as a number above 0"),
        ({"sizes": [1]}, "sizes of train, validation and test"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_evaluations_that_cannot_be_fail_with_the_reason(
    bench: Bench, changes: dict[str, Any], message: str
) -> None:
    assert message in failed(bench, "evaluation", payload_of(bench, **changes))


def test_a_streamed_corpus_and_a_model_that_changed_are_refused(bench: Bench) -> None:
    with bench.db.write() as session:
        streamed = corpora.register(
            session, tenant_id=bench.tenant_id, name="c4", kind="streamed", location="c4"
        )
    payload = payload_of(bench, corpus_id=streamed.id)
    assert "a corpus that is a file" in failed(bench, "evaluation", payload)
    save_model(bench.root / "models" / "tiny", seed=1)
    assert "as they were" in failed(bench, "evaluation", payload_of(bench))


def test_a_worker_without_the_extra_says_what_to_install(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "permille[workers,evaluate]" in failed(bench, "evaluation", payload_of(bench))


def test_a_payload_of_a_version_with_fewer_choices_has_the_sweeps_defaults(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Sweep] = []

    def stop(sweep: Sweep, *_: object) -> None:
        seen.append(sweep)
        raise Killed

    monkeypatch.setattr(sweeps, "run_sweep", stop)
    payload = payload_of(bench)
    old = {name: payload[name] for name in ("model_ids", "corpus_id", "tasks", "methods", "max_tokens")}
    with bench.db.write() as session:
        jobs.submit(session, tenant_id=bench.tenant_id, kind="evaluation", payload=old)
        claim = claims.claim(session, worker="w", lease_s=600)
    assert claim is not None
    with pytest.raises(Killed):
        attempt(TASKS, bench.db, claim, bench.settings)
    assert (seen[0].seeds, seen[0].zo_steps, seen[0].sizes) == ((0, 1, 2), 1000, (1000, 500, 1000))

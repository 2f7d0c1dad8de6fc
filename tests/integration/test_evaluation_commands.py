"""`permille evaluations` against a real service and its worker: from a sweep file to results that the local
command goes on with."""

import json
from pathlib import Path

from permille_lab.evaluate.__main__ import main as evaluate
from tests.running_service import running_service
from tests.tiny_model import write_corpus, write_model, write_sst2

CHOICES = 'methods = ["zero-shot", "icl:1"]\nseeds = [0]\nsizes = [8, 4, 6]\nmax_tokens = 48\n'


def test_an_evaluation_runs_and_its_results_are_those_of_the_local_command(tmp_path: Path) -> None:
    write_model(tmp_path / "models" / "tiny")
    write_corpus(tmp_path / "corpora" / "texts.jsonl")
    write_sst2(tmp_path / "corpora" / "sst2.tsv")
    sweep, results, report = (tmp_path / name for name in ("sweep.toml", "results.jsonl", "report.md"))
    roots = ("--model-root", str(tmp_path / "models"), "--corpus-root", str(tmp_path / "corpora"))
    with running_service(tmp_path, *roots) as running:
        model = running.answer("models", "add", "tiny", "--folder", "tiny")
        corpus = running.answer("corpora", "add", "texts", "--file", "texts.jsonl")
        sweep.write_text(
            f'models = ["{model["id"]}"]\ncorpus = "{corpus["id"]}"\n{CHOICES}'
            '[tasks.sst2]\ntrain = "sst2.tsv"\n'
        )
        job = running.answer("evaluations", "create", str(sweep))
        assert job["state"] == "succeeded"
        evaluation = running.answer("evaluations", "show", job["result_id"])
        assert (job["result"], evaluation["cells"]) == (f"/v1/evaluations/{evaluation['id']}", 2)
        assert [one["id"] for one in running.answer("evaluations", "list")] == [evaluation["id"]]
        for command, path in (("results", results), ("report", report)):
            saved = running.permille("evaluations", command, evaluation["id"], "--output", str(path))
            assert saved.returncode == 0, saved.stderr
        printed = running.permille("evaluations", "report", evaluation["id"]).stdout
    assert report.read_text() == printed and "| icl:1 " in printed
    before = results.read_bytes()
    assert sum(json.loads(line)["kind"] == "cell" for line in before.splitlines()) == 2
    # The same sweep on this machine, its paths in place of ids: nothing is left to do.
    sweep.write_text(
        f'models = ["models/tiny"]\ncorpus = "corpora/texts.jsonl"\n{CHOICES}'
        '[tasks.sst2]\ntrain = "corpora/sst2.tsv"\n'
    )
    table = tmp_path / "table.md"
    assert evaluate([str(sweep), "--results", str(results), "--table", str(table)]) == 0
    assert (results.read_bytes(), table.read_text()) == (before, printed)

"""A sparse model by commands, on the example model: made, packed, trained, adopted."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from permille_agent.cli.main import main
from tests.acceptance.environments import ROOT
from tests.running_service import running_service

_EXAMPLES = ROOT / "examples"
_SHORT = ("--sequences", "16", "--length", "128")


@pytest.mark.slow
def test_a_sparse_model_is_packed_trained_and_adopted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(_EXAMPLES / "model", tmp_path / "models" / "example")
    (tmp_path / "corpora").mkdir()
    shutil.copyfile(_EXAMPLES / "corpus.jsonl.gz", tmp_path / "corpora" / "texts.jsonl.gz")
    roots = ("--model-root", str(tmp_path / "models"), "--corpus-root", str(tmp_path / "corpora"))

    def device(*arguments: str) -> Any:
        capsys.readouterr()
        code = main(["--home", str(tmp_path / "home"), *arguments, "--json"])
        printed = capsys.readouterr()
        assert code == 0, printed.err
        return json.loads(printed.out)

    with running_service(tmp_path, *roots) as up:
        up.answer("models", "add", "example", "--folder", "example")
        up.answer("corpora", "add", "texts", "--file", "texts.jsonl.gz")
        asked = ("--model", "example", "--corpus", "texts", "--name", "sparse", "--method", "sparsegpt")
        made = up.answer("sparsifications", "create", *asked, "--pattern", "2:4", *_SHORT)["result_id"]
        shown = up.answer("sparsifications", "show", made)
        assert up.answer("models", "show", "sparse")["id"] == shown["made_model_id"]
        report = up.answer("sparsifications", "report", made)
        assert report["zeros"] == 0.5 and report["perplexity"]["held_out"]
        perplexity = report["perplexity"]
        assert perplexity["before"] < perplexity["after"] < 3 * perplexity["before"]

        mask = ("--method", "magnitude", "--density", "0.005")
        package = up.answer("builds", "create", "--model", "sparse", *mask)["result_id"]
        up.answer("releases", "publish", "mine", "--package", package, "--alias", "stable")
        device("enroll", up.url, up.answer("invitations", "create", "--release", "mine")["invitation"])
        assert device("pull")["package"] == package
        notes = str(_EXAMPLES / "gardener" / "notes.txt")
        trained = device("train", notes, "--steps", "40", "--threads", "1")
        assert trained["outcome"] == "adopted"
        assert device("status")["active"]["personal"]

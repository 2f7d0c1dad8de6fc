"""A pooled state, from its making to a person's model: built, pooled, published, pulled, trained, shared."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from permille_agent.cli.main import main
from tests.packages import sentences
from tests.running_service import Running, running_service
from tests.tiny_model import write_corpus, write_model

WAIT_S = 120.0
POOLING = ("--steps", "80", "--rows", "4", "--sequences", "200", "--length", "32")


class Device:
    """`permille-agent` in a home folder."""

    def __init__(self, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._home = home
        self._capsys = capsys

    def __call__(self, *arguments: str) -> Any:
        """Run a command that must succeed. Return the JSON that it prints."""
        self._capsys.readouterr()
        code = main(["--home", str(self._home), *arguments, "--json"])
        printed = self._capsys.readouterr()
        assert code == 0, printed.err
        return json.loads(printed.out)


def own_text(folder: Path) -> Path:
    """Write the text of a user. The words of its sentences are in reverse order."""
    path = folder / "user.txt"
    path.write_text("\n\n".join(" ".join(reversed(text.split())) for text in sentences(900, seed=3)))
    return path


def checked(up: Running, run_id: str) -> dict[str, Any]:
    """Wait until the service has checked a run's log. Return the service's record of the log."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        log: dict[str, Any] = up.answer("runs", "show", run_id)["log"]
        if log["state"] != "pending":
            return log
        time.sleep(0.2)
    raise AssertionError(f"expected a verdict on {run_id} within {WAIT_S} s")


@pytest.mark.slow
def test_from_a_public_corpus_to_a_persons_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(tmp_path / "models" / "tiny")
    write_corpus(tmp_path / "corpora" / "texts.jsonl")
    roots = ("--model-root", str(tmp_path / "models"), "--corpus-root", str(tmp_path / "corpora"))
    device = Device(tmp_path / "home", capsys)
    with running_service(tmp_path, *roots) as up:
        up.answer("models", "add", "tiny", "--folder", "tiny")
        up.answer("corpora", "add", "texts", "--file", "texts.jsonl")
        mask = ("--corpus", "texts", "--sequences", "4", "--density", "0.05")
        parent = up.answer("builds", "create", "--model", "tiny", *mask)["result_id"]
        up.answer("releases", "publish", "tiny", "--package", parent, "--alias", "stable")
        invitation = up.answer("invitations", "create", "--release", "tiny")["invitation"]
        device("enroll", up.url, invitation)
        device("pull")
        assert device("generate", "On day", "--max-tokens", "3")["model"] == "base"

        pooled = up.answer("poolings", "create", "--package", parent, "--corpus", "texts", *POOLING)[
            "result_id"
        ]
        layers = up.answer("packages", "show", pooled)["layers"]
        (state,) = [layer for layer in layers if layer["role"] == "pooled"]
        up.answer("releases", "publish", "tiny", "--package", pooled, "--alias", "stable")
        assert up.answer("poolings", "list")[0]["package_digest"] == pooled

        pulled = device("pull")
        assert (pulled["package"], pulled["download_bytes"]) == (pooled, state["size_bytes"])
        assert device("generate", "On day", "--max-tokens", "3")["model"] == "pooled"
        assert device("generate", "On day", "--max-tokens", "3", "--base")["model"] == "base"

        text = str(own_text(tmp_path))
        steps = ("--steps", "120", "--threads", "1")
        trained = device("train", text, *steps, "--from", "pooled", "--share-state")
        decision = trained["decision"]
        assert trained["outcome"] == "adopted"
        assert decision["pooled"] and decision["against_active"]["low"] > 0
        assert device("status")["active"]["personal"]
        assert device("generate", "On day", "--max-tokens", "3")["model"] == "personal"
        device("export", str(tmp_path / "mine"))

        device("report")
        log = checked(up, trained["run_id"])
        assert (log["form"], log["state"]) == ("state", "verified")
        assert log["state_digest"] == decision["state_digest"]
    assert list((tmp_path / "mine").glob("*.safetensors"))

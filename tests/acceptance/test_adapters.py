"""A package with an adapter, from its build to a person's model: built, pulled, trained, shared, exported."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from permille.engines.light.engine import LightEngine
from permille.package.blobs import BlobFolder
from permille.package.reader import Package
from permille.zo.estimators import Batch
from permille_agent.cli.main import main
from permille_agent.state.home import Home
from permille_agent.state.models import active_model
from permille_agent.training.personal import model_values
from tests.packages import sentences
from tests.running_service import Running, running_service
from tests.tiny_model import write_model

ADAPTER = ("--adapter", "lora", "--rank", "4", "--alpha", "8")
WITH_LOG = ("--share-log", "--queries", "8")
WAIT_S = 120.0


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
def test_an_adapter_from_its_build_to_peft(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import peft  # slow, so not at each start of the tests

    write_model(tmp_path / "models" / "tiny")
    device = Device(tmp_path / "home", capsys)
    with running_service(tmp_path, "--model-root", str(tmp_path / "models")) as up:
        up.answer("models", "add", "tiny", "--folder", "tiny")
        built = up.answer("builds", "create", "--model", "tiny", *ADAPTER, "--scheme", "int8")["result_id"]
        shown = up.answer("packages", "show", built)
        assert shown["request"]["adapter"]["kind"] == "lora" and shown["request"]["mask_id"] is None
        roles = [layer["role"] for layer in shown["layers"] if layer["role"] != "file"]
        assert roles == ["dense", "plain", "blocks", "adapter"]
        program = up.permille("exports", "create", "--package", built)
        assert program.returncode and "This package trains an adapter" in program.stderr
        up.answer("releases", "publish", "tiny", "--package", built, "--alias", "stable")
        invitation = up.answer("invitations", "create", "--release", "tiny")["invitation"]
        device("enroll", up.url, invitation)
        device("pull")
        text = str(own_text(tmp_path))
        train = ("train", text, "--threads", "1")

        by_gradient = device(*train, "--steps", "40", "--share-state")
        assert by_gradient["outcome"] == "adopted"
        device("report")
        shared = checked(up, by_gradient["run_id"])
        assert (shared["form"], shared["state"]) == ("state", "verified")
        assert shared["state_digest"] == by_gradient["decision"]["state_digest"]

        # Twenty zeroth-order steps do not beat the model in use. Their log is shared anyway.
        capsys.readouterr()
        assert main(["--home", str(tmp_path / "home"), *train, "--steps", "20", *WITH_LOG, "--json"]) == 7
        by_losses = json.loads(capsys.readouterr().out)
        device("report")
        shared = checked(up, by_losses["run_id"])
        assert (shared["form"], shared["state"]) == ("log", "verified")
        assert shared["state_digest"] == by_losses["decision"]["state_digest"]

    assert device("generate", "On day", "--max-tokens", "3")["model"] == "personal"
    trains = device("status")["active"]["trains"]
    assert trains.startswith("lora of rank 4, ") and trains.endswith("over int8")
    device("export", str(tmp_path / "adapter"), "--format", "peft")
    device("export", str(tmp_path / "base"), "--base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype="auto")
    personal = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter"))

    home = Home(tmp_path / "home")
    active = active_model(home)
    assert active is not None and active.package == built
    package = Package.open(BlobFolder(home.blobs), built)
    ids_BT = np.arange(40)[None]
    batch = Batch(input_ids_BT=ids_BT, attention_BT=ids_BT >= 0, target_BT=ids_BT > 0)
    losses_R = LightEngine(package).token_losses(model_values(home, active, package), batch)
    with torch.no_grad():
        logits_TD = personal(torch.from_numpy(ids_BT)).logits[0, :-1]
    expected_R = torch.nn.functional.cross_entropy(logits_TD, torch.arange(1, 40), reduction="none")
    np.testing.assert_allclose(losses_R, expected_R, atol=1e-4)

"""Code in the current folder, such as a folder of downloads, is never executed.

`python -m` puts this folder first on the path of a child process. Ours are started with `-P`, which does not.
"""

import os
import subprocess
from pathlib import Path

import pytest

from permille.errors import OperatorError
from permille.sandbox.process import Sandbox
from permille_agent.daemon.training_child import TrainingRequest, train_in_child
from permille_agent.state.home import open_home
from permille_agent.text.chat_template import ChatTemplate
from permille_service.cli.up import _start
from permille_workers.runtime.supervisor import CHILD_COMMAND
from tests.packages import tiny_tokenizer

pytestmark = pytest.mark.attack(13, "code planted in the working folder")

PLANTED = ("permille", "permille_service", "permille_workers", "permille_agent", "jinja2", "numpy", "json")


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Plant packages with well-known names in the current folder. If one is imported, it writes this file."""
    found = tmp_path / "executed"
    for name in PLANTED:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"open({str(found)!r}, 'a').write({name!r})")
    monkeypatch.chdir(tmp_path)
    return found


def test_the_child_of_tokenizer_and_chat_template(marker: Path) -> None:
    sandbox = Sandbox(lambda: tiny_tokenizer().to_str().encode())
    sandbox.start()
    assert "hello" in ChatTemplate(None, {}, sandbox).render([("user", "hello")])
    assert not marker.exists()


def test_the_child_that_trains(marker: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    home = open_home(tmp_path_factory.mktemp("home"))
    request = TrainingRequest(data_paths=(Path("/no/such/file"),), minutes=1.0, share_log=False)
    with pytest.raises(OperatorError, match="No package is installed"):
        train_in_child(home, request, lambda: True)
    assert not marker.exists()


def test_the_child_that_works(marker: Path) -> None:
    subprocess.run(CHILD_COMMAND, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    assert not marker.exists()


@pytest.mark.parametrize("module", ["permille_service", "permille_workers"])
def test_the_processes_of_permille_up(marker: Path, module: str) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PERMILLE_")}
    assert _start(module, environment).wait() in (1, 2)  # The settings are missing.
    assert not marker.exists()

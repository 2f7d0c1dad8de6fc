"""Install from the locks into folders, as the Dockerfile does for the API and as a device does.

This needs a package index. Without one, `tests/architecture/test_locks.py` covers a part of it.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of this checkout, built with the locked tools."""
    folder = tmp_path_factory.mktemp("wheel")
    python = _environment(folder, "build")
    made = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT)]
    _run(python, "-m", "pip", *made)
    return next(folder.glob("permille-*.whl"))


def test_the_api_has_no_torch_starts_and_answers(tmp_path: Path, wheel: Path) -> None:
    python = _environment(tmp_path, "api", wheel)
    assert not {"torch", "transformers", "triton"} & _installed(python)
    data = tmp_path / "data"
    settings = {**_plain(), "PERMILLE_DATA_DIR": str(data), "PERMILLE_PORT": "0"}
    with subprocess.Popen([python, "-P", "-m", "permille_service"], env=settings, cwd=tmp_path) as process:
        try:
            while not (data / "service.url").exists():
                assert process.poll() is None
                time.sleep(0.1)
            url = (data / "service.url").read_text().strip()
            assert httpx.get(f"{url}/v1/health", trust_env=False, timeout=60.0).json()["status"] == "ok"
            assert "Operator token" in httpx.get(f"{url}/ui/sign-in", trust_env=False, timeout=60.0).text
        finally:
            process.terminate()


def test_the_agent_has_no_hub_and_tells_its_state(tmp_path: Path, wheel: Path) -> None:
    python = _environment(tmp_path, "agent", wheel)
    assert not {"torch", "huggingface-hub", "fastapi"} & _installed(python)
    home = tmp_path / "home"
    home.mkdir()
    said = _run(python, "-P", "-m", "permille_agent", "--home", str(home), "status", "--json")
    assert json.loads(said)["enrolment"] is None


def _environment(folder: Path, name: str, *wheels: Path) -> str:
    """Make an environment from a lock, and install the wheels. Return the path of its interpreter."""
    _run(sys.executable, "-m", "venv", str(folder / "environment"))
    python = str(folder / "environment" / "bin" / "python")
    locked = ROOT / "requirements" / f"{name}.txt"
    only = ["--no-deps", "--require-hashes", "--only-binary", ":all:"]
    _run(python, "-m", "pip", "install", "--quiet", *only, "-r", str(locked))
    for wheel in wheels:
        _run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel))
    return python


def _installed(python: str) -> set[str]:
    listed = json.loads(_run(python, "-m", "pip", "list", "--format", "json"))
    return {one["name"].lower() for one in listed}


def _run(*command: str) -> str:
    done = subprocess.run(command, env=_plain(), cwd=ROOT.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def _plain() -> dict[str, str]:
    """Return the caller's environment without paths to this checkout."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PERMILLE_"))}

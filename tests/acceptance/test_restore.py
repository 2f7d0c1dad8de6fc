"""The commands of the pages on backup and restore, run unchanged around the rollback of a release."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from permille.exits import Exit
from permille.store import access
from permille.store.database import Database
from tests.artifacts import add_package
from tests.packages import tiny_package
from tests.running_service import Running, environment, running_service

PAGES = Path(__file__).parents[2] / "docs" / "howto"


def commands(page: str) -> list[str]:
    """Return the blocks of commands of a page."""
    text = (PAGES / page).read_text(encoding="utf-8")
    return re.findall(r"^```\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def type_in(block: str, folder: Path, data_dir: Path) -> str:
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block],
        cwd=folder,
        env=environment(PERMILLE_DATA_DIR=str(data_dir), PATH=path),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def add(running: Running, seed: int, *, url: str | None = None) -> str:
    """Put a package into the service. Return its digest.

    Args:
        url: Address of the database. The default is the file in the data folder.
    """
    package = tiny_package(running.data_dir / "blobs", seed=seed)
    database = Database(url or f"sqlite:///{running.data_dir}/permille.db")
    with database.write() as session:
        tenant = access.first_tenant(session)
        assert tenant is not None
        add_package(session, tenant_id=tenant.id, manifest=package.manifest)
    database.close()
    return package.digest


def publish(running: Running, seed: int) -> str:
    """Put a package into the service and publish it as `tiny`, `stable`. Return its digest."""
    digest = add(running, seed)
    running.answer("releases", "publish", "tiny", "--package", digest, "--alias", "stable")
    return digest


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_was_backed_up_comes_back_by_the_guides_commands(tmp_path: Path) -> None:
    (backup,), (files, after) = commands("back-up.md"), commands("restore.md")
    with running_service(tmp_path, "--no-worker") as running:
        good, _ = publish(running, 0), publish(running, 1)
        yanked = running.permille("releases", "yank", "tiny", "2")
        assert "devices that have it: 0" in yanked.stdout
        assert "next: permille releases rollback tiny" in yanked.stdout
        back = running.answer("releases", "rollback", "tiny")
        assert (back["version"], back["manifest_digest"], back["aliases"]) == (3, good, ["stable"])
        publish(running, 2)
        back = running.answer("releases", "rollback", "tiny")
        assert (back["version"], back["manifest_digest"]) == (5, good)
        again = running.permille("releases", "rollback", "tiny")
        assert "has no older version" in again.stderr and "--to" in again.stderr, (
            "never back to what was rolled back from"
        )
        refused = running.permille("releases", "rollback", "tiny", "--to", "2")
        assert refused.returncode == Exit.REFUSED
        assert "was yanked: withdrawn" in refused.stderr and "--yanked" in refused.stderr
        assert running.answer("releases", "rollback", "tiny", "--to", "2", "--yanked")["version"] == 6
        listed = running.answer("releases", "list")
        type_in(backup, tmp_path, running.data_dir)
        data_dir = running.data_dir
    for path in (data_dir / "operator.token", data_dir / "up.lock"):
        path.unlink(missing_ok=True)
    lost = data_dir.rename(tmp_path / "lost")
    type_in(files, tmp_path, data_dir)
    with running_service(tmp_path, "--no-worker") as running:
        assert running.answer("releases", "list") == listed
        shown = type_in(after, tmp_path, data_dir)
        assert "tiny" in shown
        with running.client() as client:
            manifest = client.get(f"/v1/packages/{good}/manifest")
            assert manifest.status_code == 200
            assert client.get("/v1/trust/metadata/timestamp.json").json()["signed"]["version"] > 1
    assert lost.exists()

"""Other users of the machine, a group by Kubernetes, workers: who can read rows, shared states, keys."""

import re
import subprocess
from pathlib import Path

import pytest

from permille.errors import OperatorError
from permille.files import make_private
from permille.store.migrations.schema import migrate
from permille.store.settings import layout
from tests.api_service import running_api

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "operate.md"


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


@pytest.mark.attack(16, "the data folder and its database existed, readable by everybody")
def test_a_data_folder_that_others_could_read_is_closed_at_start(tmp_path: Path) -> None:
    data, blobs = tmp_path / "data", tmp_path / "blobs"
    for folder in (data, blobs / "uploads"):
        folder.mkdir(mode=0o755, parents=True)
        folder.chmod(0o755)
    (data / "permille.db").touch(mode=0o644)
    (data / "permille.db").chmod(0o644)
    url = layout(data)["database_url"]
    with running_api(tmp_path, blob_root=blobs, database_url=url) as api:
        assert api.get("/v1/models").status_code == 200
        assert [mode(folder) for folder in (data, blobs / "uploads")] == [0o700, 0o700]
        assert mode(blobs) & 0o055, "nginx may read what packages have"
        assert {mode(path) for path in data.glob("permille.db*")} == {0o600}


@pytest.mark.attack(16, "a database of its own folder is made with the user's umask")
def test_a_new_database_is_its_owners_alone_wherever_it_is(tmp_path: Path) -> None:
    migrate(f"sqlite:///{tmp_path}/rows.db")
    assert {mode(path) for path in tmp_path.glob("rows.db*")} == {0o600}


@pytest.mark.attack(16, "a data folder of another user that everybody may enter")
def test_a_folder_that_cannot_be_closed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_path: Path, _mode: int) -> None:
        raise PermissionError

    tmp_path.chmod(0o755)
    monkeypatch.setattr(Path, "chmod", refuse)
    with pytest.raises(OperatorError, match=r"lets other users in \(mode 0755\)"):
        make_private(tmp_path)


@pytest.mark.attack(16, "a backup, made as the guide says, is readable by everybody")
def test_the_guides_backup_is_its_owners_alone(tmp_path: Path) -> None:
    with running_api(tmp_path):
        [commands] = re.findall(r"```\n(umask .*?)```", GUIDE.read_text(), re.DOTALL)
        environment = {"PERMILLE_DATA_DIR": str(tmp_path / "data"), "PATH": "/usr/local/bin:/usr/bin:/bin"}
        subprocess.run(
            ["bash", "-euc", f"umask 022\n{commands.replace('python ', 'python3 ')}"],
            cwd=tmp_path, env=environment, check=True, timeout=60,
        )  # fmt: skip
    assert mode(tmp_path / "backup") == 0o700
    assert mode(tmp_path / "backup" / "permille.db") == 0o600

"""Other users of the machine, a group from Kubernetes, workers: who can read rows, shared states and keys."""

import re
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

import pytest
import yaml

from permille.errors import OperatorError
from permille.files import make_private
from permille.store.migrations.schema import migrate
from permille.store.settings import layout
from tests.api_service import running_api
from tests.chart import REQUIRED, render

ROOT = Path(__file__).parents[2]
BACKUP, DEPLOY = ROOT / "docs" / "howto" / "back-up.md", ROOT / "deploy"


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


@pytest.mark.attack(16, "a database that others can read")
def test_an_older_database_is_taken_from_others(tmp_path: Path) -> None:
    database = tmp_path / "rows.db"
    migrate(f"sqlite:///{database}")
    database.chmod(0o644)
    with closing(sqlite3.connect(database)) as reader:  # its files stay while it is open
        reader.execute("SELECT * FROM tenants").fetchall()
        assert {mode(path) for path in tmp_path.iterdir()} == {0o644}
        migrate(f"sqlite:///{database}")
        assert {mode(path) for path in tmp_path.iterdir()} == {0o600}


def test_what_is_no_database_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no database " * 99)
    (tmp_path / "folder").mkdir()
    for path in tmp_path.iterdir():
        path.chmod(0o755)
        with pytest.raises(OperatorError, match="Cannot use the database"):
            migrate(f"sqlite:///{path}")
        assert mode(path) == 0o755


def test_a_folder_of_all_users_is_not_closed(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    with pytest.raises(OperatorError, match="is shared by all users"):
        make_private(tmp_path)
    assert tmp_path.stat().st_mode & 0o7777 == 0o1777


@pytest.mark.attack(16, "a data folder of another user that everybody may enter")
def test_a_folder_that_cannot_be_closed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_path: Path, _mode: int) -> None:
        raise PermissionError

    tmp_path.chmod(0o755)
    monkeypatch.setattr(Path, "chmod", refuse)
    with pytest.raises(OperatorError, match=r"lets other users in \(mode 0755\)"):
        make_private(tmp_path)


@pytest.mark.attack(16, "a group of the pod is given to all files of a volume, keys too")
def test_a_group_bit_on_a_key_is_taken_back_at_the_next_reading(tmp_path: Path) -> None:
    for _ in range(2):
        with running_api(tmp_path, private_dir=tmp_path / "private") as api:
            assert api.get("/v1/models").status_code == 200
            assert api.post("/v1/invitations", {"release": "tiny"}).status_code == 201
            keys = list((tmp_path / "private" / "keys").rglob("*.key"))
            assert len(keys) > 2
            assert {mode(key) for key in keys} == {0o600}
        for key in keys:  # fsGroup leaves these modes for the next pod
            key.chmod(0o660)


@pytest.mark.attack(16, "a worker looks for keys and the first token in the data folder that it shares")
def test_with_a_private_folder_the_data_folder_has_no_key_and_no_token(tmp_path: Path) -> None:
    private = tmp_path / "private"
    with running_api(tmp_path, private_dir=private) as api:
        api.publish(api.package())
        token = (private / "operator.token").read_bytes().strip()
        secrets = [token, *(key.read_bytes() for key in private.rglob("*.key"))]
        shared = [path for path in (tmp_path / "data").rglob("*") if path.is_file()]
        assert len(secrets) > 3
        assert not [path for path in shared for secret in secrets if secret in path.read_bytes()]
        assert not [path for path in shared if path.suffix == ".key" or path.name == "operator.token"]
    assert mode(private) == 0o700


@pytest.mark.attack(16, "compose, Kubernetes or systemd give a worker the keys and the operator's token")
def test_no_worker_that_is_deployed_reaches_the_private_folder() -> None:
    compose = yaml.safe_load((DEPLOY / "compose/compose.yaml").read_text())["services"]
    place = compose["api"]["environment"]["PERMILLE_PRIVATE_DIR"]
    having = [name for name, one in compose.items() if any(f":{place}" in v for v in one.get("volumes", ()))]
    assert having == ["api"]
    assert not Path(place).is_relative_to(compose["api"]["environment"]["PERMILLE_DATA_DIR"])
    pods = {}
    for (kind, name), deployment in render(REQUIRED).items():
        if kind == "Deployment":
            spec = deployment["spec"]["template"]["spec"]
            [container] = spec["containers"]
            claims = {
                v["persistentVolumeClaim"]["claimName"]
                for v in spec["volumes"]
                if len(v) == 2 and "secret" not in v
            }
            settings = {one["name"]: one.get("value", "") for one in container["env"]}
            private = settings.get("PERMILLE_PRIVATE_DIR", "")
            pods[name] = claims, private, str(container["volumeMounts"])
    claims, private, mounts = pods["permille-api"]
    assert claims == {"permille-data", "permille-private"}
    assert f"'mountPath': '{Path(private).parent}'" in mounts
    assert pods["permille-worker"][:2] == ({"permille-data"}, "")
    unit = (DEPLOY / "systemd/permille-worker@.service").read_text()
    assert "InaccessiblePaths=-/var/lib/permille/keys -/var/lib/permille/operator.token" in unit


@pytest.mark.attack(16, "a backup, made as the guide says, is readable by everybody")
def test_the_guides_backup_is_its_owners_alone(tmp_path: Path) -> None:
    with running_api(tmp_path):
        [commands] = re.findall(r"```\n(umask .*?)```", BACKUP.read_text(), re.DOTALL)
        environment = {"PERMILLE_DATA_DIR": str(tmp_path / "data"), "PATH": "/usr/local/bin:/usr/bin:/bin"}
        subprocess.run(
            ["bash", "-euc", f"umask 022\n{commands.replace('python ', 'python3 ')}"],
            cwd=tmp_path, env=environment, check=True, timeout=60,
        )  # fmt: skip
    assert mode(tmp_path / "backup") == 0o700
    assert mode(tmp_path / "backup" / "permille.db") == 0o600

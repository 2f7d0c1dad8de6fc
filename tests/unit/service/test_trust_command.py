"""Tests of `permille trust key` and `sign`, which run beside the keys, without service or network."""

import base64
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from securesystemslib.signer import SSlibKey

from permille.trust.metadata import Holders
from permille.trust.repository import Repository
from permille_service.cli.main import main

NOW = datetime.now(UTC).replace(microsecond=0)
MANIFEST = b'{"format":"permille-package"}'


class Elsewhere:
    """A folder on a machine without network."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self._capsys = folder, capsys

    def __call__(self, *arguments: str) -> tuple[int, Any]:
        self._capsys.readouterr()
        code = main(["trust", *arguments, "--json"])
        return code, json.loads(self._capsys.readouterr().out or "{}")

    def write(self, name: str, data: bytes) -> str:
        (self.folder / name).write_bytes(data)
        return str(self.folder / name)


@pytest.fixture
def elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Elsewhere:
    monkeypatch.setenv("PERMILLE_URL", "http://127.0.0.1:1")
    return Elsewhere(tmp_path, capsys)


@pytest.fixture
def team(elsewhere: Elsewhere) -> Holders:
    """Return the holder of the key in `team.pem`."""
    code, made = elsewhere("key", str(elsewhere.folder / "team.pem"))
    assert code == 0
    raw = base64.urlsafe_b64decode(made["public_key"] + "=")
    key = SSlibKey.from_crypto(Ed25519PublicKey.from_public_bytes(raw))
    assert key.keyid == made["key_id"]
    return Holders(keys=(key,))


def test_a_key_file_is_private_and_never_overwritten(elsewhere: Elsewhere, team: Holders) -> None:
    path = elsewhere.folder / "team.pem"
    before = path.read_bytes()
    assert path.stat().st_mode & 0o777 == 0o600
    assert elsewhere("key", str(path))[0] == 3
    assert path.read_bytes() == before


def test_a_team_lists_withdraws_and_points_back_with_its_own_key(elsewhere: Elsewhere, team: Holders) -> None:
    repository = Repository.create(now=NOW)
    key = str(elsewhere.folder / "team.pem")
    for draft in repository.rotate({"releases": team}):
        file = elsewhere.write(f"2.{draft.role}.json", draft.data)
        assert elsewhere("sign", file, "--key", key)[0] == 0
        repository.accept(draft.role, Path(file).read_bytes())
    manifest = elsewhere.write("manifest.json", MANIFEST)

    def signed(*change: str) -> dict[tuple[str, int], list[str]]:
        [draft] = repository.renew(["releases"])
        file = elsewhere.write(f"{repository.version('releases') + 1}.releases.json", draft.data)
        code, shown = elsewhere("sign", file, "--key", key, *change)
        assert (code, shown["signatures"]) == (0, [team.keys[0].keyid])
        repository.accept("releases", Path(file).read_bytes())
        return {version: sorted(listed.aliases) for version, listed in repository.listed().items()}

    new = ("--manifest", manifest, "--alias", "stable")
    assert signed("--add", "tiny/1", *new) == {("tiny", 1): ["stable"]}
    assert signed("--add", "tiny/2", *new) == {("tiny", 1): [], ("tiny", 2): ["stable"]}
    assert signed("--add", "tiny/1", "--alias", "stable") == {("tiny", 1): ["stable"], ("tiny", 2): []}
    assert signed("--remove", "tiny/2") == {("tiny", 1): ["stable"]}


def test_what_cannot_be_signed_is_said(elsewhere: Elsewhere, team: Holders) -> None:
    key = str(elsewhere.folder / "team.pem")
    repository = Repository.create(now=NOW)
    releases = elsewhere.write("2.releases.json", repository.newest["releases"])
    targets = elsewhere.write("2.targets.json", repository.newest["targets"])
    other = elsewhere.write("other.pem", b"no key")
    wrong: list[tuple[int, tuple[str, ...]]] = [
        (2, ("sign", releases, "--key", key, "--add", "tiny/1")),
        (3, ("sign", releases, "--key", key, "--add", "Tiny/1")),
        (3, ("sign", releases, "--key", key, "--remove", "tiny/1")),
        (2, ("sign", targets, "--key", key, "--remove", "tiny/1")),
        (3, ("sign", releases, "--key", other)),
        (3, ("sign", releases, "--key", str(elsewhere.folder / "none.pem"))),
        (3, ("sign", elsewhere.write("notes.json", b"{}"), "--key", key)),
        (3, ("sign", elsewhere.write("3.releases.json", b"{}"), "--key", key)),
    ]
    for code, arguments in wrong:
        got, answer = elsewhere(*arguments)
        assert (got, "error" in answer) == (code, True), arguments


def test_a_definition_that_no_installed_part_can_check_is_not_signed(
    elsewhere: Elsewhere, team: Holders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("permille_service.extension.service_extensions", lambda: ())
    draft = elsewhere.write("2.releases.json", Repository.create(now=NOW).newest["releases"])
    definition = elsewhere.write("readers.json", b"{}")
    key = str(elsewhere.folder / "team.pem")
    code, answer = elsewhere("sign", draft, "--key", key, "--federation", definition)
    assert (code, "Install all of permille" in answer["error"]) == (1, True)

"""Definitions of federations in signed lists: `permille trust sign --federation`."""

from pathlib import Path

from permille.trust.metadata import Holders
from permille.trust.repository import Repository
from permille.trust.roles import federation_path
from tests.rounds.federations import make_definition
from tests.unit.service.test_trust_command import NOW, Elsewhere, elsewhere, team

__all__ = ["elsewhere", "team"]


def test_a_team_lists_and_withdraws_a_federation_with_its_own_key(
    elsewhere: Elsewhere, team: Holders
) -> None:
    repository = Repository.create(now=NOW)
    key = str(elsewhere.folder / "team.pem")
    for draft in repository.rotate({"releases": team}):
        file = elsewhere.write(f"2.{draft.role}.json", draft.data)
        assert elsewhere("sign", file, "--key", key)[0] == 0
        repository.accept(draft.role, Path(file).read_bytes())

    def sign(*change: str) -> int:
        [draft] = repository.renew(["releases"])
        file = elsewhere.write(f"{repository.version('releases') + 1}.releases.json", draft.data)
        code, _ = elsewhere("sign", file, "--key", key, *change)
        if code == 0:
            repository.accept("releases", Path(file).read_bytes())
        return code

    definition = make_definition()
    path = federation_path(definition.digest)
    manifest = elsewhere.write("manifest.json", b'{"format":"permille-package"}')
    assert sign("--federation", elsewhere.write("readers.json", definition.to_bytes())) == 0
    assert repository.target(path) is not None
    # A list with a federation can be changed, too.
    assert sign("--add", "tiny/1", "--manifest", manifest, "--alias", "canary") == 0
    assert repository.target(path) is not None
    assert sign("--remove", path) == 0
    assert repository.target(path) is None
    assert sign("--federation", elsewhere.write("other.json", b"no definition")) == 3

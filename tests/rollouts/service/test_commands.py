"""Commands of groups and rollouts against a real service."""

import pytest

from tests.integration.test_api_commands import packed, up
from tests.running_service import Running

__all__ = ["up"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("rollouts", "create", "tour", "--wave", "50%"), 3, "--wave: waves must grow"),
        (("rollouts", "create", "nosuch"), 4, "There is no release 'nosuch'. See"),
    ],
)
def test_first_mistakes_are_told_by_the_names_that_were_typed(
    up: Running, arguments: tuple[str, ...], code: int, words: str
) -> None:
    refused = up.permille(*arguments)
    assert (refused.returncode, words in " ".join(refused.stderr.split())) == (code, True), refused.stderr


def test_a_rollout_from_its_making_to_its_revert(up: Running) -> None:
    for seed, alias in ((11, ("--alias", "stable")), (12, ())):
        digest = packed(up, seed).digest
        up.answer("releases", "publish", "rolled", "--package", digest, *alias)
    group = up.answer("groups", "create", "canaries", "--tag", "canary", "--memory-gib", "4")
    assert group["rule"]["tags"] == ["canary"] and group["rule"]["memory_bytes"] == 4 << 30
    assert up.answer("groups", "show", "canaries")["devices"] == 0
    create = ("rollouts", "create", "rolled", "--group", "canaries", "--on-stop", "revert")
    made = up.answer(*create, "--draft", "--wave", "10%", "--wave", "100%", "--soak-s", "0")
    assert (made["state"], made["rules"]["waves"]) == ("draft", ["10%", "100%"])
    assert made["group_id"] == group["id"]
    assert up.permille(*create).returncode == 3, "one at a time"
    assert up.answer("rollouts", "stop", made["id"])["state"] == "stopped"
    watched = up.permille("rollouts", "watch", made["id"])
    assert (watched.returncode, "an operator ended it" in watched.stderr) == (1, True)
    made = up.answer(*create)
    assert made["rules"]["waves"] == ["1%", "10%", "50%", "100%"], "the service's own where none is given"
    assert up.answer("rollouts", "pause", made["id"])["state"] == "paused"
    assert up.answer("rollouts", "resume", made["id"])["state"] == "running"
    assert "silent" in up.permille("rollouts", "show", made["id"]).stdout
    assert up.answer("rollouts", "revert", made["id"])["state"] == "reverted"
    assert [one["version"] for one in up.answer("releases", "list", "rolled")] == [3, 2, 1]
    assert up.permille("groups", "delete", "canaries").returncode == 3

"""Commands of federations against a real service."""

from tests.integration.test_api_commands import packed, up
from tests.running_service import Running

__all__ = ["up"]


def test_a_federation_from_its_making_to_its_end(up: Running) -> None:
    package = packed(up)
    up.answer("releases", "publish", "rounds", "--package", package.digest, "--alias", "stable")
    options = ("--release", "rounds", "--rounds", "5", "--target", "3", "--minimum", "2", "--queries", "16")
    refused = up.permille("federations", "create", "readers", *options)
    assert (refused.returncode, "--few-devices" in refused.stderr) == (3, True)
    made = up.answer("federations", "create", "readers", *options, "--few-devices")
    assert (made["state"], made["rounds"], made["minimum"]) == ("draft", 5, 2)
    assert up.answer("federations", "start", "readers")["state"] == "running"
    assert [one["name"] for one in up.answer("federations", "list")] == ["readers"]
    assert [one["state"] for one in up.answer("federations", "rounds", "readers")] == ["open"]
    refused = up.permille("federations", "adopt", "readers")
    assert (refused.returncode, "No round has a measured gain yet" in refused.stderr) == (
        3,
        True,
    )
    assert up.answer("federations", "pause", "readers")["state"] == "paused"
    assert up.answer("federations", "finish", made["id"])["state"] == "finished"
    assert up.answer("federations", "show", "readers")["number"] == 1  # the first round was void

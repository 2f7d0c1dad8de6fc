"""The traffic and the logs of a round have no text of the user."""

from pathlib import Path

import pytest

from tests.integration.agent_site import AgentSite
from tests.integration.test_agent_privacy import POLICY, USER, assert_clean, write_user_data
from tests.rounds.agent.site import GRADIENT, rounds_service
from tests.rounds.site import make_site


@pytest.mark.slow
def test_a_round_sends_integers_and_no_text(tmp_path: Path) -> None:
    """This uses the real commands, the daemon and the real service."""
    folder = tmp_path / f"of-{USER}"
    folder.mkdir()
    data = str(write_user_data(folder / "data"))
    device = AgentSite(folder, USER=USER, LOGNAME=USER, HOSTNAME=USER)
    with rounds_service(tmp_path / "service") as service:
        site = make_site(service.api, **GRADIENT | {"target": 1})
        invited = service.api.post("/v1/invitations", {"release": "tiny", "alias": "stable"}).json()
        ended = [
            device.run("enroll", service.url, invited["invitation"]),
            device.run("pull"),
            device.run("data", "add", data),
            device.run("federations", "join", "readers", "--yes", "--few-devices"),
            device.run("--log-level", "debug", "federations", "run"),
        ]
        assert [each.code for each in ended] == [0] * 5, ended[-1].errors
        assert site.work() == 1
        (device.home / "policy.toml").write_text(POLICY)
        daemon = device.run("--log-level", "debug", "run", "--once")
        assert daemon.code == 0, daemon.errors
        assert site.work() == 1
        assert [site.round(number)["counted"] for number in range(2)] == [1, 1]
        ended.append(device.run("federations", "leave", "readers"))
        traffic = b"\n".join(service.traffic)
    contributions = [part for part in service.traffic if part.startswith(b"PMLCTB1\n")]
    assert len(contributions) >= 2
    assert_clean(traffic)
    printed = "".join(each.output + each.errors for each in ended[:2] + ended[3:] + [daemon])
    assert_clean(printed.encode(), logged_here=True)

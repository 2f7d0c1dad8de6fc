"""`permille-agent pull`, killed at random moments: the next one goes on, and the package is the right one."""

import random
import signal
import time
from pathlib import Path

import pytest

from edge_agent.home import open_home
from edge_agent.releases import installed_release
from permille.package.blobs import BlobFolder
from permille.package.reader import verify_package
from tests.device_service import INVITATION, DeviceService, Fault, serving
from tests.integration.agent_site import AgentSite
from tests.packages import tiny_package

KILLS = 12
SEED = 7


def kill_on_the_way(site: AgentSite, service: DeviceService, rng: random.Random, share: float) -> bool:
    """Start a pull and kill it after some requests, bytes and time; whether it was still running."""
    requests, sent = len(service.traffic) + rng.randint(1, 5), service.blob_bytes_sent
    with site.start("pull") as process:
        while process.poll() is None and len(service.traffic) < requests:
            time.sleep(0.002)
        while (
            process.poll() is None
            and service.blob_bytes_sent < sent + share
            and len(service.traffic) >= requests
        ):
            time.sleep(0.001)
        time.sleep(rng.uniform(0.0, 0.02))
        running = process.poll() is None
        process.send_signal(signal.SIGKILL)
        _, errors = process.communicate()
    assert running or process.returncode == 0, errors
    return running


def check_state(home_folder: Path, digest: str) -> None:
    """What every kill leaves: nothing installed or the whole package, and blobs that match their names."""
    home = open_home(home_folder)
    installed = installed_release(home)
    blobs = BlobFolder(home.blobs)
    for blob in blobs.iterate():
        blobs.check(blob)
    if installed is not None:
        assert installed.manifest_digest == digest
        verify_package(blobs, digest, deep=True)


@pytest.mark.parametrize("seed", [SEED])
def test_a_download_that_is_killed_again_and_again_ends_with_the_right_package(
    tmp_path: Path, seed: int
) -> None:
    package = tiny_package(tmp_path / "published", config={"hidden_size": 160, "intermediate_size": 320})
    rng = random.Random(seed)
    site = AgentSite(tmp_path)
    with serving(tmp_path / "published") as service:
        service.publish(package.digest, 1)
        service.faults = [Fault(path="/blobs/", slow=0.01, times=10_000)]
        assert site.run("enroll", service.url, INVITATION).code == 0
        size = package.manifest.size_bytes
        killed = before_the_end = 0
        while killed < KILLS:
            killed += kill_on_the_way(site, service, rng, share=rng.uniform(0.0, 1.5 * size / KILLS))
            check_state(site.home, package.digest)
            before_the_end += installed_release(open_home(site.home)) is None
        assert before_the_end >= KILLS // 2
        service.faults = []
        ended = site.json("pull")
        assert ended["package"] == package.digest
        assert site.json("pull")["download_bytes"] == 0
    home = open_home(site.home)
    assert verify_package(BlobFolder(home.blobs), package.digest, deep=True).k == package.k
    assert list(home.partial.iterdir()) == []
    assert any(service.ranges), "nothing was continued"
    assert service.blob_bytes_sent < size + KILLS * 16_384

"""Pull and daemon killed at random moments: the next process goes on, and the result is the same."""

import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from permille.package.blobs import BlobFolder
from permille.package.reader import verify_package
from permille_agent.link.enrolment import enroll
from permille_agent.link.report import read_reports
from permille_agent.state.choices import add_references, set_sharing
from permille_agent.state.home import open_home
from permille_agent.state.models import active_model, installed_release
from tests.device_service import CODE, DeviceService, Fault, serving
from tests.integration.agent_site import ROOT, AgentSite
from tests.packages import sentences, tiny_package
from tests.preloaded import Process

SEED = 7


def kill_on_the_way(site: AgentSite, service: DeviceService, rng: random.Random, share: float) -> bool:
    """Start a pull and kill it after some requests, bytes and time. Return True if it was still running."""
    requests, sent = len(service.traffic) + rng.randint(1, 5), service.blob_bytes_sent
    with site.start("pull") as process:
        while process.poll() is None and len(service.traffic) < requests:
            time.sleep(0.002)
        while process.poll() is None and service.blob_bytes_sent < sent + share:
            time.sleep(0.001)
        if service.blob_bytes_sent > sent:  # sent bytes may not have been received yet
            while process.poll() is None and not any(site.home.rglob("partial/*")):
                time.sleep(0.001)
        time.sleep(rng.uniform(0.0, 0.02))
        running = process.poll() is None
        process.send_signal(signal.SIGKILL)
        _, errors = process.communicate()
    assert running or process.returncode == 0, errors
    return running


def check_state(home_folder: Path, digest: str) -> None:
    """Check the state after a kill: the package is complete or absent, and blobs match their names."""
    home = open_home(home_folder)
    installed = installed_release(home)
    blobs = BlobFolder(home.blobs)
    for blob in blobs.entries():
        blobs.check(blob.digest)
    if installed is not None:
        assert installed.manifest_digest == digest
        verify_package(blobs, digest)


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_a_download_that_is_killed_again_and_again_ends_with_the_right_package(
    tmp_path: Path, kills: int
) -> None:
    package = tiny_package(tmp_path / "published", config={"hidden_size": 160, "intermediate_size": 320})
    rng = random.Random(SEED)
    site = AgentSite(tmp_path)
    with serving(tmp_path / "published") as service:
        service.publish(package.digest, 1)
        service.faults = [Fault(path="/blobs/", slow=0.01, times=10_000)]
        assert site.run("enroll", service.url, service.invitation).code == 0
        size = package.manifest.size_bytes
        killed = 0
        while killed < kills:
            killed += kill_on_the_way(site, service, rng, share=rng.uniform(0.0, 1.5 * size / kills))
            check_state(site.home, package.digest)
            if installed_release(home := open_home(site.home)) is not None:
                shutil.rmtree(home.blobs)  # Remove the download, so that the next kill hits one again.
                home.releases.unlink()
        service.faults = []
        ended = site.json("pull")
        assert ended["package"] == package.digest
        assert site.json("pull")["download_bytes"] == 0
    home = open_home(site.home)
    assert verify_package(BlobFolder(home.blobs), package.digest).k == package.k
    assert list(home.partial.iterdir()) == []
    assert any(service.ranges), "nothing was continued"


class Daemons:
    """One device in a folder, and its daemon as processes that make one pass."""

    STEPS = 60

    def __init__(self, folder: Path, service: DeviceService) -> None:
        folder.mkdir()
        self.home = open_home(folder / "home")
        self._log = folder / "daemon.log"
        folder.joinpath("notes.txt").write_text("\n\n".join(sentences(800)))
        service.invitations.add(CODE)
        enroll(self.home, service.url, service.invitation)
        add_references(self.home, [folder / "notes.txt"])
        set_sharing(self.home, log=True)

    def start(self) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "tests.bigram_daemon", str(self.home.root), str(self.STEPS)]
        return Process(command, cwd=ROOT, stdout=self._log.open("ab"), stderr=subprocess.STDOUT)

    def finish(self) -> None:
        with self.start() as process:
            code = process.wait()
        assert code == 0, self._log.read_text()

    def kill(self, after_s: float) -> bool:
        """Start a pass and kill it. Return True if it was still running."""
        with self.start() as process:
            try:
                process.wait(after_s)
            except subprocess.TimeoutExpired:
                process.kill()
                return True
        assert process.returncode == 0, self._log.read_text()
        return False


@pytest.mark.parametrize("kills", [1, pytest.param(12, marks=pytest.mark.slow)])
def test_a_daemon_that_is_killed_again_and_again_ends_with_the_same_bits_and_one_report(
    tmp_path: Path, kills: int
) -> None:
    package = tiny_package(tmp_path / "published")
    rng = random.Random(SEED)
    with serving(tmp_path / "published") as service:
        service.publish(package.digest, 1)
        undisturbed, disturbed = (Daemons(tmp_path / name, service) for name in ("a", "b"))
        started = time.monotonic()
        undisturbed.finish()
        duration_s = time.monotonic() - started
        assert len(service.runs) == len(service.logs) == 1

        killed = 0
        while killed < kills:
            if disturbed.kill(rng.uniform(0.1, 1.0) * duration_s):
                killed += 1
            else:
                duration_s /= 2  # This pass was faster, because earlier passes did a part of the work.
        disturbed.finish()
        disturbed.finish()
    assert len(service.runs) == 2
    first, second = service.logs.values()
    assert first == second
    outcomes = [metrics["state_digest"] for metrics in service.runs.values()]
    assert outcomes[0] == outcomes[1] is not None
    assert not any(report.waits for report in read_reports(disturbed.home))
    assert active_model(disturbed.home) == active_model(undisturbed.home)

"""A release from a real service to a registry, and from there to a device. Each step is killed twice."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from permille.digests import digest_of
from permille.package.blobs import BlobFolder
from permille.package.reader import Package
from tests.integration.job_site import wait_until
from tests.registry.site import Fault, Gate, gate, registry
from tests.running_service import environment, running_service
from tests.tiny_model import write_model


def killed(site: Gate, fault: Fault, command: list[str], stored: tuple[Path, int] | None = None) -> None:
    """Start a command, and kill it when the fault holds it and a file has the size that `stored` names."""
    site.faults = [fault]
    site.stalled.clear()
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL)
    assert site.stalled.wait(120), f"{command} ended with {process.poll()}"
    if stored is not None:
        path, size = stored
        wait_until(lambda: path.exists() and path.stat().st_size == size, lambda: f"{path} has another size")
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    site.faults = []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_release_is_carried_by_a_registry(site: Gate, tmp_path: Path) -> None:
    write_model(tmp_path / "models" / "tiny")
    with running_service(tmp_path, "--model-root", str(tmp_path / "models")) as up:
        up.answer("models", "add", "tiny", "--folder", "tiny")
        built = up.answer("builds", "create", "--model", "tiny", "--method", "random", "--scheme", "int8")
        digest = built["result_id"]
        up.answer("releases", "publish", "tiny", "--package", digest, "--alias", "stable")
        package = Package.open(BlobFolder(next(up.data_dir.rglob("sha256")).parent), digest)
        largest = max(package.manifest.layers, key=lambda layer: layer.size_bytes)

        push = ["releases", "push", "tiny", f"{site.address()}:latest"]
        program = [sys.executable, "-m", "permille_service.cli.main", "--data-dir", str(up.data_dir)]
        for fault in (Fault("^PATCH", after=1, stall=True), Fault("^PATCH", cut_request=9, stall=True)):
            killed(site, fault, [*program, *push])
        pushed = up.answer(*push)
        assert pushed["package_digest"] == digest and up.answer(*push)["sent_bytes"] == 0

        # Other tools read, copy and check the artifact.
        with registry(tmp_path / "other") as host, gate(host) as other:
            skopeo("inspect", "--raw", f"docker://{site.host}/models/assistant:latest", "--tls-verify=false")
            copy = (f"docker://{site.host}/models/assistant:latest", f"docker://{other.host}/mirror:1")
            skopeo("copy", "--src-tls-verify=false", "--dest-tls-verify=false", *copy)
            raw = skopeo("inspect", "--raw", f"docker://{other.host}/mirror:1", "--tls-verify=false")
            assert digest_of(raw) == pushed["artifact_digest"]
            artifact = json.loads(raw)
            assert artifact["artifactType"] == "application/vnd.cncf.model.manifest.v1+json"
            layers = {layer["digest"]: layer["size"] for layer in artifact["layers"]}
            assert layers.pop(digest) and layers == {x.digest: x.size_bytes for x in package.manifest.layers}

            # The device cannot get a blob from the service, which has lost all of them.
            invitation = up.answer("invitations", "create", "--release", "tiny")["invitation"]
            agent = [sys.executable, "-m", "permille_agent", "--home", str(tmp_path / "home")]
            run(*agent, "enroll", up.url, invitation)
            for layer in package.manifest.layers:
                package.blobs.delete(layer.digest)
            run(*agent, "registry", "use", f"oci://{other.host}/mirror")
            part = tmp_path / "home" / "partial" / f"{largest.digest.removeprefix('sha256:')}.part"
            for begun, size in ((0, 5), (5, 45)):
                pause = Fault(largest.digest, pause_after=size - begun)
                killed(other, pause, [*agent, "pull"], stored=(part, size))
            assert run(*agent, "pull", "--json")["package"] == digest
            ranges = [headers.get("range") for line, headers, _ in other.requests if largest.digest in line]
            assert ranges[-2:] == ["bytes=5-", "bytes=45-"]
            assert run(*agent, "registry", "show", "--json")["address"] == f"oci://{other.host}/mirror"
            assert run(*agent, "verify", "--json")["left"] == []

            # An operator gets the same package.
            into = tmp_path / "pulled"
            up.answer("releases", "pull", "tiny", f"oci://{other.host}/mirror", "--into", str(into))
            assert Package.open(BlobFolder(into), digest).manifest == package.manifest


def run(*command: str) -> dict[str, object]:
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return json.loads(ended.stdout) if "--json" in command else {}


def skopeo(*arguments: str) -> bytes:
    ended = subprocess.run(["skopeo", *arguments], capture_output=True, check=False)
    assert ended.returncode == 0, ended.stderr.decode()
    return ended.stdout

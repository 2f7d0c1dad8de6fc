"""The main job once, as an operator and a user would type it: `make demo`.

Everything is a command of the two command lines, run as processes against a real service on loopback; this
script only passes one command's answer to the next and checks the end. It works in `.demo`, stops what it
started and removes what it wrote, also when it fails or is interrupted; only the page about the run stays.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parent
WORK = EXAMPLES.parent / ".demo"
BIN = Path(sys.executable).parent
STEPS = 80
# Five in a thousand: one in a thousand of so small a model is some 700 weights, too few to show much.
DENSITY = 0.005
PAGE = "show.html"
PROMPT = "The boy from next door"
SAMPLE = ("--max-tokens", "48", "--temperature", "0.7", "--seed", "1")
START_S = 90.0

READ = """
import sys
from pathlib import Path
from permille.package.blobs import BlobFolder
from permille.package.reader import Package
from permille.zo.lattice import state_digest
from permille.zo.packed_state import decode_state
data, blobs = Path(sys.argv[1]).read_bytes(), BlobFolder(Path(sys.argv[2]))
state = decode_state(data, max_bytes=1 << 20, max_k=1 << 20)
header = state.header
package = Package.open(blobs, header.package_digest)
state.check_binding(package_digest=package.digest, mask_digest=package.mask_digest, k=package.k)
print(state_digest(state.s_K, mask_digest=header.mask_digest, step_unit_exponent=header.step_unit_exponent))
"""


class DemoError(Exception):
    """A step of the demo did not do what it must."""


def main() -> int:
    """Run the demo; the last line of its output is the result."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir()
    try:
        with service() as url:
            package = build()
            result = personalise(url)
            line = summary(package, result)
            page = Path(agent("show")["page"]).read_bytes()
    except DemoError as exc:
        print(f"demo: failed: {exc}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir()
    (WORK / PAGE).write_bytes(page)
    print(f"   what changed, as a page for any browser: {WORK / PAGE}")
    print(line)
    return 0


@contextmanager
def service() -> Iterator[str]:
    """API and worker on a free port of loopback; yields the URL."""
    title("1. The service: API, worker, SQLite and a folder of blobs")
    port_file = WORK / "port"
    roots = ("--model-root", str(EXAMPLES), "--corpus-root", str(EXAMPLES))
    command = ["up", "--data-dir", str(WORK / "cloud"), *roots, "--port", "0", "--port-file", str(port_file)]
    process = subprocess.Popen([BIN / "permille", *command], start_new_session=True)
    try:
        deadline = time.monotonic() + START_S
        while not port_file.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise DemoError(f"expected `permille up` to listen within {START_S:.0f} s")
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port_file.read_text().strip()}"
    finally:
        process.terminate()
        process.wait()


def build() -> Any:
    """Register, build, publish; the package as the service lists it."""
    title("2. The operator: from a pre-trained model to a signed release")
    model = permille("models", "add", "example", "--folder", "model")
    permille("corpora", "add", "example", "--file", "corpus.jsonl.gz")
    mask = ("--corpus", "example", "--density", str(DENSITY), "--sequences", "64", "--length", "256")
    job = permille("builds", "create", "--model", "example", *mask, "--evaluate-on", "example")
    made = permille("builds", "show", job["id"])
    package = permille("packages", "show", made["package_digest"])
    k, size = package["k"], package["size_bytes"]
    print(f"   {k} sensitive weights of {model['parameters']}; package of {size} bytes")
    report = permille("quantizations", "report", made["quantization_id"])
    show_perplexity(report)
    permille("releases", "publish", "demo", "--package", package["digest"], "--alias", "stable")
    return package


def personalise(url: str) -> dict[str, Any]:
    """Enrol, pull, train, compare, report: what the end of the demo needs to know."""
    title("3. The device: enrol, download, verify")
    invitation = permille("invitations", "create", "--release", "demo")
    agent("enroll", url, invitation["invitation"], "--name", "demo")
    agent("pull")
    before = agent("generate", PROMPT, "--base", *SAMPLE)
    title("4. The user: training on the gardener's notes, on the device")
    notes = str(EXAMPLES / "gardener" / "notes.txt")
    trained = agent("train", notes, "--steps", str(STEPS), "--share-log", progress=True)
    after = agent("generate", PROMPT, *SAMPLE)
    print(f"\n   before: {before['text']!r}\n   after:  {after['text']!r}")
    title("5. The report: numbers by default; the state too, because this user said --share-log")
    agent("report")
    return {"run": trained, "digests": digests(trained)}


def digests(trained: dict[str, Any]) -> dict[str, str]:
    """The state's digest as the device, the service and a fresh process have it."""
    (reported,) = permille("runs", "list")
    deadline = time.monotonic() + START_S
    while reported["log"]["state"] == "pending" and time.monotonic() < deadline:
        time.sleep(1.0)
        reported = permille("runs", "show", reported["run_id"])
    if reported["log"]["state"] != "verified":
        raise DemoError(f"expected the service to verify the state, got {reported['log']}")
    decision = trained["decision"]
    state = WORK / "device" / "runs" / trained["run"] / f"descent-{decision['descent']}.state"
    fresh = run([sys.executable, "-c", READ, state, WORK / "device" / "blobs"]).strip()
    return {
        "device": trained["decision"]["state_digest"],
        "service": reported["log"]["state_digest"],
        "fresh process": fresh,
    }


def summary(package: dict[str, Any], result: dict[str, Any]) -> str:
    """The last line. Raises DemoError when the model was not adopted or a digest differs."""
    metrics, found = result["run"]["metrics"], result["digests"]
    base, personal = metrics["loss_base"], metrics["loss_personal"]
    if result["run"]["outcome"] != "adopted":
        raise DemoError(f"expected the personal model to be adopted, got {result['run']['message']}")
    for place, digest in found.items():
        print(f"   {place:<13} {digest}")
    if len(set(found.values())) != 1:
        raise DemoError(f"expected one state everywhere, got {found}")
    return (
        f"demo: held-out loss {base:.3f} -> {personal:.3f} ({100 * (base - personal) / base:.1f}% lower), "
        f"package {package['size_bytes']} bytes, personal state {metrics['personal_bytes']} bytes, exact"
    )


def show_perplexity(report: dict[str, Any]) -> None:
    """Perplexity of the model before and after quantization, where the report has it."""
    measured = report.get("perplexity")
    if measured:
        print(
            f"   perplexity on held-out text: {measured['before']:.2f} -> {measured['after']:.2f} in 4 bits"
        )


def title(text: str) -> None:
    print(f"\n{text}", flush=True)


def permille(*arguments: str) -> Any:
    """One command of the operator, on the demo's data folder; its JSON answer."""
    print(f"   $ permille {' '.join(arguments)}", flush=True)
    return json.loads(run([BIN / "permille", "--data-dir", WORK / "cloud", *arguments, "--json"]))


def agent(*arguments: str, progress: bool = False) -> Any:
    """One command of the device, on the demo's home; its JSON answer."""
    print(f"   $ permille-agent {' '.join(arguments)}", flush=True)
    start = time.monotonic()
    environment = {**os.environ, "PERMILLE_AGENT_HOME": str(WORK / "device")}
    answer = json.loads(run([BIN / "permille-agent", *arguments, "--json"], environment))
    if progress:
        print(f"     {time.monotonic() - start:.0f} s", flush=True)
    return answer


def run(command: list[Any], environment: dict[str, str] | None = None) -> str:
    """Standard output of a command. Raises DemoError with what it printed when it fails."""
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stdout + done.stderr).strip()
        raise DemoError(
            f"expected {Path(command[0]).name} to succeed, got exit code {done.returncode}: {said}"
        )
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())

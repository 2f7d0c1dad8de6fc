"""The whole product once, as an operator and a user would type it: `make demo`.

Every step is a command of `permille` or `permille-agent`, run against a real service on loopback. This script
passes the answer of a command to the next one, and checks the result.

With `STACK=full` in the environment, the service uses PostgreSQL, Redis and Celery.

It works in `.demo`. At the end it stops its processes and removes its files, even if it fails or is
interrupted. Only the page about the run and the exported model stay.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.programs import Programs
from examples.stack import BROKER, StackError, full_stack, messages
from permille.exits import CommandError

EXAMPLES = Path(__file__).resolve().parent
ROOT = EXAMPLES.parent
WORK = ROOT / ".demo"
NOTES = EXAMPLES / "gardener" / "notes.txt"
PAGE, EXPORT = "show.html", "model"
VERIFY_S = 90.0
ADOPTED, KEPT_BASE = 0, 7  # exit codes of `permille-agent train`


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Options of the demo's commands for a model.

    Attributes:
        root: folder below which the model lies.
        add: options of `models add`.
        build: options of `builds create`.
        zeroth_order: options of `train`, for forward passes only.
        gradient: options of `train`, along the gradient.
        ask: options of `generate`.
        questions: one about the notes, one of general knowledge.
    """

    root: Path
    add: tuple[str, ...]
    build: tuple[str, ...]
    zeroth_order: tuple[str, ...]
    gradient: tuple[str, ...]
    ask: tuple[str, ...]
    questions: tuple[str, str]


SMOLLM2 = Path(os.environ.get("PERMILLE_SMOLLM2") or ROOT / "build/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
MODELS = {
    "smollm2": Model(
        root=SMOLLM2.parent,
        add=("--gguf", SMOLLM2.name),
        build=("--sequences", "16", "--length", "128", "--basis"),
        zeroth_order=("--steps", "4"),
        gradient=("--steps", "12"),
        ask=("--chat", "--temperature", "0", "--max-tokens", "48"),
        questions=("Tell me about your garden today.", "What is the capital of France?"),
    ),
    # Five in a thousand, because one in a thousand of this small model is only some 700 weights.
    "example": Model(
        root=EXAMPLES,
        add=("--folder", "model"),
        build=(
            *("--density", "0.005", "--sequences", "64", "--length", "256"),
            *("--evaluate-on", "example", "--basis"),
        ),
        zeroth_order=("--steps", "20"),
        gradient=("--steps", "80"),
        ask=("--max-tokens", "48", "--temperature", "0.7", "--seed", "1"),
        questions=("The boy from next door", "In the beginning God created"),
    ),
}

REPLAY = """
import sys
from pathlib import Path
from permille.package.blobs import BlobFolder
from permille.package.reader import Package
from permille.zo.journal import read_journal
from permille.zo.lattice import state_digest
from permille.zo.records import coefficients_of
from permille.zo.replay import replay
contents = read_journal(Path(sys.argv[1]))
header = contents.header
basis = Package.open(BlobFolder(Path(sys.argv[3])), header.package_digest).basis()
s_K = replay(header, coefficients_of(contents.records[: int(sys.argv[2])], header), basis=basis)
print(state_digest(s_K, mask_digest=header.mask_digest, step_unit_exponent=header.step_unit_exponent))
"""


class DemoError(Exception):
    """A step of the demo had a wrong result."""


def main(arguments: list[str]) -> int:
    """Run the demo. The last line of its output is the result.

    Args:
        arguments: name of the model, and the folder to work in. Both have defaults.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    name, work = arguments[0] if arguments else "smollm2", Path(arguments[1]) if arguments[1:] else WORK
    if name not in MODELS:
        print(f"demo: there is no model {name!r}; choose {' or '.join(MODELS)}", file=sys.stderr)
        return 2
    if name == "smollm2" and not SMOLLM2.is_file():
        print(f"There is no {SMOLLM2} (`make smollm2` fetches it): this run uses the small example model.")
        name = "example"
    try:
        line = run(MODELS[name], work)
    except (DemoError, CommandError, StackError) as exc:
        print(f"demo: failed: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo: stopped. Nothing is kept, so it begins anew next time", file=sys.stderr)
        return 130
    print(line)
    return 0


def run(model: Model, work: Path) -> str:
    """Run all steps in an empty folder, and return the summary.

    Raises:
        CommandError: a command failed.
        DemoError: a step had a wrong result.
    """
    shutil.rmtree(work, ignore_errors=True)
    programs = Programs(work=work / "run", tell=lambda line: print(f"   $ {line}", flush=True))
    full = os.environ.get("STACK") == "full"
    with ExitStack() as running:
        running.callback(shutil.rmtree, work / "run", ignore_errors=True)
        parts = "PostgreSQL, Redis, Celery" if full else "SQLite"
        title(f"1. The service: API, worker, {parts} and a folder of blobs")
        settings = running.enter_context(full_stack()) if full else {}
        service = programs.service(models=model.root, corpora=EXAMPLES, settings=settings)
        url = running.enter_context(service)
        package = build(programs, model)
        if full:
            print(f"   Celery took the jobs from Redis: {messages(settings[BROKER])} messages")
        install(programs, url)
        before = answers(programs, model)
        log_bytes = zeroth_order(programs, model)
        trained = gradient(programs, model)
        compare_answers(model, before, answers(programs, model))
        export(programs, work)
    return summary(package, trained, log_bytes)


def build(programs: Programs, model: Model) -> Any:
    """Register, build and publish a model. Return its package as the service describes it."""
    title("2. The operator: from a pre-trained model to a signed release")
    added = programs.permille("models", "add", "example", *model.add)
    programs.permille("corpora", "add", "example", "--file", "corpus.jsonl.gz")
    inputs = ("--model", "example", "--corpus", "example")
    job = programs.permille("builds", "create", *inputs, *model.build, "--no-wait")
    print("   scores each weight, learns directions, then packs the model: some minutes", flush=True)
    programs.follow(job["id"])
    made = programs.permille("builds", "show", job["id"])
    package = programs.permille("packages", "show", made["package_digest"])
    k, size = package["k"], package["size_bytes"]
    print(f"   {k} sensitive weights of {added['parameters']}; package of {size} bytes")
    report = programs.permille("quantizations", "report", made["quantization_id"])
    if measured := report.get("perplexity"):
        print(
            f"   perplexity on held-out text: {measured['before']:.2f} -> {measured['after']:.2f} in 4 bits"
        )
    programs.permille("releases", "publish", "demo", "--package", package["digest"], "--alias", "stable")
    return package


def install(programs: Programs, url: str) -> None:
    """Enrol the device and pull the release."""
    title("3. The device: enrol, download, verify")
    invitation = programs.permille("invitations", "create", "--release", "demo")
    programs.agent("enroll", url, invitation["invitation"], "--name", "demo")
    programs.agent("pull")


def zeroth_order(programs: Programs, model: Model) -> int:
    """Train with forward passes only, share the log, and compare its replays. Return the log's size.

    Raises:
        DemoError: two replays differ, or the service did not verify the log.
    """
    title("4. The user: a few steps with forward passes only. Its log is a seed and some integers per step")
    run = train(programs, "--estimator", "one-sided", *model.zeroth_order, "--share-log")
    programs.agent("report")
    decision = run["decision"]
    if run["outcome"] != "adopted":
        print("   So few steps are not adopted. They show the log and its replay; step 5 trains longer.")
    if not decision["step"]:
        print("   no step lowered the loss, so there is nothing to share")
        return 0
    print(f"   steps in the log: {decision['step']}. Their result, as three programs compute it:")
    journal = programs.device / "runs" / run["run"] / f"descent-{decision['descent']}.journal"
    blobs = programs.device / "blobs"
    fresh = [sys.executable, "-c", REPLAY, str(journal), str(decision["step"]), str(blobs)]
    digests = {
        "device": decision["state_digest"],
        "service": verified(programs),
        "fresh process": subprocess.run(fresh, capture_output=True, text=True, check=True).stdout.strip(),
    }
    for place, digest in digests.items():
        print(f"   {place:<13} {digest}")
    if len(set(digests.values())) != 1:
        raise DemoError(f"the replays differ: {digests}")
    return int(run["metrics"]["personal_bytes"])


def verified(programs: Programs) -> str:
    """Wait until the service has replayed the shared log. Return the digest that it computed."""
    (reported,) = programs.permille("runs", "list")
    deadline = time.monotonic() + VERIFY_S
    while reported["log"]["state"] == "pending" and time.monotonic() < deadline:
        time.sleep(1.0)
        reported = programs.permille("runs", "show", reported["run_id"])
    if reported["log"]["state"] != "verified":
        raise DemoError(f"the service did not verify the log: {reported['log']}")
    return str(reported["log"]["state_digest"])


def gradient(programs: Programs, model: Model) -> dict[str, Any]:
    """Train along the gradient, from the base. Raises DemoError if the result is not adopted."""
    title("5. The user: training along the gradient, tested on notes that training never saw")
    run = train(programs, "--from", "base", *model.gradient)
    if run["outcome"] != "adopted":
        raise DemoError(f"the personal model was not adopted: {run['message']}")
    return run


def train(programs: Programs, *options: str) -> dict[str, Any]:
    """Train on the gardener's notes, and return the run, adopted or not."""
    start, arguments = time.monotonic(), ("train", str(NOTES), *options)
    code, _ = programs.show_agent(*arguments)
    if code not in (ADOPTED, KEPT_BASE):
        raise DemoError(f"the training ended with the exit code {code}")
    print(f"   done in {time.monotonic() - start:.0f} s", flush=True)
    # The same command again computes nothing. It answers with the finished run, here as JSON.
    run: dict[str, Any] = programs.agent(*arguments, may_end_with=(ADOPTED, KEPT_BASE))
    return run


def answers(programs: Programs, model: Model) -> list[str]:
    """Return the answers of the model in use to the questions."""
    return [
        str(programs.agent("generate", question, *model.ask)["text"]).strip() for question in model.questions
    ]


def compare_answers(model: Model, before: list[str], after: list[str]) -> None:
    """Print the questions with both answers."""
    for question, base, personal in zip(model.questions, before, after, strict=True):
        print(f"\n   {question}\n   before: {base!r}\n   after:  {personal!r}")


def export(programs: Programs, work: Path) -> None:
    """Write the personal model, and the page about it, to files that stay."""
    title("6. The result: a page, a model for other programs")
    shutil.copyfile(programs.agent("show")["page"], work / PAGE)
    programs.agent("export", str(work / EXPORT), "--format", "gguf")
    print(f"   what changed, as a page for any browser: {work / PAGE}")
    print(f"   the personal model, for llama.cpp and Ollama: {work / EXPORT}")


def summary(package: dict[str, Any], trained: dict[str, Any], log_bytes: int) -> str:
    """Return the last line of the output."""
    metrics, decision = trained["metrics"], trained["decision"]
    base, state, personal = (decision[f"loss_{name}"] for name in ("base", "state", "personal"))
    memory = f", {personal:.3f} with the memory" if personal != state else ""
    general, after = metrics["general_loss_base"], metrics["general_loss_personal"]
    beside = (decision["parts"] or {}).get("general")
    general_beside = "" if beside is None else f", {beside:.3f} with the memory"
    return (
        f"demo: held-out loss {base:.3f} -> {state:.3f} ({100 * (base - state) / base:.1f}% lower){memory}, "
        f"general loss {general:.3f} -> {after:.3f}{general_beside}, package {package['size_bytes']} bytes, "
        + (f"zeroth-order log {log_bytes} bytes, replay exact" if log_bytes else "no zeroth-order log")
    )


def title(text: str) -> None:
    print(f"\n{text}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Installation of a downloaded package, after a trial in a confined child process.

The trial verifies the whole package, tokenizes and decodes a sentence, and computes its losses. If the
package has an ExecuTorch program and the runtime is installed, the program computes the losses, too.

If the trial fails, the installed package stays. After a success, the old package is kept until the new one
has been used once (`state/models.py`). If the new one does not open, the old package is installed again.

The child runs this module as a program. It reads one JSON line and writes one.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from permille.engines.executorch.build import programs_run_here
from permille.errors import InputError, PackageError, PermilleError
from permille.package.limits import Role
from permille.sandbox.confinement import confine, die_with_parent
from permille.sandbox.process import SandboxError, run_once
from permille_agent.state.home import Home, as_json, parse_record, path_of, stored_path
from permille_agent.state.models import InstalledRelease, installed_release, read_releases, record_installed

if TYPE_CHECKING:
    from permille.engines.interface import Engine
    from permille.package.reader import Package
    from permille.zo.estimators import Batch

# Memory for libraries, the tokenizer's vocabulary and one pass, besides the mapped bytes of the package.
TRIAL_MEMORY_BYTES = 3 << 30
TRIAL_S = 120.0  # processor time of the trial for a small package
TRIAL_S_PER_GIB = 120.0  # additional time for hashing and reading a large package
PROGRAM_TOLERANCE = 0.05  # relative difference of losses that 8-bit activations may cause
SENTENCE = "the old baker opened the door and said good morning to the children in the street"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    """The line that the child reads. It has the limits of memory and processor time.

    `stored_path` writes the path.
    """

    blobs: str
    digest: str
    memory_bytes: int
    cpu_s: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """The line that the child writes. The code is empty if the package is usable."""

    code: str = ""
    message: str = ""


def install(home: Home, release: InstalledRelease, *, size_bytes: int) -> None:
    """Try a downloaded package, and make it the installed one.

    Args:
        home: the home folder, which has all blobs of the package.
        release: the release to install.
        size_bytes: size of the package in its verified manifest.

    Raises:
        PackageError: the package is refused. The installed package stays.
        OperatorError: the record cannot be written.
    """
    before = installed_release(home)
    if before == release:
        return
    # Another version may have the same package, which was tried before.
    if before is None or before.manifest_digest != release.manifest_digest:
        # Without this check, each poll of the daemon would try a broken package again.
        refused = read_releases(home).refused
        if refused is not None and refused.manifest_digest == release.manifest_digest:
            raise PackageError("package-trial", f"This package was refused before: {refused.reason}")
        try_package(home.blobs, release.manifest_digest, size_bytes=size_bytes)
    record_installed(home, release)


def try_package(blobs: Path, digest: str, *, size_bytes: int) -> None:
    """Verify and try a package in a child process with limits.

    Raises:
        PackageError: the error that the child found, or `package-trial` if it exceeded a limit or died.
    """
    limit_s = TRIAL_S + TRIAL_S_PER_GIB * size_bytes / 2**30
    order = _Order(
        blobs=stored_path(blobs),
        digest=digest,
        memory_bytes=TRIAL_MEMORY_BYTES + size_bytes,
        cpu_s=int(limit_s),
    )
    try:
        done = run_once(
            "permille_agent.link.install",
            data=json.dumps(as_json(order)).encode() + b"\n",
            timeout_s=2 * limit_s,  # twice the processor time, for a busy machine or a slow disk
        )
    except SandboxError as exc:
        raise PackageError("package-trial", f"The trial of the package failed: {exc}") from exc
    if done.returncode != 0 or not done.stdout.endswith(b"\n"):
        got = f"its process ended with {done.returncode}"
        raise PackageError("package-trial", f"The trial of the package failed or exceeded a limit: {got}")
    answer = parse_record(done.stdout, _Answer, "the answer of a package's trial")
    if answer.code:
        raise PackageError(answer.code, answer.message)


def run_trial(line: bytes) -> str:
    """Run the child process: read one request, write one answer."""
    order = parse_record(line, _Order, "the parent's line")
    # Confine this process before it reads the first byte of the package.
    die_with_parent()
    confine(memory_bytes=order.memory_bytes, cpu_s=order.cpu_s)
    try:
        from permille.package.blobs import BlobFolder
        from permille.package.reader import verify_package

        _compute(verify_package(BlobFolder(path_of(order.blobs)), order.digest))
        answer = _Answer()
    except PackageError as exc:
        answer = _Answer(code=exc.code, message=str(exc).removeprefix(f"{exc.code}: "))
    except PermilleError as exc:
        answer = _Answer(code="package-trial", message=str(exc))
    except MemoryError:
        answer = _Answer(
            code="package-trial",
            message=f"The package needs more than {order.memory_bytes} bytes of memory",
        )
    return json.dumps(as_json(answer)) + "\n"


def _compute(package: "Package") -> None:
    """Compute the losses of a sentence.

    Raises:
        PackageError: a loss is not finite, or the tokenizer does not return the sentence.
        InputError: no engine supports this model, or an id is outside of its vocabulary.
    """
    import numpy as np

    from permille.engines.factory import open_engine
    from permille.tokenizer_files import TextRules
    from permille.zo.estimators import Batch
    from permille_agent.text.tokens import package_tokenizer

    tokenizer = package_tokenizer(package)
    TextRules.read(package.file("tokenizer.json"))
    ids_T = tokenizer.prompt(SENTENCE)
    if _letters(tokenizer.decode(ids_T.tolist())) != _letters(SENTENCE):
        raise PackageError("package-trial", "The tokenizer does not return the sentence that it was given")
    ids_BT = ids_T[None, : int(package.config.get("max_position_embeddings") or len(ids_T))]
    if ids_BT.size < 2:
        raise InputError(f"The trial needs a sentence of at least 2 tokens, and has {ids_BT.size}.")
    target_BT = np.ones(ids_BT.shape, dtype=np.bool_)
    batch = Batch(input_ids_BT=ids_BT, attention_BT=target_BT.copy(), target_BT=target_BT)
    target_BT[:, 0] = False  # nothing comes before the first token to predict it from
    engine = open_engine(package, threads=1)
    if not np.isfinite(engine.token_losses(package.values(), batch)).all():
        raise PackageError("package-trial", "The loss of a sentence is NaN or infinite")
    if package.manifest.has_layer(Role.PROGRAM) and programs_run_here():
        _run_program(package, engine, batch)


def _run_program(package: "Package", engine: "Engine", batch: "Batch") -> None:
    """Compare the losses of the package's program with those of another engine.

    Raises:
        PackageError: the losses differ by more than 8-bit activations can cause, or the program is refused.
    """
    from permille.engines.executorch.engine import ExecutorchEngine
    from permille.zo.estimators import Batch

    program, values_K = ExecutorchEngine(package, threads=1), package.values()
    first = slice(program.shape.tokens)
    batch = Batch(
        input_ids_BT=batch.input_ids_BT[:, first],
        attention_BT=batch.attention_BT[:, first],
        target_BT=batch.target_BT[:, first],
    )
    expected, found = (float(one.losses(values_K[None], batch)[0]) for one in (engine, program))
    if not abs(found - expected) <= PROGRAM_TOLERANCE * expected:
        raise PackageError(
            "package-trial", f"The program has a loss of {found} where the light engine has {expected:.3f}"
        )


def _letters(text: str) -> str:
    return "".join(text.split()).casefold()


if __name__ == "__main__":
    sys.stdout.write(run_trial(sys.stdin.buffer.readline()))

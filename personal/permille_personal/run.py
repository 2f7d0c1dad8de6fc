"""The parts of `permille personalise`. Each stores its result and is skipped if the result exists.

    package    the parts of `permille_personal.build` make a package, which is installed in a device's folder
    training   a child process, which is `permille-agent train`, trains or resumes an interrupted run
    export     a GGUF file or a folder is written, and a page that shows what changed

An interrupted command therefore resumes when it is run again. Commands with the same model, corpus, density
and scheme share a package. Each set of texts has a device of its own, so that a personal model never learns
from the text of another command.
"""

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from permille.engines.export import export_transformers
from permille.engines.gguf.adapter import export_gguf_adapter
from permille.engines.gguf.blocks import BlockType
from permille.engines.gguf.export import ChangeLostError, export_gguf
from permille.errors import PermilleError
from permille.exits import CommandError, Exit, ExitCode
from permille.files import write_atomic
from permille.models.ollama import ollama_name
from permille.package.blobs import BlobFolder
from permille.package.reader import Package
from permille.sandbox.confinement import die_with_parent
from permille_agent.embed import (
    ANY_ENGINE,
    Home,
    RunFolder,
    RunOutcome,
    active_model,
    install_package,
    list_runs,
    model_values,
    open_home,
    require_active,
    show_run,
    telling_disk,
)
from permille_personal.build import built_package
from permille_personal.command import Part, Shown
from permille_personal.request import Form, Request, home_of, unusable_work

STOP_S = 60.0


def run(request: Request, shown: Shown) -> dict[str, Any]:
    """Run the parts that are still to be done, and return the losses and paths of the result.

    Raises:
        CommandError: a stage failed, or training did not improve on the base model. If the export failed, the
            personal model is kept, and the message has commands that write it in another form.
        PermilleError: the package cannot be built.
    """
    say, device = shown.say, request.work / home_of(request.texts)
    with _alone(request):
        say(f"The work is kept in {request.work}")
        if device.exists() and active_model(Home(device)) is not None:
            say("The package is installed already.")
        else:
            _install(request, device, shown)
        home = open_home(device)
        shown.begin(Part.TRAINING, "on your text. Ctrl-C stops. The same command continues.")
        is_new = _train(request, home, shown)
        last = list_runs(home)[-1].require("outcome", RunOutcome)
        if not is_new:
            loss = last.metrics.loss_personal  # None if even an eighth of the state cost too much
            say(
                f"   This training{'' if loss is None else f' ({loss:.3f})'} was not surely better than the "
                "model that an earlier training on this text made. The result is that earlier model."
            )
        shown.begin(Part.EXPORT, f"writing {request.out}")
        try:
            with telling_disk():
                _export(request, home, shown)
        except PermilleError as exc:
            raise CommandError(_not_written(request, device, exc), Exit.NOT_WRITTEN) from exc
        answer = {"is_new": is_new, **_result(home), "text": last.data.summary()}
        page = show_run(home, answer["run"], ANY_ENGINE)
    for line in _summary(answer):
        say(line)
    say(f"   what changed, as a page for any browser: {page}")
    say(f"   the model is personal data, and has no memory beside its weights: {request.out}")
    use = "chat" if _can_chat(request.model) else "generate 'Once upon a time'"
    say(f"   to talk to it: {agent_line(device, use)}")
    if request.form is Form.LORA:
        beside = shlex.join(("llama-cli", "--model", str(request.model), "--lora", str(request.out)))
        say(f"   to load it into llama.cpp beside the model: {beside}")
    elif request.form is Form.GGUF:
        file = _modelfile(request.out)
        name, path = ollama_name(file.stem), shlex.quote(str(file))
        say(f"   to load it into Ollama: ollama create {name} --file {path}")
    say(f"   to serve it as OpenAI and Ollama do: {agent_line(device, 'serve')}")
    return {**answer, "page": str(page), "out": str(request.out), "work": str(request.work)}


@contextmanager
def _alone(request: Request) -> Iterator[None]:
    """Lock the work folder for a `with` block. Check that it belongs to the inputs of the request.

    Raises:
        CommandError: the folder cannot be made or written, belongs to other inputs, holds other files, or
            another process has locked it.
    """
    lock = FileLock(request.work / "lock", timeout=0, mode=0o600)
    try:
        request.work.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock.acquire()
    except Timeout as exc:
        raise CommandError(
            f"Another `permille personalise` already works in {request.work}. Wait for it, or stop it.",
            Exit.RETRY,
        ) from exc
    except OSError as exc:
        raise CommandError(unusable_work(request.work, exc), Exit.REFUSED) from exc
    try:
        stamp = request.work / "inputs.sha256"
        names = [] if stamp.exists() else sorted(path.name for path in request.work.iterdir())
        # The parts remove folders such as `export`, which must not be somebody else's.
        if others := [name for name in names if name not in ("lock", "lost+found") and name[0] != "."]:
            raise CommandError(
                f"{request.work} holds other files, such as {others[0]}. Name a new folder as --work.",
                Exit.REFUSED,
            )
        if stamp.exists() and stamp.read_text(encoding="ascii").strip() != request.key:
            raise CommandError(
                f"{request.work} is of another model, corpus, density or scheme. Name another --work.",
                Exit.REFUSED,
            )
        write_atomic(stamp, f"{request.key}\n".encode())
        yield
    finally:
        lock.release()


def _install(request: Request, device: Path, shown: Shown) -> None:
    """Build the package, and install it for the device.

    A device without a package holds no data, so it is removed and made again.
    """
    package = built_package(request, shown)
    shutil.rmtree(device, ignore_errors=True)
    install_package(open_home(device), package)
    shown.say(f"   package of {package.size_bytes / 1e6:.1f} MB")


def _train(request: Request, home: Home, shown: Shown) -> bool:
    """Train, and return whether the result was adopted.

    A child process trains. So it does not hold the memory of the build, and its report names its own memory.

    Raises:
        CommandError: there is no personal model.
        KeyboardInterrupt: the child was interrupted.
    """
    options = (
        part
        for name, value in request.training.items()
        for part in (f"--{name.replace('_', '-')}", str(value))
    )
    # The result is a file for other programs, which cannot load a memory. So the state alone is judged.
    texts = [*map(str, request.texts), "--memory", "0"]
    arguments = ["--home", str(home.root), "train", *texts, *options]
    code, answer = _agent([*arguments, "--json"] if shown.quiet else arguments, quiet=shown.quiet)
    match code:
        case ExitCode.OK:
            return True
        case ExitCode.KEPT_BASE if require_active(home).run is not None:
            return False
        case ExitCode.KEPT_BASE:
            raise CommandError(
                "The personal model is not surely better than the base: nothing is exported. More text or "
                "more --minutes may help; the package is kept.",
                Exit.FAILED,
            )
        case ExitCode.INPUT_REFUSED:
            reason = json.loads(answer)["message"] if answer else "see above."
            raise CommandError(f"Training refused the text or an option: {reason}", Exit.REFUSED)
        case ExitCode.TRY_LATER:
            raise CommandError("An earlier training is still ending. Run the command again.", Exit.RETRY)
        case ExitCode.INTERRUPTED:
            raise KeyboardInterrupt
    raise CommandError(f"Training ended with exit code {code} (see above).", Exit.FAILED)


def _agent(arguments: list[str], *, quiet: bool) -> tuple[int, str]:
    """Run `permille-agent` in a child that ends with this process. Return its exit code and its answer."""
    # `-P`: the current folder must not provide modules to the child. Ctrl-C reaches this process alone, which
    # then stops the child.
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", "permille_agent", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if quiet else None,
        text=True,
        start_new_session=True,
        preexec_fn=die_with_parent,
    )
    try:
        answer, _ = child.communicate()
    except BaseException:  # Ctrl-C, or SIGTERM
        child.terminate()  # SIGINT would print a traceback while the child still imports its modules
        try:
            child.wait(STOP_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        raise
    return child.returncode, answer or ""


def _export(request: Request, home: Home, shown: Shown) -> None:
    """Write the personal model.

    A GGUF file gets its final name when it is complete, so a killed export leaves no partial file
    under that name. A package with the scheme `source` keeps the codes of the model's GGUF file. If these
    codes are too coarse for the personal change, the new file gets codes of eight bits (Q8_0).

    Raises:
        InputError: the model cannot be written in this form.
        OSError: the file cannot be written or moved to its place.
    """
    active = require_active(home)
    package = Package.open(BlobFolder(home.blobs), active.package)
    values_K = model_values(home, active, package)
    if request.form is Form.TRANSFORMERS:
        export_transformers(package, values_K, request.out)
        return
    folder, like = request.work / "export", request.model if request.model.is_file() else None
    shutil.rmtree(folder, ignore_errors=True)
    if request.form is Form.LORA:
        adapter = export_gguf_adapter(package, values_K, folder)
        size = f"{adapter.size_bytes / 1e6:.1f} MB"
        shown.say(f"   {size}, ranks up to {adapter.largest_rank}; {request.model.name} stays as it is")
    else:
        _export_gguf(package, values_K, folder, like, shown)
    (file,) = folder.glob("*.gguf")
    # Move the file into the folder of the result first. A rename across file systems would not be atomic.
    partial = request.out.with_name(f".{request.out.name}.partial")
    try:
        # It can reveal what the person wrote. So nobody else may read it, not even while it is copied.
        file.chmod(0o600)
        partial.unlink(missing_ok=True)
        partial.touch(mode=0o600)
        shutil.move(file, partial)
        modelfile = _modelfile(request.out)
        # The person may have changed the Modelfile of an earlier export.
        if request.form is Form.GGUF and not modelfile.exists():
            text = (folder / "Modelfile").read_text(encoding="utf-8")
            text = text.replace(f"FROM ./{file.name}\n", f"FROM ./{request.out.name}\n", 1)
            write_atomic(modelfile, text.encode("utf-8", "surrogateescape"), mode=0o600)
        partial.replace(request.out)
    finally:
        partial.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)


def _export_gguf(
    package: Package, values_K: NDArray[np.float32], folder: Path, like: Path | None, shown: Shown
) -> None:
    try:
        export_gguf(package, values_K, folder, like=like)
    except ChangeLostError as exc:
        if exc.finer is not BlockType.Q8_0:
            raise
        shown.say("   The change is too small for the file's own codes: writing Q8_0.")
        export_gguf(package, values_K, folder, kind=exc.finer, like=like)


def _like(request: Request) -> tuple[str, ...]:
    """Return the option of an export to GGUF that names the model's own GGUF file, if it has one."""
    return ("--like", str(request.model)) if request.model.is_file() else ()


def _not_written(request: Request, device: Path, error: PermilleError) -> str:
    """Return the message for an export that failed, with commands that write the model in other forms."""
    beside, reason = str(request.out.with_suffix("")), f"{error!s:.500}".rstrip(".")
    gguf = ("export", f"{beside}-gguf", "--format", "gguf", "--type", "f32", *_like(request))
    return (
        f"The personal model is trained and kept, but {request.out} was not written: {reason}. Write "
        f"it for transformers: {agent_line(device, shlex.join(('export', f'{beside}-transformers')))} Or for "
        f"llama.cpp, in float32: {agent_line(device, shlex.join(gguf))}"
    )


def _modelfile(out: Path) -> Path:
    """Return the path of the Modelfile, from which Ollama imports the GGUF file."""
    return out.with_suffix(".Modelfile")


def _can_chat(model: Path) -> bool:
    """Return whether the model has a chat template.

    Raises:
        InputError, PackageError: the model is damaged.
    """
    from permille.models.gguf.file import GgufFile
    from permille.models.gguf.tokenizer import chat_template
    from permille.tokenizer_files import TokenizerFiles

    if model.is_file():
        return chat_template(GgufFile(model)) is not None
    files = {path.name: path for path in model.iterdir() if path.is_file()}
    read = TokenizerFiles.read(lambda name: files[name].read_bytes() if name in files else None)
    return read.template is not None


def _result(home: Home) -> dict[str, Any]:
    """Return the run of the model in use, and its losses."""
    # The last run may have been rejected, so do not take its losses.
    run = require_active(home).run or ""
    metrics = RunFolder(home.runs / run).require("outcome", RunOutcome).metrics
    names = ("loss_base", "loss_personal", "general_loss_base", "general_loss_personal", "personal_bytes")
    return {"run": run, **{name: getattr(metrics, name) for name in names}}


def agent_line(home: Path, command: str) -> str:
    """Return the shell line that runs a command of the agent with this home folder."""
    return f"permille-agent --home {shlex.quote(str(home))} {command}"


def _summary(answer: dict[str, Any]) -> Iterator[str]:
    yield f"   your text: {answer['text']}"
    base, personal = answer["loss_base"], answer["loss_personal"]
    change = f"{100 * (base - personal) / base:.1f} % lower"
    yield f"   loss on your text that training never saw: {base:.3f} -> {personal:.3f} ({change})"
    general, after = answer["general_loss_base"], answer["general_loss_personal"]
    if general is not None and after is not None:
        yield f"   loss on general text: {general:.3f} -> {after:.3f}"

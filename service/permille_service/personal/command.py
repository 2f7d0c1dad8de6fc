"""`permille personalise`: make a personal model from a model file and a person's text.

The command has three stages. Each stage stores its result and is skipped if the result exists. An
interrupted command therefore resumes when it is run again:

    package   an embedded service on loopback builds a package, and the device pulls it
    train     the agent trains, and resumes an interrupted run by itself
    export    the agent writes a GGUF file or a folder, and a page that shows what changed

Commands with the same model, corpus, density and scheme share a package. Each set of texts has a device of
its own, so that a personal model never learns from the text of another command.
"""

import hashlib
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from filelock import FileLock, Timeout

from permille.corpora.sources import check_head
from permille.errors import InputError
from permille.files import write_atomic
from permille.models.ollama import ollama_file, ollama_name
from permille.text_files import TEXT_SUFFIXES, advice, text_kind
from permille_service.cli.commands import AsJson
from permille_service.cli.exits import CommandError, Exit
from permille_service.cli.output import make_output
from permille_service.cli.session import GlobalOptions
from permille_service.personal.programs import Programs
from permille_service.personal.public_text import included_corpus, reaches_hub

NAME = "personal"
MASK = ("--sequences", "32", "--length", "256")
"""Fewer and shorter sequences than a build uses by default, so that the mask takes minutes on a laptop."""
LEAST_BYTES = 1_000
"""The agent needs a thousand tokens, and a token has at least one byte. Shorter texts are refused early."""
LEAST_DENSITY, MOST_DENSITY = 1e-6, 0.5  # the service's limits
MOST_MINUTES, MOST_STEPS, MOST_SCALE, MOST_NATS = 10_080, 1_000_000, 16, 100  # the agent's limits
KEPT_BASE, REFUSED_DATA, TRY_LATER = 7, 3, 5  # exit codes of `permille-agent train`


class BaseScheme(StrEnum):
    """Coding of the weights in a package: quantized again, or as in the GGUF file."""

    NF4 = "nf4"
    SOURCE = "source"


class Turns(StrEnum):
    """Turns of a conversation that the loss counts."""

    ASSISTANT = "assistant"
    USER = "user"
    ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The request of a person.

    Attributes:
        model: a GGUF file, or a folder of transformers.
        texts: files and folders of the person's text.
        out: a new GGUF file if the name ends in `.gguf`, else a new folder for transformers.
        corpus: public text to find the sensitive weights with. None means C4 or the included text.
        density: share of the weights that training may change.
        scheme: coding of the weights in the package.
        key: digest of the inputs of the package.
        work: folder of the package and the runs.
        training: options of `permille-agent train`.
    """

    model: Path
    texts: tuple[Path, ...]
    out: Path
    corpus: Path | None
    density: float
    scheme: BaseScheme
    key: str
    work: Path
    training: tuple[str, ...]


def personalise(
    context: typer.Context,
    text: Annotated[
        list[Path], typer.Option(resolve_path=True, help="Your text: a file or folder. Repeat it for more.")
    ],
    out: Annotated[
        Path, typer.Option(resolve_path=True, help="New .gguf file or new folder for the personal model.")
    ],
    gguf: Annotated[Path | None, typer.Option(resolve_path=True, help="Model: a GGUF file.")] = None,
    folder: Annotated[
        Path | None, typer.Option(resolve_path=True, help="Model: a folder of transformers.")
    ] = None,
    ollama: Annotated[str | None, typer.Option(help="Model: its name in Ollama.")] = None,
    corpus: Annotated[
        Path | None,
        typer.Option(
            resolve_path=True,
            help="Public text to find the sensitive weights with (.jsonl, .jsonl.gz, .txt). Default: C4, "
            "streamed; without a network, a small text that is included.",
        ),
    ] = None,
    density: Annotated[
        float, typer.Option(help="Share of the weights that train; tiny models need more.")
    ] = 0.001,
    scheme: Annotated[
        BaseScheme | None,
        typer.Option(
            help="source keeps the codes of a GGUF file in Q4_0, Q4_1 or Q8_0; nf4 codes the weights anew. "
            "Default: source where the file allows it."
        ),
    ] = None,
    minutes: Annotated[float | None, typer.Option(help="How long to train. Default: 30.")] = None,
    steps: Annotated[int | None, typer.Option(help="Number of steps instead of minutes.")] = None,
    learn: Annotated[
        Turns | None, typer.Option(help="Turns of a conversation to learn. Default: assistant.")
    ] = None,
    rate_scale: Annotated[
        float | None, typer.Option(help="Factor of the learning rate. Try 0.5 if training diverges.")
    ] = None,
    keep_general: Annotated[
        float | None,
        typer.Option(help="Largest allowed rise of the loss on general text, nats per token. Default: 0.1."),
    ] = None,
    work: Annotated[
        Path | None,
        typer.Option(resolve_path=True, help="Folder for package and runs. Default: in the data folder."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a model file personal, on this machine alone.

    Examples:

      permille personalise --gguf model.gguf --text ~/notes --out mine.gguf

      permille personalise --ollama smollm2:135m --text ~/notes --out mine.gguf --minutes 20

    Your text never leaves the machine, and you need no account. If the command is stopped or killed, run it
    again: it keeps a finished package and the finished training steps. The model is written only if it is
    surely better on your text.
    """
    output = make_output(as_json=as_json)
    model = _model(gguf, folder, ollama)
    folder_of_work = work or context.ensure_object(GlobalOptions).folder.resolve() / NAME
    _check(text, out, corpus, folder_of_work)
    _check_numbers(density, minutes, steps, rate_scale, keep_general)
    scheme = _scheme(model, scheme)
    _check_form(model, out)
    chosen = [
        ("--minutes", minutes),
        ("--steps", steps),
        ("--learn", learn),
        ("--rate-scale", rate_scale),
        ("--keep-general", keep_general),
    ]
    key = _key(model, corpus, density, scheme)
    request = Request(
        model=model,
        texts=tuple(text),
        out=out,
        corpus=corpus,
        density=density,
        scheme=scheme,
        key=key,
        work=work or folder_of_work / key[:16],
        training=tuple(part for flag, value in chosen if value is not None for part in (flag, str(value))),
    )
    answer = run(request, output.say, quiet=as_json)
    if as_json:
        output.show(answer)


def run(request: Request, say: Callable[[str], None], *, quiet: bool = False) -> dict[str, Any]:
    """Run the stages that are still to be done, and return the losses and paths of the result.

    Args:
        say: a function that gets each line for the person.
        quiet: hide the progress.

    Raises:
        CommandError: a stage failed, or training did not improve on the base model. If the export failed, the
            personal model is kept, and the message has commands that write it in another form.
    """
    programs = Programs(work=request.work, home=_home_of(request.texts))
    with _alone(request), _terminated_as_exit():
        say(f"1. A package of the model, in {request.work}")
        if _has_package(programs):
            say("   It is installed already.")
        else:
            _install(request, programs, say, quiet=quiet)
        _end_enrolment(programs)
        say("2. Training on your text. Ctrl-C stops. The same command continues.")
        is_new = _train(request, programs, quiet=quiet)
        status = programs.agent("status")
        if not is_new:
            loss = status["last_run"]["metrics"]["loss_personal"]
            say(
                f"   This training ({loss:.3f}) was not surely better than the model that an earlier "
                "training on this text made. The result is that earlier model."
            )
        say(f"3. Writing {request.out}")
        try:
            _export(request, programs, say)
        except (CommandError, OSError) as exc:
            if isinstance(exc, CommandError) and exc.code is Exit.INTERRUPTED:
                raise
            raise CommandError(_not_written(request, programs.device, exc), Exit.NOT_WRITTEN) from exc
        answer = {"is_new": is_new, **_result(status), "text": status["last_run"]["text"]}
        page = programs.agent("show", answer["run"])["page"]
    for line in _summary(answer):
        say(line)
    say(f"   what changed, as a page for any browser: {page}")
    say(f"   the model is personal data: {request.out}")
    use = "chat" if _can_chat(request.model) else "generate 'Once upon a time'"
    say(f"   to talk to it: {agent_line(programs.device, use)}")
    if request.out.suffix == ".gguf":
        file = _modelfile(request.out)
        name, path = ollama_name(file.stem), shlex.quote(str(file))
        say(f"   to load it into Ollama: ollama create {name} --file {path}")
    say(f"   to serve it as OpenAI and Ollama do: {agent_line(programs.device, 'serve')}")
    return {**answer, "page": page, "out": str(request.out), "work": str(request.work)}


def _model(gguf: Path | None, folder: Path | None, ollama: str | None) -> Path:
    given = [one for one in (gguf, folder, ollama) if one is not None]
    if len(given) != 1:
        raise CommandError(
            f"Name one of --gguf, --folder and --ollama; you named {len(given) or 'none'}.", Exit.USAGE
        )
    if ollama is not None:
        return ollama_file(ollama)[1]
    if gguf is not None and gguf.is_dir():
        raise CommandError(f"{gguf} is a folder. Name it with --folder.", Exit.REFUSED)
    if gguf is not None and not gguf.is_file():
        raise CommandError(f"There is no file {gguf}. Name a GGUF file with --gguf.", Exit.REFUSED)
    if folder is not None:
        _check_folder(folder)
    return Path(given[0])


def _check_folder(folder: Path) -> None:
    """Check that a folder holds a model and no dangling links. Raises CommandError."""
    from permille.models.conversion import SLOW_TOKENIZERS  # imports numpy, which would delay `--help`

    if folder.is_file():
        raise CommandError(f"{folder} is a file. Name a GGUF file with --gguf.", Exit.REFUSED)
    if not folder.exists():
        raise CommandError(f"There is no folder {folder}. Name a folder of transformers.", Exit.REFUSED)
    if not (folder / "config.json").is_file():
        raise CommandError(
            f"{folder} is no model: it has no config.json. Name a folder that transformers saved.",
            Exit.REFUSED,
        )
    # In a cache of the hub, the files of a model are links to blobs. After a cleanup, links can lead nowhere.
    for path in folder.rglob("*"):
        if path.is_symlink() and not path.is_file():
            raise CommandError(
                f"{path} is a link that leads to no file. Remove it: a model's folder has files, or links to "
                "files.",
                Exit.REFUSED,
            )
    if not any((folder / name).exists() for name in ("tokenizer.json", *SLOW_TOKENIZERS)):
        raise CommandError(
            f"{folder} has no tokenizer.json. Save its tokenizer there (`tokenizer.save_pretrained`).",
            Exit.REFUSED,
        )


def _check(texts: list[Path], out: Path, corpus: Path | None, work: Path) -> None:
    """Check the paths before the long work starts. Raises CommandError, or InputError for the corpus."""
    if missing := [path for path in (*texts, *([corpus] if corpus else [])) if not path.exists()]:
        raise CommandError(f"There is no file or folder {missing[0]}.", Exit.REFUSED)
    if corpus is not None:
        check_head(corpus)
    files = [path for text in texts for path in [text, *text.rglob("*")] if path.is_file()]
    readable = [path for path in files if _is_text(path, is_named=path in texts)]
    if not readable:
        other = sorted({f"{path.suffix}{advice(path)}" for path in files if advice(path)})
        found = f", only {', '.join(other)}" if other else ""
        raise CommandError(
            f"--text names no text{found}. Name files of {', '.join(TEXT_SUFFIXES)}, or folders with such "
            "files.",
            Exit.REFUSED,
        )
    # Check the size before the build, which takes minutes. Training would refuse so little text only later.
    size = sum(path.stat().st_size for path in readable)
    if size < LEAST_BYTES:
        raise CommandError(
            f"Your text has {size} bytes. Some 4,000 characters are needed, 20,000 are better: add more with "
            "--text.",
            Exit.REFUSED,
        )
    if not out.parent.is_dir():
        raise CommandError(f"The folder {out.parent} of --out does not exist. Make it first.", Exit.REFUSED)
    if not os.access(out.parent, os.W_OK):
        raise CommandError(f"The folder {out.parent} is not writable. Name another --out.", Exit.REFUSED)
    try:
        is_file = work.exists() and not work.is_dir()
    except OSError as exc:  # such as a name that is too long
        raise CommandError(_unusable_work(work, exc), Exit.REFUSED) from exc
    if is_file:
        raise CommandError(f"--work {work} is a file. Name a folder.", Exit.REFUSED)
    # Training would read the files of the work folder, for example a corpus, as the person's text. It skips
    # hidden folders.
    for path in (path for path in texts if work.is_relative_to(path)):
        if not any(part.startswith(".") for part in work.relative_to(path).parts):
            raise CommandError(f"{work} lies in your text {path}. Name another --work.", Exit.REFUSED)
    if out.exists():
        raise CommandError(f"{out} exists already. Remove it, or name another --out.", Exit.REFUSED)


def _is_text(path: Path, *, is_named: bool) -> bool:
    try:
        return text_kind(path, is_named=is_named) is not None
    except OSError:  # training counts a file that cannot be read
        return False


def _check_numbers(
    density: float,
    minutes: float | None,
    steps: int | None,
    rate_scale: float | None,
    keep_general: float | None,
) -> None:
    """Refuse numbers that the build or the training would refuse later. Raises CommandError."""
    if not LEAST_DENSITY <= density <= MOST_DENSITY:
        raise CommandError(f"--density must be 0.000001 to {MOST_DENSITY}, got {density}.", Exit.USAGE)
    if minutes is not None and steps is not None:
        raise CommandError("Give either --steps or --minutes.", Exit.USAGE)
    for flag, value, most in (("--minutes", minutes, MOST_MINUTES), ("--rate-scale", rate_scale, MOST_SCALE)):
        if value is not None and not 0 < value <= most:  # NaN fails this comparison, too
            raise CommandError(f"{flag} must be above 0 and at most {most:,}, got {value}.", Exit.USAGE)
    if steps is not None and not 1 <= steps <= MOST_STEPS:
        raise CommandError(f"--steps must be 1 to {MOST_STEPS:,}, got {steps}.", Exit.USAGE)
    if keep_general is not None and not 0 <= keep_general <= MOST_NATS:
        raise CommandError(f"--keep-general must be 0 to {MOST_NATS}, got {keep_general}.", Exit.USAGE)


def _check_form(model: Path, out: Path) -> None:
    """Check that the model can be written in the form of `out`, before the long work starts.

    Raises:
        CommandError: llama.cpp does not support the model, and `out` is a GGUF file.
        InputError: the model cannot be read.
    """
    if out.suffix != ".gguf":
        return  # every model can be written for transformers
    from permille.models.families import shape_of
    from permille.models.gguf.config import read_model
    from permille.models.gguf.description import describe
    from permille.models.gguf.file import GgufFile
    from permille.models.gguf.vocabulary import vocabulary_of

    if model.is_file():
        config, files = read_model(GgufFile(model)).config, None
    else:
        config, files = _texts_of(model)
    try:
        describe(config)
        if files is not None:  # an export takes the tokenizer of a GGUF file as it is
            vocabulary_of(files.get, shape_of(config).vocabulary)
    except InputError as exc:
        raise CommandError(
            f"{model.name} cannot be written as a GGUF file. Name a folder with --out to write it for "
            f"transformers. The reason: {exc}",
            Exit.REFUSED,
        ) from exc


def _texts_of(folder: Path) -> tuple[Mapping[str, Any], dict[str, bytes]]:
    """Read the config and the text files of a model folder. Raises InputError."""
    from permille.models.checkpoint import TEXT_FILES, read_config
    from permille.models.conversion import add_tokenizer

    with tempfile.TemporaryDirectory(prefix="permille-") as temporary:
        copy = Path(temporary)
        for name in TEXT_FILES:
            if (folder / name).is_file():  # in a cache of the hub, it is a link out of the folder
                shutil.copyfile(folder / name, copy / name)
        add_tokenizer(copy)
        return read_config(copy), {path.name: path.read_bytes() for path in copy.iterdir()}


def _scheme(model: Path, asked: BaseScheme | None) -> BaseScheme:
    """Choose how the package codes the weights, and check that the model can be read.

    The default is `source` for a GGUF file whose codes can be kept, and `nf4` for all other models.

    Raises:
        CommandError: `source` was asked for, and the model is a folder.
        InputError: the GGUF file cannot be read, or `source` was asked for and its codes cannot be kept.
    """
    from permille.models.gguf.codes import check_kept
    from permille.models.gguf.config import read_model
    from permille.models.gguf.file import GgufFile

    if not model.is_file():
        if asked is BaseScheme.SOURCE:
            raise CommandError(
                "--scheme source keeps the codes of a GGUF file. Name a GGUF file, or leave --scheme out.",
                Exit.USAGE,
            )
        return BaseScheme.NF4
    found = read_model(GgufFile(model))
    if asked is BaseScheme.NF4:
        return asked
    try:
        check_kept(found)
    except InputError:
        if asked is BaseScheme.SOURCE:
            raise
        return BaseScheme.NF4
    return BaseScheme.SOURCE


def _key(model: Path, corpus: Path | None, density: float, scheme: BaseScheme) -> str:
    """Return a digest of the inputs of a package. Each work folder belongs to one such digest."""
    # Use the names and contents of files, but not their folders or times. So if a model is moved, the command
    # still finds its package.
    # A package from before rows began as in use (ADR 37) is another one.
    digest = hashlib.sha256(f"rows 2 {density!r} {scheme}\n".encode())
    for root in (model, corpus):
        files = sorted(root.rglob("*")) if root is not None and root.is_dir() else [root]
        for path in files:
            if path is None or not path.is_file():
                continue
            with path.open("rb") as file:
                digest.update(f"{path.name}\0{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
        digest.update(b"\n")
    return digest.hexdigest()


def _home_of(texts: tuple[Path, ...]) -> str:
    """Return the name of the device for these texts.

    The name depends on the paths of the texts only, so a person who adds to a text keeps the device.
    """
    paths = "\0".join(sorted({str(path) for path in texts}))
    return f"device-{hashlib.sha256(paths.encode()).hexdigest()[:8]}"


@contextmanager
def _alone(request: Request) -> Iterator[None]:
    """Lock the work folder for a `with` block. Check that it belongs to the inputs of the request.

    Raises:
        CommandError: the folder cannot be made or written, belongs to other inputs, or another process has
            locked it.
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
        raise CommandError(_unusable_work(request.work, exc), Exit.REFUSED) from exc
    try:
        stamp = request.work / "inputs.sha256"
        if stamp.exists() and stamp.read_text(encoding="ascii").strip() != request.key:
            raise CommandError(
                f"{request.work} is of another model, corpus, density or scheme. Name another --work.",
                Exit.REFUSED,
            )
        write_atomic(stamp, f"{request.key}\n".encode())
        yield
    finally:
        lock.release()


def _unusable_work(work: Path, error: OSError) -> str:
    return f"The work folder {work} cannot be used: {error.strerror or error}. Name another --work."


@contextmanager
def _terminated_as_exit() -> Iterator[None]:
    """Let SIGTERM unwind the stack, so that the child processes are stopped."""
    # Python's default ends the process at once and would leave the service and the agent running.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(int(Exit.INTERRUPTED)))
    try:
        yield
    except KeyboardInterrupt:
        raise CommandError("Stopped. The same command goes on from here.", Exit.INTERRUPTED) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def _has_package(programs: Programs) -> bool:
    return programs.device.exists() and programs.agent("status")["active"] is not None


def _install(request: Request, programs: Programs, say: Callable[[str], None], *, quiet: bool) -> None:
    """Build and publish the package unless that is done, and let the device pull it.

    A device without a package holds no data, so it is removed and enrols again.
    """
    models, texts = request.work / "models", request.work / "texts"
    from permille.models.gguf.folder import FOLDERS  # imports numpy

    source = _linked(request.model, models / ("model.gguf" if request.model.is_file() else "model"))
    flag = "--gguf" if request.model.is_file() else "--folder"
    texts.mkdir(exist_ok=True)
    with programs.service(models=models, corpora=texts) as url:
        if not programs.permille("models", "list"):
            programs.permille("models", "add", "model", flag, source.name)
        corpus = _add_corpus(request, programs, texts)
        if not programs.permille("releases", "list"):
            say(f"   Finding the model's sensitive weights with {corpus}. This takes some minutes.")
            _build(request, programs, say, quiet=quiet)
        # Only the build reads the model's copy in float32, which is several times as large as a GGUF file.
        shutil.rmtree(models / FOLDERS, ignore_errors=True)
        invitation = programs.permille("invitations", "create", "--release", NAME)["invitation"]
        shutil.rmtree(programs.device, ignore_errors=True)
        programs.agent("enroll", url, invitation)
        pulled = programs.agent("pull")
        say(f"   package of {pulled['package_bytes'] / 1e6:.1f} MB")


def _end_enrolment(programs: Programs) -> None:
    """End the enrolment of a device that has its package: its service has ended and takes no reports."""
    # An earlier run may have been killed after the pull, so look at the state of the device.
    if programs.agent("status")["enrolment"] is not None:
        programs.agent("unenroll", "--local-only")


def _build(request: Request, programs: Programs, say: Callable[[str], None], *, quiet: bool) -> None:
    job = programs.permille(
        *("builds", "create", "--model", "model", "--corpus", "corpus", *MASK, "--no-wait"),
        *("--density", str(request.density), "--scheme", request.scheme.value),
        *("--idempotency-key", "build"),
    )
    if job["state"] in ("failed", "dead", "cancelled"):
        # With the idempotency key, the service returned the failed job of an earlier run of this command.
        programs.permille("jobs", "retry", job["id"])
    programs.follow(job["id"], quiet=quiet)
    build = programs.permille("builds", "show", job["id"])
    # An earlier version of permille may have made the mask, and its report has no such part.
    if base := programs.permille("masks", "report", build["mask_id"]).get("base"):
        say(f"   loss of the model on the public text: {base['loss']:.3f} nats per token")
        for remark in base["remarks"]:
            say(f"   Look at this: {remark}")
    programs.permille("releases", "publish", NAME, "--package", build["package_digest"], "--alias", "stable")


def _add_corpus(request: Request, programs: Programs, texts: Path) -> str:
    """Register the public text if none is registered. Return a description of it."""
    known = programs.permille("corpora", "list")
    if known:
        return "the same text as before"
    if request.corpus is None and reaches_hub():
        programs.permille("corpora", "add", "corpus", "--streamed", "c4")
        return "C4, streamed from the hub (--corpus FILE takes another)"
    given = request.corpus or included_corpus()
    suffix = ".jsonl.gz" if given.name.endswith(".jsonl.gz") else given.suffix
    _linked(given, texts / f"corpus{suffix}")
    programs.permille("corpora", "add", "corpus", "--file", f"corpus{suffix}")
    if request.corpus is not None:
        return str(request.corpus)
    return "the small text that is included, since the hub cannot be reached; C4 is better (--corpus FILE)"


def _linked(source: Path, place: Path) -> Path:
    """Link a file or folder into the work folder. The roots of the service then contain nothing else."""
    shutil.rmtree(place, ignore_errors=True) if place.is_dir() else place.unlink(missing_ok=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, place, copy_function=_link)
    else:
        _link(str(source), str(place))
    return place


def _link(source: str, place: str) -> None:
    try:
        os.link(os.path.realpath(source), place)
    except OSError:  # another file system
        shutil.copyfile(source, place)


def _train(request: Request, programs: Programs, *, quiet: bool) -> bool:
    """Train, and return whether the result was adopted. Raises CommandError if there is no personal model."""
    texts = map(str, request.texts)
    code, answer = programs.show_agent("train", *texts, *request.training, quiet=quiet)
    if code == KEPT_BASE and programs.agent("status")["active"]["personal"]:
        return False
    if code == KEPT_BASE:
        raise CommandError(
            "The personal model is not surely better than the base: nothing is exported. More text or more "
            "--minutes may help; the package is kept.",
            Exit.FAILED,
        )
    if code == REFUSED_DATA:
        reason = json.loads(answer)["message"] if answer else "see above."
        raise CommandError(f"Training refused the text or an option: {reason}", Exit.REFUSED)
    if code == TRY_LATER:
        raise CommandError("An earlier training is still ending. Run the command again.", Exit.RETRY)
    if code == Exit.INTERRUPTED:
        raise CommandError("Stopped. The same command goes on from here.", Exit.INTERRUPTED)
    if code:
        raise CommandError(f"Training ended with exit code {code} (see above).", Exit.FAILED)
    return True


def _export(request: Request, programs: Programs, say: Callable[[str], None]) -> None:
    """Write the personal model.

    The GGUF file gets its final name when it is complete, so a killed export leaves no partial file
    under that name. A package with the scheme `source` keeps the codes of the model's GGUF file. If these
    codes are too coarse for the personal change, the new file gets codes of eight bits (Q8_0).

    Raises:
        CommandError: the agent refused the export, or failed.
        OSError: the file cannot be moved to its place.
    """
    if request.out.suffix != ".gguf":
        programs.agent("export", str(request.out))
        return
    folder = request.work / "export"
    shutil.rmtree(folder, ignore_errors=True)
    export = ("export", str(folder), "--format", "gguf", *_like(request))
    try:
        programs.agent(*export)
    except CommandError as exc:
        # The exit code is the same for all refusals, so only the message shows this error.
        if "personal change" not in str(exc):
            raise
        say("   The change is too small for the file's own codes: writing Q8_0.")
        programs.agent(*export, "--type", "q8_0")
    (file,) = folder.glob("*.gguf")
    # Move the file into the folder of the result first. A rename across file systems would not be atomic.
    partial = request.out.with_name(f".{request.out.name}.partial")
    try:
        shutil.move(file, partial)
        partial.chmod(0o600)  # it can reveal what the person wrote
        modelfile = _modelfile(request.out)
        if not modelfile.exists():  # the person may have changed the Modelfile of an earlier export
            text = (folder / "Modelfile").read_text(encoding="utf-8")
            text = text.replace(f"FROM ./{file.name}\n", f"FROM ./{request.out.name}\n", 1)
            write_atomic(modelfile, text.encode(), mode=0o600)
        partial.replace(request.out)
    finally:
        partial.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)


def _like(request: Request) -> tuple[str, ...]:
    """Return the option of an export to GGUF that names the model's own GGUF file, if it has one."""
    return ("--like", str(request.model)) if request.model.is_file() else ()


def _not_written(request: Request, device: Path, error: Exception) -> str:
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


def _result(status: dict[str, Any]) -> dict[str, Any]:
    """Return the run of the model in use, and its losses, from the device's status."""
    # The last run may have been rejected, so do not take its losses.
    active = status["active"]
    names = ("loss_base", "loss_personal", "general_loss_base", "general_loss_personal", "personal_bytes")
    return {"run": active["run"], **{name: active["metrics"].get(name) for name in names}}


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

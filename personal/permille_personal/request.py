"""The request of a person, checked before the long work starts.

Each check raises a CommandError with the option to correct, or an InputError of the file that it read.
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from permille.choices import LEAST_DENSITY, MOST_DENSITY
from permille.corpora.sources import check_head
from permille.errors import InputError
from permille.exits import CommandError, Exit
from permille.models.ollama import ollama_file

LEAST_BYTES = 1_000
"""Texts of fewer bytes are refused early. Training needs 700 tokens, which have some 2,800 characters."""


class BaseScheme(StrEnum):
    """Coding of the weights in a package: quantized again, or as in the GGUF file."""

    NF4 = "nf4"
    SOURCE = "source"


class Turns(StrEnum):
    """Turns of a conversation that the loss counts."""

    ASSISTANT = "assistant"
    USER = "user"
    ALL = "all"


class Form(StrEnum):
    """Forms of the result: a GGUF file, a folder of transformers, or a GGUF file of the change alone."""

    GGUF = "gguf"
    TRANSFORMERS = "transformers"
    LORA = "lora"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The request of a person.

    Attributes:
        model: a GGUF file, or a folder of transformers.
        texts: files and folders of the person's text.
        out: a new file, or a new folder for transformers.
        form: the form of `out`.
        corpus: public text to find the sensitive weights with. None means C4 or the included text.
        density: share of the weights that training may change.
        scheme: coding of the weights in the package.
        key: digest of the inputs of the package.
        work: folder of the package and the runs.
        training: options of the training that the person named, as for `permille_agent.embed.TrainOptions`.
    """

    model: Path
    texts: tuple[Path, ...]
    out: Path
    form: Form
    corpus: Path | None
    density: float
    scheme: BaseScheme
    key: str
    work: Path
    training: Mapping[str, Any]


def named_model(gguf: Path | None, folder: Path | None, ollama: str | None) -> Path:
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


def check_paths(texts: list[Path], out: Path, corpus: Path | None, work: Path) -> None:
    """Check the paths before the long work starts. Raises CommandError, or InputError for the corpus."""
    if missing := [path for path in (*texts, *([corpus] if corpus else [])) if not path.exists()]:
        raise CommandError(f"There is no file or folder {missing[0]}.", Exit.REFUSED)
    if corpus is not None:
        check_head(corpus)
    if not out.parent.is_dir():
        raise CommandError(f"The folder {out.parent} of --out does not exist. Make it first.", Exit.REFUSED)
    if not os.access(out.parent, os.W_OK):
        raise CommandError(f"The folder {out.parent} is not writable. Name another --out.", Exit.REFUSED)
    try:
        is_file = work.exists() and not work.is_dir()
    except OSError as exc:  # such as a name that is too long
        raise CommandError(unusable_work(work, exc), Exit.REFUSED) from exc
    if is_file:
        raise CommandError(f"--work {work} is a file. Name a folder.", Exit.REFUSED)
    # Training would read the files of the work folder, for example a corpus, as the person's text. It skips
    # hidden folders.
    for path in (path for path in texts if work.is_relative_to(path)):
        if not any(part.startswith(".") for part in work.relative_to(path).parts):
            raise CommandError(f"{work} lies in your text {path}. Name another --work.", Exit.REFUSED)
    if out.exists():
        raise CommandError(f"{out} exists already. Remove it, or name another --out.", Exit.REFUSED)


def check_text(texts: list[Path]) -> list[str]:
    """Read the text once before the build, which takes minutes. Return what was skipped, with the reasons.

    Raises:
        CommandError: training would refuse so little text.
        InputError: there is no text.
    """
    from permille_agent.embed import characters, read_documents

    documents, report = read_documents(texts)
    skipped = [f"Skipped {example}" for example in report.examples]
    size = sum(len(characters(document.content).encode()) for document in documents)
    if size < LEAST_BYTES:
        told = [
            f"Your text has {size} bytes. Training needs some 2,800 characters, and 20,000 are better. Add "
            "more with --text.",
            *skipped,
        ]
        raise CommandError("\n".join(told), Exit.REFUSED)
    return skipped


def check_numbers(density: float, training: Mapping[str, Any]) -> None:
    """Refuse numbers that the build or the training would refuse later. Raises CommandError."""
    if not LEAST_DENSITY <= density <= MOST_DENSITY:
        raise CommandError(f"--density must be 0.000001 to {MOST_DENSITY}, got {density}.", Exit.USAGE)
    from permille_agent.embed import TrainOptions

    named = {name: value for name, value in training.items() if name != "learn"}
    try:
        TrainOptions(**(named if named.keys() & {"steps", "minutes"} else {**named, "minutes": 30.0}))
    except InputError as exc:
        raise CommandError(str(exc), Exit.USAGE) from exc


def chosen_form(asked: Form | None, out: Path) -> Form:
    """Return the form that was asked for, or the one that fits the name. Raises CommandError."""
    by_name = Form.GGUF if out.suffix.lower() == ".gguf" else Form.TRANSFORMERS
    if asked is not None and (asked is Form.TRANSFORMERS) is not (by_name is Form.TRANSFORMERS):
        name = "a folder, without .gguf" if asked is Form.TRANSFORMERS else "a file that ends in .gguf"
        raise CommandError(f"--format {asked} writes {name}, but --out is {out.name}.", Exit.USAGE)
    return asked or by_name


def check_form(model: Path, form: Form) -> None:
    """Check that the model can be written in this form, before the long work starts.

    Raises:
        CommandError: llama.cpp does not support the model, and the result is a GGUF file.
        InputError: the model cannot be read.
    """
    if form is Form.TRANSFORMERS:
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


def chosen_scheme(model: Path, asked: BaseScheme | None, form: Form) -> BaseScheme:
    """Choose how the package codes the weights, and check that the model can be read.

    The default is `source` for a GGUF file whose codes can be kept, and `nf4` for all other models. An
    adapter is for the codes that it was trained on, so it needs `source`.

    Raises:
        CommandError: `source` was asked for or is needed, and the model is a folder. Or an adapter was asked
            for with `nf4`, or its codes cannot be kept.
        InputError: the GGUF file cannot be read, or `source` was asked for and its codes cannot be kept.
    """
    if form is Form.LORA and (asked is BaseScheme.NF4 or not model.is_file()):
        raise CommandError(
            "--format lora needs a GGUF file whose codes are kept. Name one, and leave --scheme out.",
            Exit.USAGE,
        )
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
    except InputError as exc:
        if form is Form.LORA:
            raise CommandError(
                f"{model.name} has weights of types other than Q4_0, Q4_1 and Q8_0, and no adapter can be "
                "made for these. Name another file, or leave --format out.",
                Exit.REFUSED,
            ) from exc
        if asked is BaseScheme.SOURCE:
            raise
        return BaseScheme.NF4
    return BaseScheme.SOURCE


def key_of(model: Path, corpus: Path | None, density: float, scheme: BaseScheme) -> str:
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
                content = hashlib.file_digest(file, "sha256").hexdigest()
            digest.update(os.fsencode(path.name) + f"\0{content}\n".encode())
        digest.update(b"\n")
    return digest.hexdigest()


def home_of(texts: tuple[Path, ...]) -> str:
    """Return the name of the device for these texts.

    The name depends on the paths of the texts only, so a person who adds to a text keeps the device.
    """
    paths = "\0".join(sorted({str(path) for path in texts}))
    return f"device-{hashlib.sha256(os.fsencode(paths)).hexdigest()[:8]}"


def unusable_work(work: Path, error: OSError) -> str:
    return f"The work folder {work} cannot be used: {error.strerror or error}. Name another --work."

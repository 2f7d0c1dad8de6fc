"""Commands for models and corpora."""

from typing import Annotated

import typer

from permille.corpora.included import included_corpus, reaches_hub
from permille.errors import InputError
from permille.exits import CommandError, Exit
from permille.models.ollama import ollama_file
from permille_service.cli.client import READ_FILE_S
from permille_service.cli.commands import AsJson, Key, add_deletion, add_list, add_show, command
from permille_service.cli.output import make_output
from permille_service.cli.session import Session

models = typer.Typer(no_args_is_help=True, help="Register base models.")
corpora = typer.Typer(no_args_is_help=True, help="Register public text.")


@command(models, "add")
def add_model(
    session: Session,
    name: Annotated[str, typer.Argument(help="Name for the model.")],
    folder: Annotated[
        str | None, typer.Option(help="Folder in the transformers format, below the model root.")
    ] = None,
    hub: Annotated[
        str | None, typer.Option(help="Repository of the Hugging Face hub, as owner/name.")
    ] = None,
    commit: Annotated[
        str | None, typer.Option(help="Commit of the repository: 40 hexadecimal digits.")
    ] = None,
    gguf: Annotated[str | None, typer.Option(help="GGUF file, below the model root.")] = None,
    ollama: Annotated[
        str | None,
        typer.Option(
            help="Model of Ollama, as NAME or NAME:TAG. The model root must be the folder in which Ollama "
            "stores its models."
        ),
    ] = None,
    key: Key = None,
) -> None:
    """Register a base model.

    Examples:

      permille models add tiny --folder tiny-llama

      permille models add chat --gguf model-Q4_1.gguf

      permille models add chat --hub owner/name --commit 0123456789abcdef0123456789abcdef01234567
    """
    given = [option for option in (folder, hub, gguf, ollama) if option is not None]
    if len(given) != 1 or (hub is None) != (commit is None):
        raise CommandError("Give one of --folder, --gguf, --ollama, or --hub with --commit.", Exit.USAGE)
    source = {"kind": "hub", "repository": hub, "commit": commit}
    if folder is not None:
        source = {"kind": "folder", "path": folder}
    elif gguf is not None or ollama is not None:
        source = {"kind": "gguf", "path": _ollama_path(ollama or "") if gguf is None else gguf}
    try:
        added = session.client.post(
            "/v1/models", {"name": name, "source": source}, key=key, timeout_s=READ_FILE_S
        )
    except CommandError as exc:
        if ollama is None or exc.code is not Exit.NOT_FOUND:
            raise
        raise CommandError(_outside(ollama), exc.code, exc.problem) from exc
    session.output.show(added)
    session.output.say_next(f"permille builds create --model {name} --corpus CORPUS")


def _ollama_path(name: str) -> str:
    """Return the path of a model's file, relative to the folder in which Ollama stores its models."""
    try:
        store, path = ollama_file(name)
    except InputError as exc:
        raise CommandError(str(exc), Exit.USAGE) from exc
    return path.relative_to(store).as_posix()


def _outside(name: str) -> str:
    """Return the error message for a model of Ollama that is not below the service's model root."""
    store, path = ollama_file(name)
    file = f"{name.replace('/', '-').replace(':', '-')}.gguf"
    return (
        f"The service does not find {name}, because its model root is not the folder of Ollama's models. "
        f"Start the service with --model-root {store}, or put the file below the model root with "
        f"`ln {path} ROOT/{file}` (`cp` from another disk), and use --gguf {file} instead of --ollama."
    )


@command(corpora, "add")
def add_corpus(
    session: Session,
    name: Annotated[str, typer.Argument(help="Name for the corpus.")],
    file: Annotated[
        str | None, typer.Option(help="File (.jsonl, .jsonl.gz or .txt), below the corpus root.")
    ] = None,
    streamed: Annotated[
        str | None, typer.Option(help="Data set that jobs stream from the hub. Only `c4` is available.")
    ] = None,
    split: Annotated[str, typer.Option(help="Part of a streamed data set: train or validation.")] = "train",
    key: Key = None,
) -> None:
    """Register a corpus.

    Examples:

      permille corpora add stories --file stories.jsonl

      permille corpora add c4 --streamed c4
    """
    if (file is None) == (streamed is None):
        raise CommandError("Give either --file or --streamed.", Exit.USAGE)
    source = {"kind": "streamed", "dataset": streamed, "split": split}
    if file is not None:
        source = {"kind": "file", "path": file}
    added = session.client.post(
        "/v1/corpora", {"name": name, "source": source}, key=key, timeout_s=READ_FILE_S
    )
    session.output.show(added)
    # The workers may have another network, so this is no reason to refuse.
    if streamed is not None and not reaches_hub():
        included = included_corpus()
        example = f", such as the included {included}," if included else ""
        session.output.say(
            "note: the hub cannot be reached from here. If your workers cannot reach it either, put a public "
            f"text{example} below the corpus root, and add it with --file."
        )
    session.output.say_next(f"permille builds create --model MODEL --corpus {name}")


@models.command("catalogue")
def show_catalogue(*, as_json: AsJson = False) -> None:
    """List published models, the size of their packages, and the memory to train them. This needs no service.

    Example:

      permille models catalogue
    """
    # These modules import numpy. An import at the top would slow down every command.
    from permille.models.catalogue import CATALOGUE
    from permille.quantization.types import Scheme

    found = [
        {
            "name": entry.name,
            "family": entry.family,
            "parameters": entry.parameters,
            "nf4_bytes": entry.package_bytes(Scheme.NF4),
            "training_bytes": entry.training_bytes,
            "ran": entry.ran.value,
        }
        for entry in CATALOGUE
    ]
    make_output(as_json=as_json).show(found, list(found[0]))


add_list(models, "models", ("id", "name", "family", "parameters", "scoped_parameters", "size_bytes"))
add_list(corpora, "corpora", ("id", "name", "source.kind", "source.path", "size_bytes"))
add_show(models, "models")
add_show(corpora, "corpora")
add_deletion(models, "models", "remove", "Remove a model from which nothing was made. Its files stay.")
add_deletion(corpora, "corpora", "remove", "Remove a corpus that no result names. Its file stays.")

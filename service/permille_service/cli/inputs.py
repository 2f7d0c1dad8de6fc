"""Commands of what goes in: models, corpora, preflight."""

from typing import Annotated

import typer

from permille_service.cli.collections import add_list, add_show
from permille_service.cli.exits import CommandError, Exit
from permille_service.cli.session import AsJson, Key, connect

models = typer.Typer(no_args_is_help=True, help="Base models.")
corpora = typer.Typer(no_args_is_help=True, help="Text to measure sensitivity and perplexity on.")

MODEL_COLUMNS = ("id", "name", "family", "parameters", "scoped_parameters", "size_bytes")
CORPUS_COLUMNS = ("id", "name", "source.kind", "source.path", "size_bytes")


@models.command("add")
def add_model(
    context: typer.Context,
    name: str,
    folder: Annotated[str | None, typer.Option(help="Folder below the model root.")] = None,
    hub: Annotated[str | None, typer.Option(help="Hub repository, as owner/name.")] = None,
    commit: Annotated[str | None, typer.Option(help="Full commit of the repository (40 hex digits).")] = None,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Register a base model.

    Examples:

      permille models add tiny --folder tiny-llama

      permille models add chat --hub owner/name --commit 0123456789abcdef0123456789abcdef01234567
    """
    if (folder is None) == (hub is None) or (hub is None) != (commit is None):
        raise CommandError("expected --folder, or --hub with --commit", Exit.USAGE)
    source = (
        {"kind": "folder", "path": folder}
        if folder is not None
        else {"kind": "hub", "repository": hub, "commit": commit}
    )
    with connect(context, as_json=as_json) as session:
        session.output.show(session.client.post("/v1/models", {"name": name, "source": source}, key=key))


add_list(models, "/v1/models", MODEL_COLUMNS, "List registered models.")
add_show(models, "/v1/models", "model_id", "Show one model.")


@models.command("remove")
def remove_model(context: typer.Context, model_id: str, as_json: AsJson = False) -> None:
    """Forget a model that nothing was made of; its files stay."""
    with connect(context, as_json=as_json) as session:
        session.client.delete(f"/v1/models/{model_id}")
        session.output.show({"removed": model_id})


@corpora.command("add")
def add_corpus(
    context: typer.Context,
    name: str,
    file: Annotated[str | None, typer.Option(help=".jsonl, .jsonl.gz or .txt below the corpus root.")] = None,
    streamed: Annotated[str | None, typer.Option(help="A streamed data set: c4.")] = None,
    split: Annotated[str, typer.Option(help="Of a streamed data set: train or validation.")] = "train",
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Register a corpus.

    Examples:

      permille corpora add stories --file stories.jsonl

      permille corpora add c4 --streamed c4
    """
    if (file is None) == (streamed is None):
        raise CommandError("expected --file or --streamed", Exit.USAGE)
    source = (
        {"kind": "file", "path": file}
        if file is not None
        else {"kind": "streamed", "dataset": streamed, "split": split}
    )
    with connect(context, as_json=as_json) as session:
        session.output.show(session.client.post("/v1/corpora", {"name": name, "source": source}, key=key))


add_list(corpora, "/v1/corpora", CORPUS_COLUMNS, "List registered corpora.")
add_show(corpora, "/v1/corpora", "corpus_id", "Show one corpus.")


@corpora.command("remove")
def remove_corpus(context: typer.Context, corpus_id: str, as_json: AsJson = False) -> None:
    """Forget a corpus that no result refers to; its file stays."""
    with connect(context, as_json=as_json) as session:
        session.client.delete(f"/v1/corpora/{corpus_id}")
        session.output.show({"removed": corpus_id})

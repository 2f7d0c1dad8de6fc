"""Commands about the state of this device: status, data, rollback, reset, forget."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.filesize import decimal

from permille.arguments import named_path
from permille.errors import InputError, OperatorError, PermilleError
from permille.exits import ExitCode
from permille.plain_text import echo
from permille_agent.cli.console import (
    DEVICE,
    PERSONALISE,
    TEXT_FILES,
    JsonOption,
    agrees,
    home_of,
    sentences,
    show,
)
from permille_agent.state.choices import (
    add_references,
    read_references,
    remove_references,
    repair_references,
)
from permille_agent.state.home import Home
from permille_agent.state.lock import hold_lock

if TYPE_CHECKING:
    from permille_agent.link.forget import Erased
    from permille_agent.state.models import Active
    from permille_agent.text.report import DataReport

data = typer.Typer(
    no_args_is_help=True,
    help="Choose the files that the daemon trains on, and from which `chat` and `serve` take passages.",
)


def register(app: typer.Typer) -> None:
    """Add the commands of this module to `app`."""
    app.command(rich_help_panel=DEVICE)(status)
    app.add_typer(data, name="data", rich_help_panel=PERSONALISE)
    app.command(rich_help_panel=DEVICE)(rollback)
    app.command(rich_help_panel=DEVICE)(reset)
    app.command(rich_help_panel=DEVICE)(forget)


def status(context: typer.Context, as_json: JsonOption = False) -> None:
    """Show the enrolment, the package, the model in use, the last run and waiting reports.

    [bold]Examples[/bold]

      permille-agent status

      permille-agent status --json | jq .active.personal
    """
    from permille_agent.cli.status import Status

    now = Status(home_of(context))
    show(now.document(), as_json=as_json, render=now.render)


@data.command("add")
def data_add(
    context: typer.Context,
    paths: Annotated[
        list[Path],
        typer.Argument(parser=named_path, help=f"Files ({TEXT_FILES}) or folders."),
    ],
    as_json: JsonOption = False,
) -> None:
    """Add files or folders that the daemon trains on.

    [bold]Examples[/bold]

      permille-agent data add ~/notes ~/mail/sent.jsonl

    Your files stay where they are. An index with a copy of their text is written to the home folder, which
    only you can read. In it, `chat`, `generate --chat` and `serve` find passages that fit a question.
    """
    home = home_of(context)
    paths = _whole(paths)
    # Wait a few seconds for other short commands. A download or a training may hold the lock for hours.
    with hold_lock(home, "data", wait_s=10.0):
        known = add_references(home, paths)
    report = _index(home, paths)
    document = {
        "data": [str(path) for path in known],
        "text": report.summary(),
        "skipped": report.examples,
    }
    show(document, as_json=as_json)


@data.command("list")
def data_list(context: typer.Context, as_json: JsonOption = False) -> None:
    """List the files and folders that the daemon trains on.

    Those that you only named to `train` are not listed. `permille-agent status` shows those of the last run.
    """
    home = home_of(context)
    known, then = read_references(home), ""
    if not known:
        from permille_agent.training.run import list_runs

        then = "permille-agent data add FILES"
        if list_runs(home):
            then += ", or permille-agent status, which shows the text of the last run"
    show({"data": [str(path) for path in known]}, as_json=as_json, then=then)


@data.command("repair")
def data_repair(context: typer.Context, as_json: JsonOption = False) -> None:
    """Repair a damaged list of files and folders, and rebuild the index of their text.

    [bold]Examples[/bold]

      permille-agent data repair

    Your files stay as they are. This keeps and shows each path that can still be read. Add the missing
    ones again with `permille-agent data add`. The index of your text is built again from these paths.
    """
    from permille_agent.text.notes import erase_index

    home = home_of(context)
    with hold_lock(home, "data", wait_s=10.0):
        kept = repair_references(home)
        erase_index(home)
    if kept:
        _index(home, kept)
    show({"data": [str(path) for path in kept]}, as_json=as_json)


@data.command("remove")
def data_remove(
    context: typer.Context,
    paths: Annotated[
        list[Path],
        typer.Argument(
            parser=named_path, help="Files or folders that you added before, or a folder above them."
        ),
    ],
    as_json: JsonOption = False,
) -> None:
    """Stop training on these files or folders.

    The files stay. Their text is erased from the index in the home folder, even if you only named them to
    `train`. Memories that were made from them are erased, too. The state of the personal model keeps what it
    learned from them until `reset` or `forget`.
    """
    from permille_agent.link.forget import forget_memories
    from permille_agent.text.notes import remove_text

    home = home_of(context)
    with hold_lock(home, "data", wait_s=10.0):
        paths = _whole(paths)
        known = read_references(home)
        added = [path for path in known if any(map(path.is_relative_to, paths))]
        left = tuple(path for path in known if path not in added)
        for path in paths:
            if path not in added and (above := [folder for folder in left if path.is_relative_to(folder)]):
                raise InputError(
                    f"{path} lies in {above[0]}, which you added as a whole. Remove that folder, or move the "
                    "file out of it."
                )
        erased = remove_text(home, paths, kept=left)
        memories = forget_memories(home, paths)
        if added or not (erased or memories):
            left = remove_references(home, added or paths)
    show({"data": [str(path) for path in left], "memories_erased": memories}, as_json=as_json)


def _whole(paths: Iterable[Path]) -> list[Path]:
    """Return absolute paths without `~` and `..`, so that a file has one name however it was given."""
    return [Path(os.path.abspath(path.expanduser())) for path in paths]  # noqa: PTH100 - keep links


def _index(home: Home, paths: Sequence[Path]) -> "DataReport":
    """Read the text of these paths and index it. Without an index, everything but its passages works."""
    from permille_agent.text.notes import index_text
    from permille_agent.text.reading import survey

    # Read without the lock, because reading many files takes long.
    documents, report = survey(paths)
    try:
        with hold_lock(home, "data", wait_s=10.0):
            # Meanwhile, `forget` or `data remove` may have removed a path, whose text must not come back.
            known = read_references(home)
            still = [path for path in paths if path in known]
            found = (one for one in documents if one.source and any(map(one.source.is_relative_to, still)))
            index_text(home, found, still)
    except OperatorError as exc:
        echo(str(exc), err=True)
    return report


def rollback(context: typer.Context, as_json: JsonOption = False) -> None:
    """Return to the model that was in use before the current one.

    [bold]Examples[/bold]

      permille-agent rollback

    Repeat the command to go further back. After the oldest model, it returns to the model where you began.
    """
    from permille_agent.cli.status import Status
    from permille_agent.state import models

    home = home_of(context)
    with hold_lock(home, "rollback"):
        active = models.rollback(home)
    show(_now_active(active), as_json=as_json)
    if Status(home).lost_memory:
        echo(
            "The memory of this model was erased together with its text. To make it again, repeat the "
            "`train` command with the same text.",
            err=True,
        )


def reset(context: typer.Context, as_json: JsonOption = False) -> None:
    """Return to the installed model, without your personal changes.

    [bold]Examples[/bold]

      permille-agent reset

    The personal model is kept: `rollback` brings it back.
    """
    from permille_agent.state import models

    home = home_of(context)
    with hold_lock(home, "reset"):
        active = models.reset(home)
    show(_now_active(active), as_json=as_json)


def _now_active(active: "Active") -> dict[str, object]:
    return {"package": active.package, "run": active.run, "personal": active.run is not None}


def forget(
    context: typer.Context,
    run: Annotated[
        str | None,
        typer.Option("--run", help="Erase only the run with this folder name. The run may be damaged."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Erase everything that the agent learned about you.

    [bold]Examples[/bold]

      permille-agent forget

      permille-agent forget --yes --json

      permille-agent forget --run 1d9f36c21e0a4b6f8d2c7a55

    This erases runs, personal models, references to your files, the index of their text, reports and
    consent. Your files, the enrolment and the packages stay. This also deletes your uploaded logs at the
    service, and leaves all federations. If the service cannot be reached now, the next `permille-agent
    run` tells it.
    """
    from permille_agent.link.extension import choices
    from permille_agent.link.forget import PROMISE, forget_run
    from permille_agent.link.forget import forget as erase

    home = home_of(context)
    if run is not None:
        with hold_lock(home, "forget"):
            gone = forget_run(home, run)
        counts = {"files_erased": gone.files, "bytes_overwritten": gone.size_bytes}
        show(counts, as_json=as_json, render=sentences(_erased_words(gone)))
        return
    question = f"Erase data references, runs and personalisation in {home.root}?"
    if not yes and not agrees(question, declined="Nothing was erased."):
        raise typer.Exit(ExitCode.INTERRUPTED)
    with hold_lock(home, "forget"):
        erased = erase(home)
        waiting = _delete_uploaded(context, erased.deletions_waiting)
    # Call this after the writers' lock is released, because an exchange of rounds needs only its own lock.
    left = erased.federations_left
    told = all([one.tell_service(home) for one in choices()] if left else [])
    deleted = erased.deletions_waiting - waiting
    document = {
        "files_erased": erased.files,
        "bytes_overwritten": erased.size_bytes,
        "uploaded_logs_deleted": deleted,
        "uploaded_logs_to_delete": waiting,
        "federations_left": left,
        "service_told_of_leaving": told,
        "limits": PROMISE,
    }
    knows = "The service was told." if told else "The next `permille-agent run` tells the service."
    words = sentences(
        _erased_words(erased),
        f"The service deleted {deleted} of your uploaded logs." if deleted else "",
        f"You left {left} federation{'s' * (left != 1)}. {knows}" if left else "",
        PROMISE,
    )
    show(document, as_json=as_json, render=words)


def _erased_words(erased: "Erased") -> str:
    files = f"{erased.files} file{'s' * (erased.files != 1)}"
    return f"Erased {files} ({decimal(erased.size_bytes)})."


def _delete_uploaded(context: typer.Context, wanted: int) -> int:
    """Ask the service to delete the uploaded logs. Return the number of reports that still wait."""
    if not wanted:
        return 0
    from permille_agent.link.enrolment import open_api
    from permille_agent.link.report import deliver, read_reports

    home = home_of(context)
    try:
        with open_api(home) as api:
            deliver(home, api)
    except PermilleError as exc:
        # Everything on this device is erased, so `forget` itself has not failed.
        echo(f"Uploaded logs are not deleted yet. Run `permille-agent report` later. Cause: {exc}", err=True)
    return sum(report.waits for report in read_reports(home))

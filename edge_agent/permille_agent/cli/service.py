"""Commands for the link to the service: enroll, pull, verify, report, share-log, share-state, unenroll."""

from __future__ import annotations

import contextlib
import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from permille.errors import InputError
from permille.exits import ExitCode
from permille.plain_console import PlainConsole
from permille_agent.cli.console import DEVICE, SHARING, START, JsonOption, home_of, sentences, show
from permille_agent.state.choices import read_consent, set_sharing
from permille_agent.state.home import Home
from permille_agent.state.lock import LockedError, hold_lock

if TYPE_CHECKING:
    from rich.progress import Progress

    from permille_agent.link.pull import Pulled

share_log = typer.Typer(
    no_args_is_help=True,
    help="Choose whether logs of zeroth-order runs may leave this device. Off by default.",
)
share_state = typer.Typer(no_args_is_help=True, help="Share the trained values. Off by default.")


def register(app: typer.Typer) -> None:
    """Add the commands of this module to `app`."""
    # An invitation may begin with a dash, so an unknown option is taken as an argument.
    app.command(rich_help_panel=START, context_settings={"ignore_unknown_options": True})(enroll)
    app.command(rich_help_panel=START)(pull)


def register_upkeep(app: typer.Typer) -> None:
    """Add the other commands, which `--help` lists further down."""
    app.command(rich_help_panel=DEVICE)(verify)
    app.command(rich_help_panel=SHARING)(report)
    app.add_typer(share_log, name="share-log", rich_help_panel=SHARING)
    app.add_typer(share_state, name="share-state", rich_help_panel=SHARING)
    app.command(rich_help_panel=DEVICE)(unenroll)


def enroll(
    context: typer.Context,
    server: Annotated[
        str, typer.Argument(help="Address of the service, such as https://models.example.org.")
    ],
    invitation: Annotated[
        str,
        typer.Argument(
            envvar="PERMILLE_INVITATION",
            help="The whole invitation line that the operator gave you.",
        ),
    ],
    name: Annotated[
        str | None,
        typer.Option(
            help="Name that the operator sees. Default: the current one, or one made from the public key."
        ),
    ] = None,
    ca_file: Annotated[
        Path | None, typer.Option(help="PEM file of the service's own certificate authority.", exists=True)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Register this device with a service.

    [bold]Examples[/bold]

      permille-agent enroll https://models.example.org INVITATION

      permille-agent enroll https://10.0.0.5:8443 INVITATION --ca-file server.pem --name kitchen

    From then on, the device trusts only signatures under the root that the invitation names.
    """
    from permille_agent.link.enrolment import enroll as enroll_device

    is_new = not context.obj.exists()
    home = home_of(context)
    try:
        with hold_lock(home, "enroll"):
            enrolment = enroll_device(home, server, invitation, name=name, ca_file=ca_file)
    except InputError:
        # The service does not know this device. After other errors it may, so the key must stay then.
        if is_new:
            shutil.rmtree(home.root)
        raise
    show(enrolment.document(), as_json=as_json, then="permille-agent pull")


def pull(context: typer.Context, as_json: JsonOption = False) -> None:
    """Download, verify and install the newest package.

    [bold]Examples[/bold]

      permille-agent pull

      permille-agent pull --json

    An interrupted download continues where it stopped.
    """

    home = home_of(context)
    with hold_lock(home, "pull"):
        pulled = _pull(home, quiet=as_json)
    document = {
        "release": pulled.release.name,
        "version": pulled.release.version,
        "package": pulled.release.manifest_digest,
        "changed": pulled.changed,
        "download_bytes": pulled.download_bytes,
        "package_bytes": pulled.package_bytes,
        "space_freed_bytes": pulled.space_freed_bytes,
        "new_tokenizer": pulled.text_rules or None,
    }
    show(document, as_json=as_json, then="permille-agent train FILES")


def verify(
    context: typer.Context,
    repair: Annotated[bool, typer.Option("--repair", help="Download the damaged parts again.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Check the installed packages for damage on the disk. With --repair, also repair it.

    [bold]Examples[/bold]

      permille-agent verify

      permille-agent verify --repair

    The command hashes every byte. It contacts the service only with --repair. The exit code is 4 if damage
    remains.
    """
    from permille_agent.link.enrolment import open_api
    from permille_agent.link.verify import verify as look_for_damage

    home = home_of(context)
    with hold_lock(home, "verify"):
        if repair:
            with open_api(home) as api:
                found = look_for_damage(home, api)
        else:
            found = look_for_damage(home)
    show(asdict(found), as_json=as_json)
    if found.left:
        raise typer.Exit(ExitCode.PACKAGE_REFUSED)


def report(context: typer.Context, as_json: JsonOption = False) -> None:
    """Send the waiting reports. They contain no text, and logs or trained values only if you share them.

    [bold]Examples[/bold]

      permille-agent report

    Reports that exceeded this device's quota at the service are sent again.
    """
    from permille_agent.link.enrolment import open_api
    from permille_agent.link.report import collect_reports, deliver, queue_again

    home = home_of(context)
    with open_api(home) as api, hold_lock(home, "report"):
        # A kill between the end of a run and its report leaves a run that is not queued yet.
        collect_reports(home)
        queue_again(home)
        delivered = deliver(home, api)
    then = "permille-agent status" if delivered.refused else ""
    show({"delivered": delivered.sent, "refused": delivered.refused}, as_json=as_json, then=then)


@share_log.command("on")
def share_log_on(context: typer.Context, as_json: JsonOption = False) -> None:
    """Share the logs of future runs, which then use zeroth order unless you choose the gradient.

    The service can rebuild your personal model from a log and the package. No other tenant sees the log.
    """
    _set_sharing(context, "share_log", share=True, as_json=as_json)


@share_log.command("off")
def share_log_off(context: typer.Context, as_json: JsonOption = False) -> None:
    """Stop sharing logs, and drop all logs and trained values that wait to be sent.

    Uploaded logs stay at the service until you run `share-log delete`.
    """
    _set_sharing(context, "share_log", share=False, as_json=as_json)


@share_state.command("on")
def share_state_on(context: typer.Context, as_json: JsonOption = False) -> None:
    """Share the trained values of future runs that share no log.

    The service can rebuild your personal model from these values and the package.
    """
    _set_sharing(context, "share_state", share=True, as_json=as_json)


@share_state.command("off")
def share_state_off(context: typer.Context, as_json: JsonOption = False) -> None:
    """Stop sharing trained values, and drop all logs and trained values that wait to be sent.

    Uploaded values stay at the service until you run `share-log delete`.
    """
    _set_sharing(context, "share_state", share=False, as_json=as_json)


@share_log.command("show")
def share_log_show(context: typer.Context, as_json: JsonOption = False) -> None:
    """Show whether you share logs and trained values, and which ones the service has."""
    from permille_agent.link.report import Delivery, read_reports

    home = home_of(context)
    uploaded = [report.run_id for report in read_reports(home) if report.log_delivery is Delivery.SENT]
    consent = read_consent(home)
    document = {"share_log": consent.share_log, "share_state": consent.share_state}
    show({**document, "uploaded_logs": uploaded}, as_json=as_json)


@share_log.command("delete")
def share_log_delete(
    context: typer.Context,
    run: Annotated[
        str | None, typer.Argument(help="Folder name or id of the run. Default: all runs.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Delete the uploaded logs and trained values of one run, or of all runs, at the service.

    [bold]Examples[/bold]

      permille-agent share-log delete

      permille-agent share-log delete 5a0d2d3c-1c51-4b71-9a53-0d4f1f2f7c11
    """
    from permille_agent.link.enrolment import open_api
    from permille_agent.link.report import deliver, want_deletion
    from permille_agent.training.run import named_run

    home = home_of(context)
    with open_api(home) as api, hold_lock(home, "share-log"):
        with contextlib.suppress(InputError):
            # The folder may be gone (`prune_runs`, `forget --run`). Then only the id names the run.
            run = run and named_run(home, run).run_id
        # Store first that the logs must be deleted, so that the next report repeats a failed request.
        wanted = want_deletion(home, run)
        deliver(home, api)
    show({"deleted": wanted}, as_json=as_json)


def unenroll(
    context: typer.Context,
    local_only: Annotated[
        bool,
        typer.Option("--local-only", help="Erase only the files here, for a service that no longer exists."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """End the enrolment, at the service and on this device.

    [bold]Examples[/bold]

      permille-agent unenroll

      permille-agent unenroll --local-only

    The package and the personal model stay usable.
    """
    from permille_agent.link.enrolment import open_api
    from permille_agent.link.forget import unenroll as leave

    home = home_of(context)
    with hold_lock(home, "unenroll"):
        if local_only:
            leave(home, None)
        else:
            with open_api(home) as api:
                leave(home, api)
    document = {"unenrolled": True, "service_told": not local_only}
    untold = " The service was not told." if local_only else ""
    words = sentences(
        f"This device is no longer enrolled.{untold} You can still use the package and the personal model."
    )
    show(document, as_json=as_json, render=words)


def _set_sharing(context: typer.Context, choice: str, *, share: bool, as_json: bool) -> None:
    from permille_agent.link.report import withdraw_logs

    home = home_of(context)
    # Store the choice before taking the lock. A withdrawal must count even while a training holds the lock.
    set_sharing(home, **{choice.removeprefix("share_"): share})
    withdrawn = 0
    if not share:
        with contextlib.suppress(LockedError), hold_lock(home, "share-log", wait_s=2.0):
            # Giving up is safe: another holder of the lock reads the choice before it sends a log.
            withdrawn = withdraw_logs(home)
    show({choice: share, "withdrawn_logs": withdrawn}, as_json=as_json)


def _pull(home: Home, *, quiet: bool) -> Pulled:
    from permille_agent.link.enrolment import open_api, require_enrolment
    from permille_agent.link.pull import pull as pull_release

    enrolment, _ = require_enrolment(home)
    with open_api(home) as api, _progress(quiet) as bar:
        task = bar.add_task("package", total=None)
        return pull_release(
            home,
            api,
            enrolment,
            now_s=time.time(),
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )


def _progress(quiet: bool) -> Progress:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    # Only a person looks at a bar. In a file or a pipe, it would be noise.
    console = PlainConsole(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal)

"""Commands of releases, invitations, devices, runs, access, audit, retention and the fleet."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Annotated, Any

import typer
from rich.filesize import decimal

from permille.exits import CommandError, Exit
from permille.schemas.access import FIRST_DIGEST, AuditEntry, RetentionRule, TenantCreate, TokenCreate
from permille.schemas.releases import ReleaseCreate
from permille_service.cli.commands import (
    DEVICES,
    Key,
    Rows,
    add_action,
    add_create,
    add_deletion,
    add_list,
    add_show,
    command,
)
from permille_service.cli.session import Session
from permille_service.forms import form_of

releases = typer.Typer(no_args_is_help=True, help="Publish packages as signed versions.")
invitations = typer.Typer(no_args_is_help=True, help="Invite devices with one-time codes.")
devices = typer.Typer(no_args_is_help=True, help="List and revoke enrolled devices.")
runs = typer.Typer(no_args_is_help=True, help="Read the reports of devices.")
tokens = typer.Typer(no_args_is_help=True, help="Manage the tokens of operators.")
tenants = typer.Typer(no_args_is_help=True, help="Add and list tenants.")
audit = typer.Typer(no_args_is_help=True, help="Read and check the log of operators' changes.")
retention = typer.Typer(no_args_is_help=True, help="Delete old results and reports by age.")
blobs = typer.Typer(no_args_is_help=True, help="Free the disk space of deleted results.")

DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be deleted, without deleting it.")]

_RELEASES = ("name", "version", "aliases", "manifest_digest", "size_bytes", "yanked", "published_at")
_VERSIONS = (
    *("name", "version", "aliases", "yanked", "devices", "reported", "adopted_fraction"),
    *("outcomes.refused_data", "outcomes.failed"),
)
_GAINS = (
    *("name", "version", "improvement.median", "improvement.low", "improvement.high"),
    *("general_rise", "peak_rss_bytes"),
)
_CHANGES = ("measure", "before", "after", "difference", "low", "high", "verdict")
_VERDICTS = {
    "worse": "Version {new} makes devices worse than {old}. Consider `permille releases rollback`.",
    "better": "Version {new} makes devices better than {old}.",
    "unsure": "There is no sure difference between versions {new} and {old}.",
    "too-few": "Too few devices have reported on versions {new} and {old} to compare them.",
}
_ENTRIES = ("seq", "at", "token_id", "action", "subject")
_RUNS = (
    *("run_id", "device_id", "ended_at", "metrics.outcome", "metrics.steps", "metrics.loss_base"),
    *("metrics.loss_personal", "metrics.general_loss_base", "metrics.general_loss_personal", "log.state"),
)


@command(releases, "publish", form=form_of(ReleaseCreate, "name"))
def publish_release(session: Session, body: dict[str, Any], key: Key = None) -> None:
    """Publish a package as a new version.

    Example:

      permille releases publish tiny-llama --package 577a9004 --alias stable

    To point an alias at an existing version, use `permille releases alias`.
    """
    made = session.client.post("/v1/releases", body, key=key)
    session.output.show(made)
    name, alias = made["name"], body.get("alias")
    # A new version of the same package may be intended: it may have other options for the training.
    versions = list[Any]()
    with suppress(CommandError):  # the version is published, whatever happens now
        versions = session.client.pages("/v1/releases", name=name)
    same = [one["version"] for one in versions if one["manifest_digest"] == made["manifest_digest"]]
    if earlier := [one for one in same if one < made["version"]]:
        session.output.say(
            f"Version {made['version']} has the same package as version {max(earlier)}. If you only wanted "
            "to move an alias, use `permille releases alias` next time."
        )
    if alias is None:
        session.output.say_next(f"permille releases alias {name} stable {made['version']}")
    else:
        session.output.say_next(f"permille invitations create --release {name} --alias {alias}")


@command(releases, "list")
def list_releases(
    session: Session,
    name: Annotated[str | None, typer.Argument(help="List only this release.")] = None,
    limit: Rows = 100,
) -> None:
    """List published versions."""
    session.output.show(session.client.pages("/v1/releases", limit=limit, name=name), _RELEASES)


@command(releases, "yank")
def yank_release(
    session: Session,
    name: Annotated[str, typer.Argument(help="Name of the release.")],
    version: Annotated[int, typer.Argument(help="Version to withdraw.")],
    reason: Annotated[str, typer.Option(help="Reason to record.")] = "withdrawn",
) -> None:
    """Withdraw a version for good, so that no device installs it any more.

    Example:

      permille releases yank tiny-llama 3 --reason "answers in the wrong language"

    Devices that have installed the version keep it. `permille releases rollback` gives them an older package.
    """
    made = session.client.post(f"/v1/releases/{name}/versions/{version}/yank", {"reason": reason})
    session.output.show(made)
    if made["aliases"]:
        session.output.say(
            f"devices that have it: {made['devices']}. They keep it. As long as an alias "
            f"({', '.join(made['aliases'])}) points at this version, devices that follow the alias install "
            "nothing."
        )
        session.output.say_next(f"permille releases rollback {name}")


@command(releases, "rollback")
def roll_back(
    session: Session,
    name: Annotated[str, typer.Argument(help="Name of the release.")],
    to: Annotated[
        int | None,
        typer.Option(
            help="Version to return to. Default: the newest earlier version with another package that was "
            "never yanked."
        ),
    ] = None,
    alias: Annotated[str, typer.Option(help="Alias to move.")] = "stable",
    yanked: Annotated[bool, typer.Option("--yanked", help="Allow a package that was yanked.")] = False,
    key: Key = None,
) -> None:
    """Publish the package of an older version as a new version.

    Example:

      permille releases rollback tiny-llama

      permille releases rollback tiny-llama --to 3

    Devices install it like any version. A second rollback goes further back.
    """
    versions = session.client.pages("/v1/releases", name=name)
    current = next((one for one in versions if alias in one["aliases"]), None)
    if current is None:
        raise CommandError(
            f"No version of {name!r} has the alias {alias!r}. See `permille releases list`.", Exit.NOT_FOUND
        )
    # A rollback publishes an old package again as a new version. Skip all versions with the current package,
    # so that a second rollback goes further back.
    same = [one["version"] for one in versions if one["manifest_digest"] == current["manifest_digest"]]
    withdrawn = {one["manifest_digest"] for one in versions if one["yanked"]}
    older = (
        one
        for one in versions
        if (
            one["version"] == to
            if to is not None
            else one["version"] < min(same) and one["manifest_digest"] not in withdrawn
        )
    )
    chosen = next(older, None)
    if chosen is None:
        wanted = f"version {to}" if to is not None else "older version with another package"
        hint = "" if to is not None else "Yanked packages do not count. Name any version with --to. "
        raise CommandError(
            f"{name!r} has no {wanted}. {hint}See `permille releases list {name}`.", Exit.NOT_FOUND
        )
    body = {"name": name, "package_digest": chosen["manifest_digest"], "alias": alias}
    if yanked:
        body["yanked"] = True
    made = session.client.post("/v1/releases", body, key=key)
    session.output.show(made)
    session.output.say(
        f"Version {made['version']} has the package of version {chosen['version']}. {alias} points at it."
    )
    passed = [one["version"] for one in versions if chosen["version"] < one["version"] < min(same)]
    if to is None and passed:
        session.output.say(
            f"Versions {', '.join(map(str, passed))} are passed over, because their packages were yanked. "
            f"To return to one of them: `permille releases rollback {name} --to {passed[0]} --yanked`."
        )
    if not current["yanked"]:
        session.output.say_next(f"permille releases yank {name} {current['version']}")


@command(releases, "alias")
def set_alias(
    session: Session,
    name: Annotated[str, typer.Argument(help="Name of the release.")],
    alias: Annotated[str, typer.Argument(help="Alias, such as stable.")],
    version: Annotated[int, typer.Argument(help="Version that the alias will point at.")],
) -> Any:
    """Point an alias at a version.

    Example:

      permille releases alias tiny-llama canary 3
    """
    return session.client.put(f"/v1/releases/{name}/aliases/{alias}", {"version": version})


@command(releases, "unalias")
def remove_alias(
    session: Session,
    name: Annotated[str, typer.Argument(help="Name of the release.")],
    alias: Annotated[str, typer.Argument(help="Alias to remove.")],
) -> Any:
    """Remove an alias."""
    session.client.delete(f"/v1/releases/{name}/aliases/{alias}")
    return {"removed": alias}


@command(invitations, "create")
def create_invitation(
    session: Session,
    release: Annotated[str, typer.Option(help="Release that the device follows.")],
    alias: Annotated[str, typer.Option(help="Alias that the device follows.")] = "stable",
    key: Key = None,
) -> None:
    """Invite one device to a release.

    Example:

      permille invitations create --release tiny-llama

    The code is shown only once. One device can enrol with it, within 24 hours.
    """
    _require_alias(session, release, alias)
    made = session.client.post("/v1/invitations", {"release": release, "alias": alias}, key=key)
    session.output.show(made)
    # The device needs a copy of the CA file. The printed command expects this copy in the current folder.
    trust = "" if session.ca_file is None else f" --ca-file {session.ca_file.name}"
    session.output.say("next, on the device:")
    session.output.say(f"  permille-agent enroll {session.client.url} {made['invitation']}{trust}")


def _require_alias(session: Session, release: str, alias: str) -> None:
    versions = session.client.pages("/v1/releases", name=release)
    known = sorted({name for version in versions for name in version["aliases"]})
    if not versions:
        raise CommandError(f"There is no release {release!r}. See `permille releases list`.", Exit.NOT_FOUND)
    if alias not in known:
        raise CommandError(
            f"The release {release!r} has no alias {alias!r} (it has: {', '.join(known) or 'none'}). Create "
            "the alias with `permille releases alias`.",
            Exit.NOT_FOUND,
        )


@command(runs, "list")
def list_runs(
    session: Session,
    device: Annotated[str | None, typer.Option(help="List only runs of this device.")] = None,
    limit: Rows = 100,
) -> None:
    """List the runs that devices reported.

    Losses are those of the trained weights, without a device's memory of its text.
    """
    device_id = None if device is None else session.id_of("devices", device)
    session.output.show(session.client.pages("/v1/runs", limit=limit, device_id=device_id), _RUNS)


@command(audit, "list")
def list_entries(
    session: Session,
    last: Annotated[int, typer.Option(min=1, help="Number of newest entries to list.")] = 50,
) -> None:
    """List the changes that operators made. The newest comes last."""
    session.output.show([one.model_dump(mode="json") for one in _entries(session)][-last:], _ENTRIES)


@command(audit, "verify")
def verify_entries(
    session: Session,
    expect: Annotated[str | None, typer.Option(help="Digest that an earlier call printed.")] = None,
) -> Any:
    """Check that no entry of the audit log was changed or removed.

    Example:

      permille audit verify --expect sha256:93f0...

    Store the printed digest outside of the server. Only with `--expect` does the check notice that the newest
    entries are missing.
    """
    digest, count, found = FIRST_DIGEST, 0, expect in (None, FIRST_DIGEST)
    for entry in _entries(session):
        count += 1
        # The chain of digests shows whether entries were changed, or removed from the middle. Only the
        # earlier digest (`expect`) shows whether entries at the end were removed.
        if entry.seq != count or entry.digest_after(digest) != entry.digest:
            raise CommandError(
                f"Entry {count} does not follow the entry with digest {digest}: somebody changed the log.",
                Exit.FAILED,
            )
        digest = entry.digest
        found = found or digest == expect
    if not found:
        raise CommandError(
            f"None of the {count} entries has the digest {expect}: somebody changed the log.", Exit.FAILED
        )
    return {"entries": count, "digest": digest}


def _entries(session: Session) -> Iterator[AuditEntry]:
    seq = 0
    while page := session.client.get("/v1/audit", after=seq, limit=200):
        yield from (AuditEntry.model_validate(one) for one in page)
        seq = page[-1]["seq"]


@command(retention, "show")
def show_rule(session: Session) -> Any:
    """Show the retention rule."""
    return session.client.get("/v1/retention")


@command(retention, "set", form=form_of(RetentionRule))
def set_rule(session: Session, body: dict[str, Any]) -> Any:
    """Set the retention rule.

    Example:

      permille retention set --result-days 90 --keep-newest 5 --log-days 30 --job-days 90

    A limit that you leave out is not set, and deletes nothing. By default, workers apply the rule every hour.
    """
    return session.client.put("/v1/retention", body)


@command(retention, "apply")
def apply_rule(session: Session, dry_run: DryRun = False) -> Any:
    """Apply the retention rule now. This deletes at most 50 records of each kind, so repeat it until it
    deletes nothing.

    Example:

      permille retention apply --dry-run

    `permille blobs collect` then frees the disk space of these records.
    """
    return session.client.post(f"/v1/retention/apply?dry_run={str(dry_run).lower()}", {})


@command(blobs, "collect")
def collect_blobs(session: Session, dry_run: DryRun = False) -> None:
    """Delete the stored bytes that no record names any more.

    Example:

      permille blobs collect --dry-run

    By default, workers do this every hour. Bytes younger than PERMILLE_COLLECTION_GRACE_S stay.
    """
    found = session.client.post(f"/v1/blobs/collect?dry_run={str(dry_run).lower()}", {})
    if session.output.as_json:
        session.output.show(found)
        return
    for name in found["removed"]:
        session.output.say(name)
    session.output.say(
        f"{'would be deleted' if dry_run else 'deleted'}: {found['removed_count']} blobs and sparse models, "
        f"{decimal(found['removed_bytes'])}. No record names {decimal(found['unreferenced_bytes'])} of the "
        f"{decimal(found['stored_bytes'])} that are stored."
    )


def add_fleet(app: typer.Typer) -> None:
    """Add the command `fleet`."""

    @command(app, "fleet", panel=DEVICES)
    def show_fleet(session: Session) -> None:
        """Count devices by version, agent, engine, and the time they were last seen. Show each version's
        effect.

        Example:

          permille fleet
        """
        fleet = session.client.get("/v1/fleet")
        if session.output.as_json:
            session.output.show(fleet)
            return
        session.output.say(f"devices: {_count(fleet['devices'])}")
        for heading in ("seen", "agents", "engines"):
            groups = (f"{one['name']} {_count(one['devices'])}" for one in fleet[heading])
            session.output.say(f"{heading}: {', '.join(groups) or 'none yet'}")
        _show_versions(session, fleet["versions"])


def _show_versions(session: Session, versions: list[dict[str, Any]]) -> None:
    """Show versions in two tables, because a single table would be wider than most terminals."""
    session.output.show(versions, _VERSIONS)
    if any(one["improvement"] or one["peak_rss_bytes"] for one in versions):
        session.output.say(
            "\nimprovement in nats per token, with a 95 % confidence interval (low, high); rise of the loss "
            "on general text; peak memory"
        )
        session.output.show(versions, _GAINS)


def _count(devices: int | None) -> str:
    return "hidden (fewer than ten)" if devices is None else str(devices)


@command(releases, "show")
def show_release(
    session: Session,
    name: Annotated[str, typer.Argument(help="Name of the release.")],
    version: Annotated[int | None, typer.Argument(help="Version. Default: the newest.")] = None,
    against: Annotated[
        int | None,
        typer.Option(help="Version to compare with. Default: the newest earlier one that was not yanked."),
    ] = None,
) -> None:
    """Compare a version with an earlier one, by the reports of devices.

    Losses are those of the trained weights, without a device's memory of its text.

    Example:

      permille releases show tiny-llama
    """
    path = f"/v1/releases/{name}/comparison"
    try:
        found = session.client.get(path, version=version, against=against)
    except CommandError as exc:
        if exc.code is not Exit.NOT_FOUND or against is not None or session.output.as_json:
            raise
        _show_alone(session, name, version)
        return
    if session.output.as_json:
        session.output.show(found)
        return
    new, old = found["version"], found["against"]
    _show_versions(session, [new, old, *_others(session, name, new["version"], old["version"])])
    if found["changes"]:
        session.output.say("\nadopted, failed: shares of devices; improvement, loss: nats per token")
        session.output.show(found["changes"], _CHANGES)
    session.output.say(_VERDICTS[found["verdict"]].format(new=new["version"], old=old["version"]))


def _show_alone(session: Session, name: str, version: int | None) -> None:
    """Show a version that has no earlier version to compare with."""
    versions = [one["version"] for one in session.client.pages("/v1/releases", name=name)]
    if not versions:
        raise CommandError(f"There is no release {name!r}. See `permille releases list`.", Exit.NOT_FOUND)
    asked = version or max(versions)
    session.output.show(session.client.get(f"/v1/releases/{name}/versions/{asked}"))
    if known := _others(session, name):
        _show_versions(session, known)
    session.output.say(
        f"Version {asked} is not compared, because it has no earlier version, or all earlier versions were "
        "yanked."
    )


def _others(session: Session, name: str, *compared: int) -> list[dict[str, Any]]:
    """Return the other versions of a release that are on devices or in reports, including yanked versions."""
    versions = session.client.get("/v1/fleet")["versions"]
    return [one for one in versions if one["name"] == name and one["version"] not in compared]


add_list(invitations, "invitations", ("id", "release", "alias", "state", "used_by", "expires_at"))
add_action(invitations, "invitations", "revoke", "Revoke an invitation.")

add_list(devices, "devices", ("id", "name", "state", "release", "alias", "last_seen_at"))
add_show(devices, "devices")
add_action(devices, "devices", "revoke", "Exclude a device for good. Its next request is refused.")

add_show(runs, "runs")
add_deletion(runs, "runs", "delete-log", "Delete the shared log of a run.", part="/log")
add_deletion(runs, "runs", "delete", "Delete a run with its numbers and its log.")

add_create(
    tokens, "tokens", form_of(TokenCreate, "name"), "Create an operator token. Its secret is shown once."
)
add_list(tokens, "tokens", ("id", "name", "role", "created_at", "last_used_at", "expires_at"))
add_deletion(tokens, "tokens", "revoke", "Revoke an operator token.")

add_create(tenants, "tenants", form_of(TenantCreate, "name"), "Add a tenant.")
add_list(tenants, "tenants", ("id", "name", "created_at"))

"""Commands of what goes out and comes back: releases, invitations, devices, runs; of who may do what; and of
what is kept."""

from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.filesize import decimal

from permille.schemas.access import FIRST_DIGEST, AuditEntry, RetentionRule, TenantCreate, TokenCreate
from permille.schemas.releases import ReleaseCreate
from permille_service.cli.commands import (
    Key,
    Rows,
    add_action,
    add_create,
    add_deletion,
    add_list,
    add_show,
    command,
)
from permille_service.cli.exits import CommandError, Exit
from permille_service.cli.forms import form_of
from permille_service.cli.session import Session

releases = typer.Typer(no_args_is_help=True, help="Signed versions of a name, and aliases.")
invitations = typer.Typer(no_args_is_help=True, help="One-time codes that enrol one device.")
devices = typer.Typer(no_args_is_help=True, help="Enrolled devices.")
runs = typer.Typer(no_args_is_help=True, help="What devices report.")
tokens = typer.Typer(no_args_is_help=True, help="Operator tokens.")
tenants = typer.Typer(no_args_is_help=True, help="Tenants.")
audit = typer.Typer(no_args_is_help=True, help="What operators changed.")
retention = typer.Typer(no_args_is_help=True, help="What goes by itself, and after how many days.")
blobs = typer.Typer(no_args_is_help=True, help="What the blob store holds.")

DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would go, and let nothing go.")]

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
    "worse": "version {new} makes devices worse than {old}: `permille releases rollback`",
    "better": "version {new} makes devices better than {old}",
    "unsure": "no sure difference between versions {new} and {old}",
    "too-few": "too few devices have reported versions {new} and {old} to compare them",
}
_ENTRIES = ("seq", "at", "token_id", "action", "subject")
_RUNS = (
    *("run_id", "device_id", "metrics.outcome", "metrics.steps", "metrics.loss_base"),
    *("metrics.loss_personal", "metrics.general_loss_base", "metrics.general_loss_personal", "log.state"),
)


@command(releases, "publish", form=form_of(ReleaseCreate, "name"))
def publish_release(session: Session, body: dict[str, Any], key: Key = None) -> None:
    """Publish a package: list it for devices.

    Example:

      permille releases publish tiny-llama --package 577a9004 --alias stable
    """
    made = session.client.post("/v1/releases", body, key=key)
    session.output.show(made)
    name, alias = made["name"], body.get("alias")
    if alias is None:
        session.output.say_next(f"permille releases alias {name} stable {made['version']}")
    else:
        session.output.say_next(f"permille invitations create --release {name} --alias {alias}")


@command(releases, "list")
def list_releases(
    session: Session,
    name: Annotated[str | None, typer.Argument(help="Only this name.")] = None,
    limit: Rows = 100,
) -> None:
    """List published versions."""
    session.output.show(session.client.pages("/v1/releases", limit=limit, name=name), _RELEASES)


@command(releases, "yank")
def yank_release(
    session: Session,
    name: str,
    version: int,
    reason: Annotated[str, typer.Option(help="Why.")] = "withdrawn",
) -> None:
    """Withdraw a version: devices no longer install it. Says how many have it."""
    made = session.client.post(f"/v1/releases/{name}/versions/{version}/yank", {"reason": reason})
    session.output.show(made)
    if made["aliases"]:
        session.output.say(
            f"devices that have it: {made['devices']}. They keep it, and nobody installs anything, while "
            f"{', '.join(made['aliases'])} points at it"
        )
        session.output.say_next(f"permille releases rollback {name}")


@command(releases, "rollback")
def roll_back(
    session: Session,
    name: str,
    to: Annotated[
        int | None, typer.Option(help="Version; else the newest before this package that was not yanked.")
    ] = None,
    alias: Annotated[str, typer.Option(help="The alias to move.")] = "stable",
    yanked: Annotated[bool, typer.Option("--yanked", help="Also to a version that was yanked.")] = False,
    key: Key = None,
) -> None:
    """Publish an older version's package as a new version, and point the alias at it: devices take it as they
    take any, and the fleet's numbers tell it from what came between. Rolled back again, it goes further back.

    Example:

      permille releases rollback tiny-llama --to 3
    """
    versions = session.client.pages("/v1/releases", name=name)
    current = next((one for one in versions if alias in one["aliases"]), None)
    if current is None:
        raise CommandError(
            f"no alias {alias!r} of the release {name!r}: see `permille releases list`", Exit.NOT_FOUND
        )
    same = [one["version"] for one in versions if one["manifest_digest"] == current["manifest_digest"]]
    older = (
        one
        for one in versions
        if (one["version"] == to if to is not None else one["version"] < min(same) and not one["yanked"])
    )
    chosen = next(older, None)
    if chosen is None:
        below = f"version {to}" if to is not None else f"version below {min(same)} that was not yanked"
        hint = "" if to is not None else "name one with --to, "
        raise CommandError(
            f"no {below} of {name!r}: {hint}see `permille releases list {name}`", Exit.NOT_FOUND
        )
    if chosen["yanked"] and not yanked:
        raise CommandError(
            f"expected a version that was not yanked, got {to}, withdrawn for: {chosen['yanked_reason']}. "
            "With --yanked devices get its package all the same",
            Exit.REFUSED,
        )
    body = {"name": name, "package_digest": chosen["manifest_digest"], "alias": alias}
    made = session.client.post("/v1/releases", body, key=key)
    session.output.show(made)
    session.output.say(
        f"version {made['version']} is the package of version {chosen['version']}; {alias} points at it"
    )
    if not current["yanked"]:
        session.output.say_next(f"permille releases yank {name} {current['version']}")


@command(releases, "alias")
def set_alias(session: Session, name: str, alias: str, version: int) -> Any:
    """Point an alias at a version.

    Example:

      permille releases alias tiny-llama canary 3
    """
    return session.client.put(f"/v1/releases/{name}/aliases/{alias}", {"version": version})


@command(releases, "unalias")
def remove_alias(session: Session, name: str, alias: str) -> Any:
    """Remove an alias."""
    session.client.delete(f"/v1/releases/{name}/aliases/{alias}")
    return {"removed": alias}


@command(invitations, "create")
def create_invitation(
    session: Session,
    release: Annotated[str, typer.Option(help="Name of the release to follow.")],
    alias: Annotated[str, typer.Option(help="Alias to follow.")] = "stable",
    key: Key = None,
) -> None:
    """Invite one device to a release. The code is shown once, is good for 24 hours and for one device.

    Example:

      permille invitations create --release tiny-llama
    """
    _require_alias(session, release, alias)
    made = session.client.post("/v1/invitations", {"release": release, "alias": alias}, key=key)
    session.output.show(made)
    trust = "" if session.ca_file is None else f" --ca-file {session.ca_file.name}"
    session.output.say("next, on the device:")
    session.output.say(f"  permille-agent enroll {session.client.url} {made['invitation']}{trust}")


def _require_alias(session: Session, release: str, alias: str) -> None:
    versions = session.client.pages("/v1/releases", name=release)
    known = sorted({name for version in versions for name in version["aliases"]})
    if not versions:
        raise CommandError(f"no release {release!r}: see `permille releases list`", Exit.NOT_FOUND)
    if alias not in known:
        raise CommandError(
            f"no alias {alias!r} of the release {release!r}, only {', '.join(known) or 'versions'}: "
            f"see `permille releases alias`",
            Exit.NOT_FOUND,
        )


@command(runs, "list")
def list_runs(
    session: Session,
    device: Annotated[str | None, typer.Option(help="Only this device's.")] = None,
    limit: Rows = 100,
) -> None:
    """List runs."""
    device_id = None if device is None else session.id_of("devices", device)
    session.output.show(session.client.pages("/v1/runs", limit=limit, device_id=device_id), _RUNS)


@command(audit, "list")
def list_entries(
    session: Session, last: Annotated[int, typer.Option(min=1, help="So many of the newest.")] = 50
) -> None:
    """List changes by operators, the newest last."""
    session.output.show([one.model_dump(mode="json") for one in _entries(session)][-last:], _ENTRIES)


@command(audit, "verify")
def verify_entries(
    session: Session,
    expect: Annotated[str | None, typer.Option(help="A digest that was written down before.")] = None,
) -> Any:
    """Check that no entry was changed or taken out; write down the digest that it prints.

    Example:

      permille audit verify --expect sha256:93f0...
    """
    digest, count, found = FIRST_DIGEST, 0, expect is None
    for entry in _entries(session):
        count += 1
        if entry.seq != count or entry.digest_after(digest) != entry.digest:
            raise CommandError(
                f"expected entry {count} after {digest}, got another: the log was changed", Exit.FAILED
            )
        digest = entry.digest
        found = found or digest == expect
    if not found:
        raise CommandError(f"expected an entry with the digest {expect}, got {count} others", Exit.FAILED)
    return {"entries": count, "digest": digest}


def _entries(session: Session) -> Iterator[AuditEntry]:
    seq = 0
    while page := session.client.get("/v1/audit", after=seq, limit=200):
        yield from (AuditEntry.model_validate(one) for one in page)
        seq = page[-1]["seq"]


@command(retention, "show")
def show_rule(session: Session) -> Any:
    """Show the rule."""
    return session.client.get("/v1/retention")


@command(retention, "set", form=form_of(RetentionRule))
def set_rule(session: Session, body: dict[str, Any]) -> Any:
    """Set the rule: what is not named here never goes. Workers apply it every hour.

    Example:

      permille retention set --result-days 90 --keep-newest 5 --log-days 30 --job-days 90
    """
    return session.client.put("/v1/retention", body)


@command(retention, "apply")
def apply_rule(session: Session, dry_run: DryRun = False) -> Any:
    """Apply the rule now, to at most 50 of each; `permille blobs collect` then frees the bytes.

    Example:

      permille retention apply --dry-run
    """
    return session.client.post(f"/v1/retention/apply?dry_run={str(dry_run).lower()}", {})


@command(blobs, "collect")
def collect_blobs(session: Session, dry_run: DryRun = False) -> None:
    """Delete what no row names and was stored before the grace. Workers do so by themselves, too.

    Example:

      permille blobs collect --dry-run
    """
    found = session.client.post(f"/v1/blobs/collect?dry_run={str(dry_run).lower()}", {})
    if session.output.as_json:
        session.output.show(found)
        return
    for name in found["removed"]:
        session.output.say(name)
    session.output.say(
        f"{'would go' if dry_run else 'gone'}: {found['removed_count']} blobs and sparse models, "
        f"{decimal(found['removed_bytes'])}; no row names {decimal(found['unreferenced_bytes'])} "
        f"of {decimal(found['stored_bytes'])}"
    )


def add_fleet(app: typer.Typer) -> None:
    """Add the command `fleet`."""

    @command(app, "fleet")
    def show_fleet(session: Session) -> None:
        """Count devices: by version and what it did for them, by agent and engine, by when they were seen.

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
    """Two tables, as one would be wider than terminals are."""
    session.output.show(versions, _VERSIONS)
    if any(one["improvement"] or one["peak_rss_bytes"] for one in versions):
        session.output.say(
            "\nimprovement in nats a token, low and high with 95 % confidence; rise of the loss "
            "on general text; peak memory"
        )
        session.output.show(versions, _GAINS)


def _count(devices: int | None) -> str:
    return "fewer than ten, or what would tell them" if devices is None else str(devices)


@command(releases, "show")
def show_release(
    session: Session,
    name: str,
    version: Annotated[int | None, typer.Argument(help="Else the newest.")] = None,
    against: Annotated[int | None, typer.Option(help="Else the one before that was not yanked.")] = None,
) -> None:
    """Show what devices made of a version, and whether it makes them worse than another.

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
        session.output.say("\nadopted, failed: shares of devices; improvement, loss: nats a token")
        session.output.show(found["changes"], _CHANGES)
    session.output.say(_VERDICTS[found["verdict"]].format(new=new["version"], old=old["version"]))


def _show_alone(session: Session, name: str, version: int | None) -> None:
    """Show a version that has none before it."""
    versions = [one["version"] for one in session.client.pages("/v1/releases", name=name)]
    if not versions:
        raise CommandError(f"no release {name!r}: see `permille releases list`", Exit.NOT_FOUND)
    asked = version or max(versions)
    session.output.show(session.client.get(f"/v1/releases/{name}/versions/{asked}"))
    if known := _others(session, name):
        _show_versions(session, known)
    session.output.say(f"no version before {asked} to compare it with: none that was not yanked")


def _others(session: Session, name: str, *compared: int) -> list[dict[str, Any]]:
    """Further versions of a release that devices have or have reported, yanked ones among them."""
    versions = session.client.get("/v1/fleet")["versions"]
    return [one for one in versions if one["name"] == name and one["version"] not in compared]


add_list(invitations, "invitations", ("id", "release", "alias", "state", "used_by", "expires_at"))
add_action(invitations, "invitations", "revoke", "Make an invitation useless.")

add_list(devices, "devices", ("id", "name", "state", "release", "alias", "last_seen_at"))
add_show(devices, "devices")
add_action(devices, "devices", "revoke", "Shut a device out for good, with effect on its next request.")

add_show(runs, "runs")
add_deletion(runs, "runs", "delete-log", "Forget the log of a run and its bytes.", part="/log")
add_deletion(runs, "runs", "delete", "Forget a run, its metrics and its log.")

add_create(
    tokens, "tokens", form_of(TokenCreate, "name"), "Make an operator token. Its secret is shown once."
)
add_list(tokens, "tokens", ("id", "name", "role", "created_at", "last_used_at", "expires_at"))
add_deletion(tokens, "tokens", "revoke", "Revoke an operator token.")

add_create(tenants, "tenants", form_of(TenantCreate, "name"), "Add a tenant.")
add_list(tenants, "tenants", ("id", "name", "created_at"))

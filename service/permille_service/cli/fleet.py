"""Commands of what goes out and comes back: releases, invitations, devices, runs, tokens, tenants."""

from typing import Annotated

import typer

from permille_service.cli.collections import add_list, add_show
from permille_service.cli.session import AsJson, Key, Rows, connect

releases = typer.Typer(no_args_is_help=True, help="Signed versions of a name, and aliases.")
invitations = typer.Typer(no_args_is_help=True, help="One-time codes that enrol one device.")
devices = typer.Typer(no_args_is_help=True, help="Enrolled devices.")
runs = typer.Typer(no_args_is_help=True, help="What devices report.")
tokens = typer.Typer(no_args_is_help=True, help="Operator tokens.")
tenants = typer.Typer(no_args_is_help=True, help="Tenants.")

RELEASE_COLUMNS = ("name", "version", "aliases", "manifest_digest", "size_bytes", "yanked", "published_at")
DEVICE_COLUMNS = ("id", "name", "state", "release", "alias", "agent_version", "last_seen_at")
INVITATION_COLUMNS = ("id", "release", "alias", "state", "used_by", "expires_at")
RUN_COLUMNS = (
    "run_id",
    "device_id",
    "metrics.outcome",
    "metrics.steps",
    "metrics.loss_base",
    "metrics.loss_personal",
    "log.state",
    "log.job_id",
)
TOKEN_COLUMNS = ("id", "name", "role", "created_at", "last_used_at", "expires_at")

ReleaseFlag = Annotated[str, typer.Option("--release", help="Name of the release to follow.")]
AliasFlag = Annotated[str, typer.Option("--alias", help="Alias to follow.")]


@releases.command("publish")
def publish_release(
    context: typer.Context,
    name: str,
    package: Annotated[str, typer.Option(help="Digest of the package.")],
    alias: Annotated[str | None, typer.Option(help="Alias to point at it, such as stable.")] = None,
    version: Annotated[int | None, typer.Option(min=1, help="Default: the next one.")] = None,
    expires_in_days: Annotated[int, typer.Option(min=1)] = 365,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Sign and publish a package.

    Example:

      permille releases publish tiny-llama --package sha256:... --alias stable
    """
    body = {
        "name": name,
        "package_digest": package,
        "version": version,
        "alias": alias,
        "expires_in_days": expires_in_days,
    }
    with connect(context, as_json=as_json) as session:
        session.output.show(session.client.post("/v1/releases", body, key=key))


@releases.command("list")
def list_releases(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(help="Only this name.")] = None,
    limit: Rows = 100,
    as_json: AsJson = False,
) -> None:
    """List published versions."""
    with connect(context, as_json=as_json) as session:
        session.output.show(session.client.pages("/v1/releases", limit=limit, name=name), RELEASE_COLUMNS)


@releases.command("yank")
def yank_release(
    context: typer.Context,
    name: str,
    version: int,
    reason: Annotated[str, typer.Option(help="Why.")] = "withdrawn",
    as_json: AsJson = False,
) -> None:
    """Withdraw a version: devices no longer install it."""
    with connect(context, as_json=as_json) as session:
        path = f"/v1/releases/{name}/versions/{version}/yank"
        session.output.show(session.client.post(path, {"reason": reason}))


@releases.command("alias")
def set_alias(context: typer.Context, name: str, alias: str, version: int, as_json: AsJson = False) -> None:
    """Point an alias at a version.

    Example:

      permille releases alias tiny-llama canary 3
    """
    with connect(context, as_json=as_json) as session:
        session.output.show(session.client.put(f"/v1/releases/{name}/aliases/{alias}", {"version": version}))


@releases.command("unalias")
def remove_alias(context: typer.Context, name: str, alias: str, as_json: AsJson = False) -> None:
    """Remove an alias."""
    with connect(context, as_json=as_json) as session:
        session.client.delete(f"/v1/releases/{name}/aliases/{alias}")
        session.output.show({"removed": alias})


@invitations.command("create")
def create_invitation(
    context: typer.Context,
    release: ReleaseFlag,
    alias: AliasFlag = "stable",
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Invite one device. The code is shown once, is good for 24 hours and for one device.

    Example:

      permille invitations create --release tiny-llama
    """
    with connect(context, as_json=as_json) as session:
        body = {"release": release, "alias": alias}
        session.output.show(session.client.post("/v1/invitations", body, key=key))


add_list(invitations, "/v1/invitations", INVITATION_COLUMNS, "List invitations, without their codes.")


@invitations.command("revoke")
def revoke_invitation(context: typer.Context, invitation_id: str, as_json: AsJson = False) -> None:
    """Make an invitation useless."""
    with connect(context, as_json=as_json) as session:
        session.client.post(f"/v1/invitations/{invitation_id}/revoke")
        session.output.show({"revoked": invitation_id})


add_list(devices, "/v1/devices", DEVICE_COLUMNS, "List devices.")
add_show(devices, "/v1/devices", "device_id", "Show one device.")


@devices.command("revoke")
def revoke_device(context: typer.Context, device_id: str, as_json: AsJson = False) -> None:
    """Shut a device out for good, with effect on its next request."""
    with connect(context, as_json=as_json) as session:
        session.output.show(session.client.post(f"/v1/devices/{device_id}/revoke"))


@runs.command("list")
def list_runs(
    context: typer.Context,
    device: Annotated[str | None, typer.Option(help="Only this device's.")] = None,
    limit: Rows = 100,
    as_json: AsJson = False,
) -> None:
    """List runs."""
    with connect(context, as_json=as_json) as session:
        found = session.client.pages("/v1/runs", limit=limit, device_id=device)
        session.output.show(found, RUN_COLUMNS)


add_show(runs, "/v1/runs", "run_id", "Show one run.")


@runs.command("delete-log")
def delete_log(context: typer.Context, run_id: str, as_json: AsJson = False) -> None:
    """Forget the log of a run and its bytes."""
    with connect(context, as_json=as_json) as session:
        session.client.delete(f"/v1/runs/{run_id}/log")
        session.output.show({"deleted": f"log of {run_id}"})


@runs.command("delete")
def delete_run(context: typer.Context, run_id: str, as_json: AsJson = False) -> None:
    """Forget a run, its metrics and its log."""
    with connect(context, as_json=as_json) as session:
        session.client.delete(f"/v1/runs/{run_id}")
        session.output.show({"deleted": run_id})


@tokens.command("create")
def create_token(
    context: typer.Context,
    name: str,
    role: Annotated[str, typer.Option(help="admin, operator or viewer.")] = "viewer",
    tenant: Annotated[str | None, typer.Option(help="Id of another tenant.")] = None,
    expires_in_days: Annotated[int | None, typer.Option(min=1)] = None,
    as_json: AsJson = False,
) -> None:
    """Make an operator token. Its secret is shown once."""
    body = {"name": name, "role": role, "tenant_id": tenant, "expires_in_days": expires_in_days}
    with connect(context, as_json=as_json) as session:
        session.output.show(session.client.post("/v1/tokens", body))


add_list(tokens, "/v1/tokens", TOKEN_COLUMNS, "List operator tokens, without their secrets.")


@tokens.command("revoke")
def revoke_token(context: typer.Context, token_id: str, as_json: AsJson = False) -> None:
    """Revoke an operator token."""
    with connect(context, as_json=as_json) as session:
        session.client.delete(f"/v1/tokens/{token_id}")
        session.output.show({"revoked": token_id})


@tenants.command("create")
def create_tenant(context: typer.Context, name: str, as_json: AsJson = False) -> None:
    """Add a tenant."""
    with connect(context, as_json=as_json) as session:
        session.output.show(session.client.post("/v1/tenants", {"name": name}))


add_list(tenants, "/v1/tenants", ("id", "name", "created_at"), "List tenants.")

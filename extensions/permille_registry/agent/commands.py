"""Commands of `permille-agent registry`: use, show, off."""

from pathlib import Path
from typing import Annotated

import typer

from permille_agent.cli.console import JsonOption, home_of, show
from permille_agent.state.lock import hold_lock

registry = typer.Typer(no_args_is_help=True, help="Fetch the files of packages from an OCI registry.")


@registry.command("use")
def use_registry(
    context: typer.Context,
    address: Annotated[str, typer.Argument(help="Repository: oci://HOST/NAME, without a tag.")],
    ca_file: Annotated[
        Path | None,
        typer.Option(
            help="PEM file of the registry's own certificate authority.", exists=True, resolve_path=True
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Fetch the files of packages from a registry instead of the service.

    [bold]Examples[/bold]

      permille-agent registry use oci://registry.example.org/models/assistant

    Signed metadata still comes from the service. The registry can neither replace a file nor go back to an
    older version. Log in with `skopeo login HOST` or `docker login HOST` if the registry asks for it.
    """
    from permille.errors import InputError
    from permille_agent.link.enrolment import COMMAND, load_enrolment
    from permille_agent.state.home import write_record
    from permille_registry.address import Address
    from permille_registry.agent.source import ChosenRegistry

    parsed = Address.parse(address)
    if parsed.tag:
        raise InputError(
            f"Leave out :{parsed.tag}. The signed metadata says which files belong to a version."
        )
    home = home_of(context)
    with hold_lock(home, "registry", wait_s=10.0):
        write_record(home.registry, ChosenRegistry(address=str(parsed), ca_file=str(ca_file or "")))
    then = "permille-agent pull" if load_enrolment(home) else COMMAND
    show({"address": str(parsed)}, as_json=as_json, then=then)


@registry.command("show")
def show_registry(context: typer.Context, as_json: JsonOption = False) -> None:
    """Show the registry in use."""
    from permille_registry.agent.source import read_choice

    chosen = read_choice(home_of(context))
    show({"address": chosen and chosen.address}, as_json=as_json)


@registry.command("off")
def stop_registry(context: typer.Context, as_json: JsonOption = False) -> None:
    """Fetch the files of packages from the service again."""
    home = home_of(context)
    with hold_lock(home, "registry", wait_s=10.0):
        home.registry.unlink(missing_ok=True)
    show({"address": None}, as_json=as_json)

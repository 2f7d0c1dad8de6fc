"""Commands `permille releases push` and `pull`."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal

from permille.errors import InputError, OperatorError, PermilleError, RetryableError
from permille.exits import CommandError, Exit
from permille_service.cli.commands import command
from permille_service.cli.fleet import releases
from permille_service.cli.session import Session

if TYPE_CHECKING:
    from permille_registry.address import Address
    from permille_registry.client import Registry

__all__ = ["releases"]

_Name = Annotated[str, typer.Argument(help="Name of the release.")]
_Address = Annotated[str, typer.Argument(help="Repository: oci://HOST/NAME.")]
_Version = Annotated[int | None, typer.Option(help="Version. Default: the newest one that was not yanked.")]


@command(releases, "push")
def push_release(
    session: Session,
    name: _Name,
    address: Annotated[
        str,
        typer.Argument(help="Repository: oci://HOST/NAME or oci://HOST/NAME:TAG. Default tag: the version."),
    ],
    version: _Version = None,
) -> Any:
    """Push the package of a version to an OCI registry.

    Example:

      permille releases push assistant oci://registry.example.org/models/assistant

    Run the same command again after an interruption. Each file of the package is one layer, with the same
    digest. Log in with `skopeo login HOST` or `docker login HOST`. Devices fetch the files there after
    `permille-agent registry use`.
    """
    from permille.digests import digest_of
    from permille_registry.address import Address
    from permille_registry.artifact import MANIFEST_TYPE, artifact_of, blobs_of, config_of

    repository = Address.parse(address)
    chosen = _chosen(session, name, version)
    digest, tag = chosen["manifest_digest"], repository.tag or str(chosen["version"])
    package = session.client.read(f"/v1/packages/{digest}/manifest")
    if digest_of(package) != digest:
        raise CommandError(
            f"The service sent a manifest that does not have the digest {digest}.", Exit.FAILED
        )
    config = config_of(name, chosen["version"], package)
    artifact = artifact_of(config, package)
    sent = 0
    with _opened(session, repository, "pull,push") as registry:
        for blob in blobs_of(package):
            # The manifest is not among the blobs that it lists.
            file = "manifest" if blob.digest == digest else f"blobs/{blob.digest}"
            read = partial(_range, session, f"/v1/packages/{digest}/{file}")
            added = registry.upload(blob.digest, blob.size_bytes, read)
            session.output.say(f"{decimal(added):>10} sent of {decimal(blob.size_bytes)}: {blob.path}")
            sent += added
        registry.upload(digest_of(config), len(config), lambda begin, end: config[begin:end])
        registry.put_manifest(tag, MANIFEST_TYPE, artifact)
    return {
        "address": f"oci://{repository.registry}/{repository.name}:{tag}",
        "artifact_digest": digest_of(artifact),
        "package_digest": digest,
        "sent_bytes": sent,
    }


@command(releases, "pull")
def pull_release(
    session: Session,
    name: _Name,
    address: _Address,
    into: Annotated[Path, typer.Option(help="Folder for the files of the package, by their digests.")],
    version: _Version = None,
) -> Any:
    """Pull the package of a version from an OCI registry into a folder.

    Example:

      permille releases pull assistant oci://registry.example.org/models/assistant --into packages

    The service names the digest of the package, and each file must have the digest that the package states.
    So the registry cannot replace anything, and tags do not matter. Run the same command again after an
    interruption. Python opens the package with `Package.open(BlobFolder(Path("packages")), DIGEST)`.
    """
    from permille.package.blobs import BlobFolder
    from permille.package.limits import MAX_MANIFEST_BYTES
    from permille_registry.address import Address
    from permille_registry.artifact import blobs_of

    repository = Address.parse(address)
    digest = _chosen(session, name, version)["manifest_digest"]
    blobs = BlobFolder(into)
    with _opened(session, repository, "pull") as registry:
        package = registry.read(digest, limit_bytes=MAX_MANIFEST_BYTES)
        for blob in blobs_of(package)[1:]:
            registry.download(blob.digest, blob.size_bytes, blobs)
            session.output.say(f"{decimal(blob.size_bytes):>10} {blob.path}")
    # The manifest comes last, so a package that has one is complete.
    blobs.put_bytes(package, expected=digest)
    return {"folder": str(into), "package_digest": digest}


def _range(session: Session, path: str, begin: int, end: int) -> bytes:
    return session.client.read(path, begin=begin, end=end)


def _chosen(session: Session, name: str, version: int | None) -> Any:
    if version is not None:
        return session.client.get(f"/v1/releases/{name}/versions/{version}")
    versions = session.client.pages("/v1/releases", name=name)
    found = next((one for one in versions if not one["yanked"]), None)
    if found is None:
        raise CommandError(
            f"No version of {name!r} is published. See `permille releases list`.", Exit.NOT_FOUND
        )
    return found


@contextmanager
def _opened(session: Session, address: "Address", actions: str) -> Iterator["Registry"]:
    """Open a registry, and turn its errors into those of commands."""
    from permille_registry.client import Registry

    try:
        with Registry(address, actions, ca_file=session.ca_file) as registry:
            yield registry
    except InputError:
        raise
    except RetryableError as exc:
        raise CommandError(f"{exc} Run the command again: it continues.", Exit.RETRY) from exc
    except OperatorError as exc:
        raise CommandError(str(exc), Exit.ACCESS) from exc
    except PermilleError as exc:
        raise CommandError(str(exc), Exit.REFUSED) from exc

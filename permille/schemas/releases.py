"""Releases: signed pointers from a name and a growing version to a package, and aliases of them."""

from typing import Annotated, Final

from pydantic import Field

from permille.schemas.devices import Signature
from permille.schemas.fields import (
    MAX_INTEGER,
    TEXT_PATTERN,
    Closed,
    Count,
    Digest,
    Name,
    Timestamp,
    WholeNumber,
)

RELEASE_CONTEXT: Final = b"permille-release-1\0"

Version = Annotated[int, Field(strict=True, ge=1, le=MAX_INTEGER, examples=[1]), WholeNumber]


class ReleaseCreate(Closed):
    """Publish a package under a name. The version is the next one unless named; versions only grow."""

    name: Name = Field(description="of the release")
    package_digest: Digest = Field(description="the package to publish")
    version: Version | None = Field(default=None, description="larger than all before; else the next one")
    expires_in_days: Annotated[
        int, Field(strict=True, ge=1, le=3650, description="after which devices refuse it"), WholeNumber
    ] = 365
    alias: Name | None = Field(default=None, description="alias to point at this version, e.g. `stable`")


class Release(Closed):
    """One published version. `signature` is over the canonical JSON of
    {name, version, manifest_digest, expires_at}, prefixed with `permille-release-1` and NUL."""

    name: Name
    version: Version
    manifest_digest: Digest
    expires_at: Annotated[int, Field(ge=0, le=MAX_INTEGER, description="unix seconds", examples=[1893456000])]
    key_id: str
    signature: Signature
    size_bytes: Count = Field(description="bytes of the manifest and all layers")
    yanked: bool


class ReleaseRecord(Release):
    """A published version as operators see it."""

    published_at: Timestamp
    aliases: list[Name]
    yanked_reason: str | None = None


class ReleaseYank(Closed):
    """Why a version is withdrawn."""

    reason: Annotated[str, Field(min_length=1, max_length=500, pattern=TEXT_PATTERN)] = "withdrawn"


class AliasPut(Closed):
    """Which version an alias points at."""

    version: Version


class Alias(Closed):
    """An alias of a release, such as `stable` or `canary`."""

    release: Name
    alias: Name
    version: Version

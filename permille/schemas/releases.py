"""Releases: a name and a growing version for a package, and aliases of them."""

from typing import Annotated

from pydantic import Field

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

Version = Annotated[int, Field(strict=True, ge=1, le=MAX_INTEGER, examples=[1]), WholeNumber]


class ReleaseCreate(Closed):
    """Publish a package under a name, as its next version."""

    name: Name = Field(description="of the release")
    package_digest: Digest = Field(description="the package to publish")
    alias: Name | None = Field(default=None, description="alias to point at this version, e.g. `stable`")


class Release(Closed):
    """One published version. Devices believe none of it: they hold it against the signed trust metadata."""

    name: Name
    version: Version
    manifest_digest: Digest
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

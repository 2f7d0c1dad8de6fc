"""Names that pages and forms show instead of ids, such as those of models, devices, tokens and packages."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from sqlalchemy import select
from sqlalchemy.orm import Session

from permille.schemas.jobs import JobKind
from permille.store import artifacts, rows, tables
from permille.store.ids import Prefix
from permille.store.rows import Window
from permille_console.extension import console_extensions

Choice = tuple[str, str]
"""A value that an operator can choose, and the label to show for it."""
_NAMED: Final[Mapping[str, Any]] = {
    Prefix.MODEL: tables.Model,
    Prefix.CORPUS: tables.Corpus,
    Prefix.GROUP: tables.DeviceGroup,
    Prefix.DEVICE: tables.Device,
    Prefix.OPERATOR: tables.OperatorToken,
    Prefix.FEDERATION: tables.Federation,
}
_LISTED: Final[Mapping[str, Any]] = {
    "models": tables.Model,
    "corpora": tables.Corpus,
    "groups": tables.DeviceGroup,
}
_OBJECT: Final = re.compile(r"/v1/([a-z]+)/([^/]+)")
_SHOWN: Final = frozenset({"jobs", "masks", "packages", "releases"})
"""The collections of the API whose objects have a page in this package."""
_NEWEST: Final = Window(limit=rows.MAX_LIMIT)


def names_of(session: Session, tenant_id: str, texts: Iterable[object]) -> dict[str, str]:
    """Return the names of the objects that the texts refer to, by their ids or digests.

    Texts that are neither the id of a named row nor the digest of a released package are left out.
    """
    wanted, found = {text for text in texts if isinstance(text, str)}, dict[str, str]()
    for prefix, table in _NAMED.items():
        ids = {text for text in wanted if text.startswith(f"{prefix}_")}
        if ids:
            query = select(table.id, table.name).where(table.tenant_id == tenant_id, table.id.in_(ids))
            found |= {row.id: row.name for row in session.execute(query)}
    digests = {text for text in wanted if text.startswith("sha256:")}
    if digests:
        found |= {
            digest: ", ".join(names) for digest, names in _versions(session, tenant_id, digests).items()
        }
    return found


def lines_of(payload: object, place: str = "") -> Iterator[tuple[str, object]]:
    """Iterate over the values of a request, with the dotted name of each. Leave out empty values."""
    if isinstance(payload, dict):
        for name, value in payload.items():
            yield from lines_of(value, f"{place}.{name}" if place else name)
    elif payload not in (None, []):
        yield place, ", ".join(map(str, payload)) if isinstance(payload, list) else payload


def page_at(path: str | None) -> str | None:
    """Return the path of the page that shows an object, given the object's path in the API.

    Return None if no page shows it.
    """
    found = _OBJECT.match(path or "")
    if found is None:
        return None
    collection = "jobs" if found[1] == "builds" else found[1]
    shown = _SHOWN.union(*(extension.shown for extension in console_extensions()))
    return f"/ui/{collection}/{found[2]}" if collection in shown else None


def choices_of(session: Session, tenant_id: str, collection: str) -> list[Choice]:
    """Return the newest records of a collection as choices.

    Return no choices for collections whose ids the operator types as text.
    """
    if collection in _LISTED:
        named = rows.list_all(session, _LISTED[collection], tenant_id=tenant_id, window=_NEWEST).items
        return [(row.id, row.name) for row in named]
    if collection not in ("packages", "masks"):
        return []
    kind = JobKind(collection.removesuffix("s"))
    made = artifacts.list_artifacts(session, tenant_id=tenant_id, kind=kind, window=_NEWEST).items
    names = names_of(session, tenant_id, [text for row in made for text in (row.model_id, row.digest)])
    return [(artifacts.key_of(row), _words(row, names)) for row in made]


def _words(row: tables.Artifact, names: dict[str, str]) -> str:
    """Describe a package or mask by its releases, its model, and the time when it was made."""
    told = (names.get(row.digest), names.get(row.model_id), f"{row.created_at:%d %b %H:%M}")
    return ", ".join(filter(None, told))


def known_names(session: Session, tenant_id: str) -> tuple[list[str], list[str]]:
    """Return the names of a tenant's releases, and the names of all aliases."""
    releases = select(tables.Release.name).where(tables.Release.tenant_id == tenant_id)
    aliases = select(tables.Alias.alias).where(tables.Alias.tenant_id == tenant_id)
    return sorted(session.scalars(releases.distinct())), sorted(session.scalars(aliases.distinct()))


def _versions(session: Session, tenant_id: str, digests: Iterable[str]) -> dict[str, list[str]]:
    """Return the released versions of packages, by the package's digest. The newest version comes first."""
    release, found = tables.Release, dict[str, list[str]]()
    query = select(release).where(release.tenant_id == tenant_id, release.package_digest.in_(digests))
    for row in session.scalars(query.order_by(release.id.desc()).limit(1000)):
        found.setdefault(row.package_digest, []).append(f"{row.name} {row.version}")
    return found

"""The list of texts (`sources.toml`): what each is, from where, under which licence. Reads no text."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from permille.errors import InputError

DEFAULT_SOURCES = Path(__file__).with_name("sources.toml")
FORMATS = ("cnxml", "jsonl", "markdown", "reviews", "stories", "text", "wikitext")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One body of text. `origin` None: it lies in the data folder, else in `<texts>/<name>` after a fetch."""

    name: str
    group: str
    files: tuple[str, ...]
    format: str
    licence: str
    origin: str | None = None
    commit: str | None = None
    exclude: tuple[str, ...] = ()
    require: str | None = None
    omit_last: int = 0
    cap_mb: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceList:
    """All sources, the share of each group in training, and the globs of the text that must stay unseen."""

    sources: tuple[Source, ...]
    mixture: dict[str, float]
    forbidden: dict[str, tuple[str, ...]]


def read_sources(path: Path = DEFAULT_SOURCES) -> SourceList:
    """The list in a TOML file.

    Raises:
        InputError: a source misses a field, names an unknown format, or its group has no share.
    """
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    sources = tuple(_source(row) for row in table["source"])
    mixture = {str(group): float(share) for group, share in table["mixture"].items()}
    for source in sources:
        if source.group not in mixture:
            raise InputError(f"expected a share for group {source.group!r} of {source.name} in [mixture]")
    forbidden = {str(kind): tuple(globs) for kind, globs in table["forbidden"].items()}
    return SourceList(sources=sources, mixture=mixture, forbidden=forbidden)


def _source(row: dict[str, Any]) -> Source:
    fields = dict(row)
    for name in ("files", "exclude"):
        if name in fields:
            fields[name] = tuple(fields[name])
    try:
        source = Source(**fields)
    except TypeError as exc:
        raise InputError(f"source {row.get('name', '?')!r}: {exc}") from exc
    if source.format not in FORMATS:
        raise InputError(f"{source.name}: expected a format of {', '.join(FORMATS)}, got {source.format!r}")
    if (source.origin is None) != (source.commit is None):
        raise InputError(f"{source.name}: expected origin and commit together")
    return source

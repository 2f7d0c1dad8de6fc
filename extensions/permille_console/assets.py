"""The two files that all pages load: one has all styles, and the other all scripts.

Both include files of other projects (vendored). The name of each file contains a digest of its bytes, so that
browsers can keep the file for ever.
"""

import gzip
import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parent
STYLES: Final = ("vendor/uPlot.min.css", "page.css")
SCRIPTS: Final = ("vendor/htmx.min.js", "vendor/uPlot.iife.min.js", "page.js")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asset:
    """A file in two forms: `body` is uncompressed, and `packed` is compressed."""

    name: str
    media_type: str
    body: bytes
    packed: bytes


@cache
def load() -> tuple[Asset, Asset]:
    """Read and compress the styles and the scripts, once a process."""
    return _bundle(STYLES, "css", "text/css"), _bundle(SCRIPTS, "js", "text/javascript")


def _bundle(parts: tuple[str, ...], suffix: str, media_type: str) -> Asset:
    body = b"\n".join((FOLDER / part).read_bytes() for part in parts)
    name = f"page-{hashlib.sha256(body).hexdigest()[:16]}.{suffix}"
    return Asset(name=name, media_type=media_type, body=body, packed=gzip.compress(body, mtime=0))

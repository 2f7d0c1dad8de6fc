"""Prepare pages for the site, as a hook of MkDocs (mkdocs.yml).

MkDocs cannot link to files outside of docs/. FORMAT.md and some other such files become pages. Links to
further files become plain text.
"""

import os
import re
from pathlib import Path
from typing import Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

# Files outside of docs/, and their pages on the site.
_PAGES: Final = {
    "permille/FORMAT.md": "reference/format.md",
    "deploy/README.md": "reference/deploy.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
_LINK: Final = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)#\s]+|[^)#\s:]+\.md)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside of docs/ as pages."""
    root = Path(config.config_file_path).parent
    for source, target in _PAGES.items():
        files.append(File.generated(config, target, abs_src_path=str(root / source)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Change links to the places of their files on the site."""
    sources = {target: source for source, target in _PAGES.items()}
    here = sources.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def moved(link: re.Match[str]) -> str:
        named = os.path.normpath(os.path.join(os.path.dirname(here), link[2]))  # noqa: PTH118, PTH120
        target = _PAGES.get(named, named.removeprefix("docs/") if named.startswith("docs/") else "")
        if not target:
            return link[1]
        return f"[{link[1]}]({os.path.relpath(target, Path(page.file.src_uri).parent)}{link[3] or ''})"

    return _LINK.sub(moved, markdown)

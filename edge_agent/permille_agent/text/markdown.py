"""Text of a Markdown note, without front matter and the targets of links.

Obsidian and other programs keep Markdown notes in a folder. Emphasis and headings stay, because people type
them. HTML within Markdown, and references whose targets stand elsewhere, are not handled.
"""

import re
from typing import Final

_MAX_FRONT_MATTER: Final = 1 << 14
# A block of YAML keys at the very beginning. Text between two rules is no front matter: each line must be a
# key, an item of a list or indented, and the first line must be a key.
_FRONT_MATTER: Final = re.compile(
    r"---[ \t]*\n"
    r"(?:[A-Za-z_][\w-]*(?: [\w-]+)?:(?:[ \t][^\n]*)?\n(?:(?:[ \t]+|-[ \t]|\])[^\n]*\n)*)+"
    r"(?:---|\.\.\.)[ \t]*(?:\n|\Z)"
)
_SMALL_KEY: Final = re.compile(r"^[a-z_][\w-]*(?: [\w-]+)?:", re.MULTILINE)
_MARKUP: Final = re.compile(
    r"(?P<code>^(?P<fence>`{3,}|~{3,})[^\n]*\n.*?(?:^(?P=fence)|\Z)|`[^`\n]+`)"
    r"|!\[\[[^\[\]\n]{0,500}\]\]"  # an embedded note or picture
    r"|\[\[(?:[^\[\]|\n]{0,500}\|)?(?P<page>[^\[\]\n]{1,500})\]\]"
    r"|!?\[(?P<words>[^\[\]\n]{0,500})\]\((?:[^()\n]|\([^()\n]{0,500}\)){0,2000}\)"
    r"|[ \t]\^[\w-]+$",  # the name of a block, to which links lead
    re.MULTILINE | re.DOTALL,
)


def split_front_matter(text: str) -> tuple[str, str]:
    r"""Return the front matter of a note, or an empty string, and the rest.

    Example:
        >>> split_front_matter("---\ntags: garden\n---\nSow early.")
        ('---\ntags: garden\n---\n', 'Sow early.')
    """
    found = _FRONT_MATTER.match(text, 0, _MAX_FRONT_MATTER)
    # Between two rules, a person may write "Evening: rain". Programs write at least one key in small letters.
    end = found.end() if found and _SMALL_KEY.search(found[0]) else 0
    return text[:end], text[end:]


def without_targets(text: str) -> str:
    """Return a text with the words of its links only. Code stays as it is.

    Example:
        >>> without_targets("See [[2024-05-01|the first of May]] and [this](https://example.org).")
        'See the first of May and this.'
    """
    return _MARKUP.sub(lambda found: found["code"] or found["page"] or found["words"] or "", text)

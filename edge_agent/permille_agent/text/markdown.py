"""Text of a Markdown note, without front matter and the targets of links.

Obsidian and other programs keep Markdown notes in a folder. Emphasis and headings stay, because people type
them. Data that plugins of Obsidian hide in comments, such as drawings, is left out. HTML within Markdown is
not handled.
"""

import re
from typing import Final

_MAX_FRONT_MATTER: Final = 1 << 14
# A block of YAML keys at the very beginning. Text between two rules is no front matter: each line must be a
# key, an item of a list, indented or empty, and the first line must be a key.
_FRONT_MATTER: Final = re.compile(
    r"---[ \t]*\n"
    r"(?:(?:\"[^\"\n]+\"|'[^'\n]+'|[^\W\d][\w.-]*(?: [\w-]+)?):(?:[ \t][^\n]*)?\n"
    r"(?:(?:(?:[ \t]+|-[ \t]|\])[^\n]*)?\n)*+)++"
    r"(?:---|\.\.\.)[ \t]*(?:\n|\Z)"
)
_SMALL_KEY: Final = re.compile(r"^[\"']?[a-z_][\w.-]*(?: [\w-]+)?[\"']?:", re.MULTILINE)
# The same in TOML, as Hugo and Zola write it: keys, tables, and lists of several lines.
_TOML: Final = re.compile(
    r"\+\+\+[ \t]*\n(?:(?:[\w.\"'-]+[ \t]*=[^\n]*|\[{1,2}[^\[\]\n]+\]{1,2}|[ \t#\]][^\n]*)?\n)++"
    r"\+\+\+[ \t]*(?:\n|\Z)"
)
_PARTS: Final = (
    r"(?P<code>^(?P<fence>`{3,}|~{3,})[^\n]*\n.*?(?:^(?P=fence)|\Z)|`[^`\n]+`)"
    r"|!\[\[[^\[\]\n]{0,500}\]\]"  # an embedded note or picture
    r"|\[\[(?:[^\[\]|\n]{0,500}\|)?(?P<page>[^\[\]\n]{1,500}?)(?:#\^[\w-]+)?\]\]"
    r"|!?\[[^\[\]\n]{0,500}\]\(<?data:[^()\s]*\)|<img\b[^<>]{0,500}\ssrc=[\"']?data:[^<>]*>"  # a picture
    r"|!?\[(?P<words>[^\[\]\n]{0,500})\]\((?:[^()\n]|\([^()\n]{0,500}\)){0,2000}\)"
    r"|(?<=> )\[![\w|-]+\][+-]?[ \t]*"  # the kind of a callout
    r"|[ \t]\^[\w-]+$"  # the name of a block, to which links lead
)
# A comment of several lines. If a comment has no end, no later one has an end either. So the rest is matched
# as well: a search for the end of each one would take hours in a long note.
_COMMENT: Final = r"|^%%[^%\n]*\n(?:.*?%%[ \t]*$|(?P<open>.*))"
_MARKUP: Final = re.compile(_PARTS + _COMMENT, re.MULTILINE | re.DOTALL)
_WITHOUT_COMMENTS: Final = re.compile(_PARTS, re.MULTILINE | re.DOTALL)

_DEFINITION: Final = re.compile(
    r"^ {0,3}\[(?!\^)(?P<label>[^\[\]\n]{1,500})\]:[ \t]+<?(?:[a-z][a-z+.-]*:|[/.#])[^\s<>]*>?"
    r"(?:[ \t]+(?:\"[^\"\n]*\"|'[^'\n]*'|\([^()\n]*\)))?[ \t]*(?:\n|\Z)",
    re.MULTILINE,
)
_REFERENCE: Final = re.compile(r"!?\[([^\[\]\n]{0,500})\]\[([^\[\]\n]{0,500})\]")


def split_front_matter(text: str) -> tuple[str, str]:
    r"""Return the front matter of a note, or an empty string, and the rest.

    Example:
        >>> split_front_matter("---\ntags: garden\n---\nSow early.")
        ('---\ntags: garden\n---\n', 'Sow early.')
    """
    found = _FRONT_MATTER.match(text, 0, _MAX_FRONT_MATTER)
    # Between two rules, a person may write "Evening: rain". Programs write at least one key in small letters.
    if not found or not _SMALL_KEY.search(found[0]):
        found = _TOML.match(text, 0, _MAX_FRONT_MATTER)
    end = found.end() if found else 0
    return text[:end], text[end:]


def without_targets(text: str) -> str:
    """Return a text with the words of its links only. Code stays as it is.

    Example:
        >>> without_targets("See [[2024-05-01|the first of May]] and [this](https://example.org).")
        'See the first of May and this.'
    """
    text = _MARKUP.sub(_words, text)
    if labels := {found["label"].casefold() for found in _DEFINITION.finditer(text)}:
        text = _REFERENCE.sub(lambda one: one[1] if (one[2] or one[1]).casefold() in labels else one[0], text)
        text = _DEFINITION.sub("", text)
    return text


def _words(found: re.Match[str]) -> str:
    if found.groupdict().get("open") is not None:
        return _WITHOUT_COMMENTS.sub(_words, found[0])
    return found["code"] or found["page"] or found["words"] or ""

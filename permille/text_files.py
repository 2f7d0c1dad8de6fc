"""Kinds of the files that a device trains on."""

import re
from pathlib import Path
from typing import Final

_ALIASES: Final = {
    **{kind: kind for kind in (".txt", ".md", ".jsonl", ".html", ".eml", ".mbox", ".pdf", ".docx", ".rtf")},
    **{kind: kind for kind in (".csv", ".emlx", ".json", ".odt")},
    **dict.fromkeys((".text", ".org", ".rst", ".adoc"), ".txt"),
    ".tsv": ".csv",
    ".docm": ".docx",
    **dict.fromkeys((".markdown", ".mdown", ".mkd"), ".md"),
    **dict.fromkeys((".htm", ".xhtml"), ".html"),
}
TEXT_SUFFIXES: Final = tuple(_ALIASES)
"""Endings of the names of files that a device trains on."""
_ADVICE: Final = {
    **dict.fromkeys((".zip", ".7z", ".rar", ".tar", ".gz", ".tgz"), "unpack it"),
    **dict.fromkeys((".doc", ".pages", ".wpd", ".wps"), "save it as .docx or .txt"),
    **dict.fromkeys((".xls", ".xlsx", ".ods", ".numbers"), "save it as .csv"),
    **dict.fromkeys((".msg", ".olm", ".ost", ".pst"), "save it as .eml or .mbox"),
    **dict.fromkeys((".key", ".odp", ".one", ".ppt", ".pptx"), "save it as .pdf"),
    **dict.fromkeys((".enex", ".epub"), "save it as .html"),
}
# In a folder, only `.json` files with these names are read, because others may be anything: an export of
# ChatGPT or Claude, of Telegram, or of Open WebUI (all others).
_EXPORT: Final = re.compile(
    r"(?:conversations|result|(?:all-)?chats?-export|feedback-history-export)[\w-]*\.json", re.IGNORECASE
)
_MAILDIR: Final = ("cur", "new")


def text_kind(path: Path, *, is_named: bool = False) -> str | None:
    """Return the kind of a file as the usual ending of its name, or None if it is no text.

    Files in a maildir are mail (`.eml`), and a file without an ending that begins as a mailbox is one.

    Example:
        >>> text_kind(Path("notes/plan.MARKDOWN"))
        '.md'

    Args:
        path: an existing regular file, or a path whose name tells the kind.
        is_named: whether the user named the file itself. Then a `.json` file may have any name.

    Raises:
        OSError: the file has no ending and cannot be read.
    """
    if path.parent.name in _MAILDIR and is_mail_folder(path.parent.parent):
        return ".eml"
    if (kind := _ALIASES.get(path.suffix.lower())) == ".json":
        return kind if is_named or _EXPORT.fullmatch(path.name) else None
    # Mail programs keep mailboxes in files such as `Inbox`.
    if kind is None and not path.suffix and path.is_file():
        with path.open("rb") as file:
            return ".mbox" if file.read(5) == b"From " else None
    return kind


def advice(name: str | Path) -> str:
    """Return advice for a file of a kind that is not read, in brackets after a space, or an empty string.

    Example:
        >>> advice("mails.zip")
        ' (unpack it)'
    """
    ending = Path(f"x{name}").suffix.lower()  # the name may be an ending alone
    return f" ({_ADVICE[ending]})" if ending in _ADVICE else ""


def is_mail_folder(path: Path) -> bool:
    """Return whether a folder is a maildir. The name of a maildir may begin with a dot."""
    return all((path / name).is_dir() for name in _MAILDIR)

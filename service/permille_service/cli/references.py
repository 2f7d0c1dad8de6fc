"""References to objects: an id, a name, or an unambiguous prefix of an id."""

import re
from typing import TYPE_CHECKING, Any

from permille.exits import CommandError, Exit

if TYPE_CHECKING:
    from permille_service.cli.client import Client

_FULL = re.compile(
    r"[a-z]{2,8}_[0-9a-hjkmnp-tv-z]{26}|sha256:[0-9a-f]{64}|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
)
LOOKED_THROUGH = 1000
"""Number of newest records in which a name or a prefix is searched."""
_KEYS = {"packages": "digest", "runs": "run_id"}
_SHOWN = 5
# Texts that are not accepted as the beginning of an id. An empty text often comes from an unset shell
# variable. If there is only one record, the empty text would match a record that the user did not mean.
_NO_BEGINNING = ("", "sha256:")


def resolve(client: "Client", collection: str, text: str) -> str:
    """Return the id of a record that the user names by its name, its id, or the first characters of its id.

    Raises:
        CommandError: no record matches, or several records match.
    """
    if _FULL.fullmatch(text):
        return text
    key = _KEYS.get(collection, "id")
    one, known = singular(collection), f"See `permille {collection} list`."
    rows: list[dict[str, Any]] = client.pages(f"/v1/{collection}", limit=LOOKED_THROUGH)
    found = [row[key] for row in rows if text and text in (row.get("name"), _made_name(row))]
    if not found and text in _NO_BEGINNING:
        raise CommandError(
            f"{text!r} names no {one}. Give its name, its id, or the first characters of the id. {known}",
            Exit.USAGE,
        )
    found = found or [
        row[key]
        for row in rows
        if row[key].startswith(text) or row[key].removeprefix("sha256:").startswith(text)
    ]
    if len(found) == 1:
        return str(found[0])
    if not found:
        raise CommandError(f"There is no {one} {text!r}. {known}", Exit.NOT_FOUND)
    more = "" if len(found) <= _SHOWN else f" and {len(found) - _SHOWN} more"
    raise CommandError(
        f"{text!r} can mean {', '.join(found[:_SHOWN])}{more}. Give more characters of the id.", Exit.USAGE
    )


def _made_name(row: dict[str, Any]) -> Any:
    """Return the name of the model that a sparsification made, or None for other records."""
    return (row.get("request") or {}).get("name")


def singular(collection: str) -> str:
    """Return the word for one record of a collection.

    Example:
        >>> singular("corpora")
        'corpus'
        >>> singular("masks")
        'mask'
    """
    return "corpus" if collection == "corpora" else collection.removesuffix("s")

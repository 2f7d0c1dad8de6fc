"""Tables for people, with short ids and digests, units such as MB, and times such as "3 min ago".

Every command accepts a shortened id or digest (see `references`). `--json` prints all values in full.
"""

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from permille.time_left import span

_ID = re.compile(r"[a-z]{2,8}_[0-9a-hjkmnp-tv-z]{26}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
# Characters that a table shows of each kind of value. After its prefix, an id begins with ten characters that
# encode its time in milliseconds. Ids of the same millisecond look equal at this length, so `_shortened` then
# shows more characters.
_SHORT = {_ID: len("_") + 10, _DIGEST: len("sha256:") + 12, _UUID: 8}
_SUFFIX = re.compile("_(id|at|bytes|fraction)$")
_WORD = 24

Row = Mapping[str, Any]


def table_of(rows: Sequence[Row], columns: Sequence[str], *, now: datetime | None = None) -> Table:
    """Make a table of records.

    A column can show a nested field. For example, the column `source.path` has the heading `path`.
    """
    table = Table(box=None, pad_edge=False, header_style="bold")
    cells = [[_inside(row, column) for row in rows] for column in columns]
    for column, values in zip(columns, cells, strict=True):
        values[:] = _shortened(values)
        table.add_column(
            _SUFFIX.sub("", column.rpartition(".")[2]),
            overflow="fold",
            # Do not wrap values that people copy as one word. Wrap sentences and long names instead.
            no_wrap=all(len(str(value)) <= _WORD and " " not in str(value) for value in values),
        )
    for i in range(len(rows)):
        table.add_row(
            *(escape(cell(name, values[i], now)) for name, values in zip(columns, cells, strict=True))
        )
    return table


def fields_of(record: Row, *, now: datetime | None = None) -> Table:
    """Make a table of a record's fields. Each nested field gets a line of its own.

    The id or digest of the record itself is shown in full. Ids and digests of other objects are shortened.
    """
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    for name, value in _lines("", record):
        shown = value if name in ("id", "digest", "run_id", "made") else _shortened([value])[0]
        table.add_row(f"[bold]{escape(name)}[/bold]", escape(cell(name, shown, now)))
    return table


def records_in(record: Row) -> dict[str, list[Row]]:
    """Return the lists of records inside a record. Commands show each of them as a separate table."""
    return {
        name: value
        for name, value in record.items()
        if isinstance(value, list) and value and all(isinstance(one, Mapping) for one in value)
    }


def flat(row: Row) -> Row:
    """Flatten a row: the nested field `perplexity.before` becomes `perplexity before`.

    Example:
        >>> flat({"perplexity": {"before": 12.5}})
        {'perplexity before': 12.5}
    """
    return {name.replace(".", " "): value for name, value in _lines("", row)}


def cell(name: str, value: Any, now: datetime | None = None) -> str:
    """Format a value by its type and by the name of its field.

    Example:
        >>> cell("size_bytes", 1_234_567)
        '1.2 MB'
        >>> cell("fraction", 0.25)
        '25%'
    """
    if value in ([], {}):
        return "none"
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{key.replace('_', ' ')} {cell(key, part, now)}" for key, part in value.items())
    if isinstance(value, (int, float)) and name.endswith("bytes"):
        return decimal(int(value))
    if name.endswith("_at"):
        return when(value, now or datetime.now(UTC))
    if name.endswith(("fraction", "progress")):
        return f"{value:.0%}"
    if name.endswith(("seconds", "seconds_left", "eta_s")):
        return span(float(value))
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(str(one) for one in _shortened(value))
    return str(value).removeprefix("application/vnd.permille.")


def when(value: str | float, now: datetime) -> str:
    """Format a point in time relative to now, such as "3 min ago" or "in 24 h"."""
    then = (
        datetime.fromtimestamp(value, UTC)
        if isinstance(value, (int, float))
        else datetime.fromisoformat(value)
    )
    seconds = (now - then).total_seconds()
    return f"{span(seconds)} ago" if seconds >= 0 else f"in {span(-seconds)}"


def short(value: str) -> str:
    """Shorten an id or a digest as tables do.

    Example:
        >>> short("mask_01jd3kq8z7m4n5p6r7s8t9v0wx")
        'mask_01jd3kq8z7'
    """
    return str(_shortened([value])[0])


def figures_of(figures: Sequence[Row]) -> list[Row]:
    """Format the figures of a preflight with their units. An unknown figure becomes "unknown"."""
    return [
        {
            **row,
            **{
                name: "unknown" if row[name] is None else cell(str(row["unit"]), row[name])
                for name in ("needed", "available")
            },
        }
        for row in figures
    ]


def _inside(row: Row, column: str) -> Any:
    value: Any = row
    for part in column.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _lines(prefix: str, record: Row) -> list[tuple[str, Any]]:
    tables = records_in(record)
    found: list[tuple[str, Any]] = []
    for name, value in record.items():
        if isinstance(value, Mapping) and value:
            found += _lines(f"{prefix}{name}.", value)
        elif name not in tables:
            found.append((prefix + name, value))
    return found


def _shortened(values: Sequence[Any]) -> list[Any]:
    """Cut ids, digests and UUIDs. All values of a kind get the same length, at which they still differ."""
    for pattern, length in _SHORT.items():
        known = {value for value in values if isinstance(value, str) and pattern.fullmatch(value)}
        if not known:
            continue
        if pattern is _ID:
            length += max(value.index("_") for value in known)
        while len({value[:length] for value in known}) < len(known):
            length += 1
        values = [value[:length] if value in known else value for value in values]
    return list(values)

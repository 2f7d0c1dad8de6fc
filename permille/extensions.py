"""Loading of extensions: optional features in packages of their own, which can be left out.

Each program has one group of entry points, such as `permille.service`. An extension names one object in each
group that it needs, so that a program imports only its own part of the extension. The core imports no
extension by its name.
"""

from functools import cache
from importlib.metadata import entry_points
from typing import TypeVar

Part = TypeVar("Part")


@cache
def extensions(program: str, kind: type[Part]) -> tuple[Part, ...]:
    """Load the parts that the installed extensions have for a program, in the order of their names.

    For example, the workers call `extensions("workers", WorkerExtension)`.

    Args:
        program: the program, whose group of entry points is `permille.<program>`.
        kind: the program's class of such parts.

    Raises:
        TypeError: an entry point names something else.
        ImportError: an extension is broken. A program does not start without a part that is installed.
    """
    entries = sorted(entry_points(group=f"permille.{program}"), key=lambda entry: entry.name)
    parts = tuple(entry.load() for entry in entries)
    for entry, part in zip(entries, parts, strict=True):
        if not isinstance(part, kind):
            raise TypeError(
                f"The entry point {entry.name!r} in permille.{program} is no {kind.__name__}: {part!r:.80}"
            )
    return parts

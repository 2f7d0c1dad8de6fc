"""A console of rich that removes control characters from texts, but keeps its own styles."""

from collections.abc import Iterable
from typing import IO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from permille.plain_text import lenient, printable


class PlainConsole(Console):
    """A console that makes every text printable."""

    def __init__(
        self, *, stderr: bool = False, width: int | None = None, file: IO[str] | None = None
    ) -> None:
        """Make a console for standard output, standard error or a file."""
        super().__init__(stderr=stderr, width=width, file=file)
        lenient(self.file)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render as the base class does. Only rich makes segments with controls, so they stay as they are."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))

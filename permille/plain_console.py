"""A console of rich that removes control characters from texts, but keeps its own styles."""

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from permille.plain_text import printable


class PlainConsole(Console):
    """A console that makes every text printable."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render as the base class does. Only rich makes segments with controls, so they stay as they are."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))

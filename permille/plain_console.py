"""A console of rich that prints nothing that a terminal would obey; its own styles and controls stay."""

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from permille.plain_text import printable


class PlainConsole(Console):
    """Print as rich's console does, each text made printable."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render as the base class, and leave its controls alone: they are rich's own."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))

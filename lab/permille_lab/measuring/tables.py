"""Tables as the pages of results have them."""

from collections.abc import Iterable, Mapping

import pandas as pd


def markdown(rows: pd.DataFrame | Iterable[Mapping[str, object]]) -> str:
    """Rows in Markdown: what a row lacks is empty, and an index that has names is columns. None: nothing."""
    frame = rows if isinstance(rows, pd.DataFrame) else pd.DataFrame(list(rows))
    if frame.index.names != [None]:
        frame = frame.rename_axis(columns=None).reset_index()
    return "" if frame.empty else str(frame.fillna("").to_markdown(index=False, disable_numparse=True))

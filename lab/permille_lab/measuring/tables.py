"""Markdown tables for the pages in docs/results."""

from collections.abc import Iterable, Mapping

import pandas as pd


def markdown(rows: pd.DataFrame | Iterable[Mapping[str, object]]) -> str:
    """Return the rows as a Markdown table, or empty text if there are none.

    A missing value is an empty cell. A named index becomes columns. For example, `markdown([{"model": "7M",
    "loss": "3.2"}])` is a table with one row and the columns model and loss.
    """
    frame = rows if isinstance(rows, pd.DataFrame) else pd.DataFrame(list(rows))
    if frame.index.names != [None]:
        frame = frame.rename_axis(columns=None).reset_index()
    return "" if frame.empty else str(frame.fillna("").to_markdown(index=False, disable_numparse=True))

"""Write the table of settings in docs/reference/settings.md: `make settings`.

    python -m scripts.settings

The table is generated from the fields of the settings classes: their names, defaults and descriptions. A test
fails if the page is not up to date.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from pydantic.fields import FieldInfo

from permille.store.settings import PREFIX, SettingsGroup, StoreSettings, layout
from permille_service.settings import MIB, Settings
from permille_workers.runtime.settings import WorkerSettings

PAGE: Final = Path(__file__).resolve().parents[1] / "docs" / "reference" / "settings.md"
_HEAD: Final = "| variable | read by | default | meaning |\n|---|---|---|---|\n"
_TABLE: Final = re.compile(re.escape(_HEAD) + r"(\|.*\n)*")
_GIB: Final = 1024 * MIB
_DATA: Final = Path("/data")


def table() -> str:
    """Return the table: settings of all programs first, then those of the API, then those of a worker."""
    return _HEAD + "".join(line for group in groups() for line in _lines(group))


def groups() -> tuple[type[SettingsGroup], ...]:
    """Return the groups of both programs, in the order of the table."""
    inherited = (*reversed(Settings.__mro__), *reversed(WorkerSettings.__mro__))
    found = dict.fromkeys(kind for kind in inherited if SettingsGroup in kind.__bases__)
    return tuple(found)


def _lines(group: type[SettingsGroup]) -> Iterator[str]:
    yield f"| **{group.__doc__}** | | | |\n"
    for name, field in group.model_fields.items():
        shown = (
            Settings.model_fields[name] if name == "data_dir" else field
        )  # required for the API, optional for workers
        variable = f"`{PREFIX}{name.upper()}`"
        yield f"| {variable} | {_readers(name)} | {_default(name, shown)} | {field.description} |\n"


def up_to_date(page: str) -> str:
    """Return the page with a current table.

    Raises:
        ValueError: the page does not have exactly one table.
    """
    written, count = _TABLE.subn(lambda _: table(), page)
    if count != 1:
        raise ValueError(f"The page must have one table of settings; it has {count}.")
    return written


def _readers(name: str) -> str:
    if name == "data_dir":
        return "API, worker, command line"
    if name in StoreSettings.model_fields:
        return "API, worker"
    return "API" if name in Settings.model_fields else "worker"


def _default(name: str, field: FieldInfo) -> str:
    """Return the default as text. It is empty if the variable must be set."""
    below = layout(_DATA)
    if name in below:
        return f"`{str(below[name]).replace(str(_DATA), '<data>')}`"
    if field.is_required():
        return ""
    value = field.default
    if value is None:
        return "none"
    if isinstance(value, tuple):
        return "`[]`"
    if isinstance(value, int) and value % MIB == 0 and value > 0:
        return f"{value // _GIB} GiB" if value % _GIB == 0 else f"{value // MIB} MiB"
    return f"`{value:g}`" if isinstance(value, int | float) else f"`{value}`"


def main() -> None:
    """Update the page."""
    PAGE.write_text(up_to_date(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()

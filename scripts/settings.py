"""Write the table of settings in docs/reference/settings.md: `make settings`.

    python -m scripts.settings

The table comes from the fields of the settings classes: names, defaults and descriptions. A test fails when
the page is older than the classes.
"""

import re
from pathlib import Path
from typing import Final

from pydantic.fields import FieldInfo

from permille.store.settings import PREFIX, StoreSettings, layout
from permille_service.settings import MIB, Settings
from permille_workers.runtime.settings import WorkerSettings

PAGE: Final = Path(__file__).resolve().parents[1] / "docs" / "reference" / "settings.md"
_HEAD: Final = "| variable | read by | default | meaning |\n|---|---|---|---|\n"
_TABLE: Final = re.compile(re.escape(_HEAD) + r"(\|.*\n)*")
_GIB: Final = 1024 * MIB
_DATA: Final = Path("/data")


def table() -> str:
    """Return the table: shared settings first, then those of the API, then those of a worker."""
    fields = StoreSettings.model_fields | Settings.model_fields | WorkerSettings.model_fields
    fields["data_dir"] = Settings.model_fields["data_dir"]  # only a worker can do without
    rows = (
        f"| `{PREFIX}{name.upper()}` | {_readers(name)} | {_default(name, field)} | {field.description} |\n"
        for name, field in fields.items()
    )
    return _HEAD + "".join(rows)


def up_to_date(page: str) -> str:
    """Return the page with a current table. Raises ValueError unless it has exactly one."""
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
    """Return the cell of the default; it is empty where the variable must be set."""
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
    """Write the page again."""
    PAGE.write_text(up_to_date(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()

"""The pages of docs/reference list exactly the settings and exit codes of the programs."""

from pathlib import Path

from permille.exits import Exit, ExitCode
from permille_service.settings import Settings
from permille_workers.runtime.settings import WorkerSettings
from scripts import settings

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"


def rows(page: str) -> list[list[str]]:
    """Return the cells of the first table of a page, without its header."""
    text = (REFERENCE / page).read_text(encoding="utf-8")
    table = next(block for block in text.split("\n\n") if block.startswith("| "))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_table_of_settings_is_made_from_the_settings() -> None:
    page = settings.PAGE.read_text(encoding="utf-8")
    assert settings.up_to_date(page) == page, "run `make settings`"
    names = Settings.model_fields.keys() | WorkerSettings.model_fields.keys()
    fields = [row for row in rows("settings.md") if not row[0].startswith("**")]
    assert sorted(row[0] for row in fields) == sorted(f"`PERMILLE_{name.upper()}`" for name in names)
    assert all(meaning not in ("", "None") for *_, meaning in fields)
    assert {
        ("`PERMILLE_DATA_DIR`", "API, worker, command line", ""),
        ("`PERMILLE_BLOB_ROOT`", "API, worker", "`<data>/blobs`"),
        ("`PERMILLE_BLOB_CACHE_BYTES`", "API, worker", "64 GiB"),
        ("`PERMILLE_LOG_FORMAT`", "API, worker", "`text`"),
        ("`PERMILLE_ALLOWED_HOSTS`", "API", "`[]`"),
        ("`PERMILLE_PORT`", "API", "`8321`"),
        ("`PERMILLE_POLL_S`", "worker", "`0.5`"),
        ("`PERMILLE_THREADS`", "worker", "none"),
    } <= {(name, readers, default) for name, readers, default, _ in rows("settings.md")}


def test_exit_codes_are_the_real_ones() -> None:
    operator = {int(code) for code, said, _ in rows("exit-codes.md") if said}
    device = {int(code) for code, _, said in rows("exit-codes.md") if said}
    assert operator == {int(code) for code in Exit}
    assert device == {int(code) for code in ExitCode}

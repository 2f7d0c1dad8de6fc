"""docs/guide/operate.md names every setting and every exit code that the programs have, and no other."""

import re
from pathlib import Path

from permille.store.settings import StoreSettings, layout
from permille_agent.cli.console import ExitCode
from permille_service.cli.exits import Exit
from permille_service.settings import Settings
from permille_workers.runtime.settings import WorkerSettings

PAGE = (Path(__file__).parents[2] / "docs" / "guide" / "operate.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def rows(title: str) -> list[list[str]]:
    """Cells of the tables of a section, without headings."""
    lines = [line for line in section(title).splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def readers(name: str) -> str:
    if name == "data_dir":
        return "API, worker, command line"
    if name in StoreSettings.model_fields:
        return "API, worker"
    return "API" if name in Settings.model_fields else "worker"


def test_every_setting_is_named_with_who_reads_it() -> None:
    said = {name: row[1] for row in rows("Settings") for name in re.findall(r"PERMILLE_([A-Z_]+)", row[0])}
    settings = Settings.model_fields.keys() | WorkerSettings.model_fields.keys()
    assert said == {name.upper(): readers(name) for name in settings}


def test_plain_defaults_are_the_real_ones() -> None:
    fields = WorkerSettings.model_fields | Settings.model_fields
    checked = 0
    for variable, _, default, _ in rows("Settings"):
        name = variable.strip("`").removeprefix("PERMILLE_").lower()
        if re.fullmatch(r"`\d+(\.\d+)?`", default):
            assert float(default.strip("`")) == float(fields[name].default), name
            checked += 1
        elif default == "none" and name in fields:
            assert fields[name].default is None
        elif "<data>" in default:
            assert str(layout(Path("/data"))[name]) == default.strip("`").replace("<data>", "/data")
            checked += 1
    assert checked == 25


def test_exit_codes_are_the_real_ones() -> None:
    operator = {int(code) for code, said, _ in rows("Exit codes") if said}
    device = {int(code) for code, _, said in rows("Exit codes") if said}
    assert operator == {int(code) for code in Exit}
    assert device == {int(code) for code in ExitCode}

"""How tests call the evidence, and what they compare."""

from pathlib import Path


def arguments(materials: Path, folder: Path, *more: str) -> list[str]:
    return [
        *("--materials", str(materials), "--folder", str(folder), "--quick", "--threads", "1"),
        *more,
    ]


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }

"""The picture in the README: what a user sees, from a real run (`python -m examples.picture`).

A service is started and a package built as in `examples.demo`; then a device's commands run for human eyes,
and what they print becomes an SVG, `docs/images/demo.svg`.
"""

import io
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from examples.demo import BIN, EXAMPLES, STEPS, WORK, build, permille, service

PICTURE = EXAMPLES.parent / "docs" / "images" / "demo.svg"
COLUMNS = 88
NOTES = EXAMPLES / "gardener" / "notes.txt"
PROMPT = "The boy from next door"


def main() -> int:
    """Run the commands of a user and draw what they print."""
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir()
    try:
        with service() as url:
            build()
            invitation = permille("invitations", "create", "--release", "demo")["invitation"]
            (WORK / "notes.txt").write_bytes(NOTES.read_bytes())
            screen = [
                user("enroll", url, invitation),
                user("pull"),
                user("train", "notes.txt", "--steps", str(STEPS)),
                user("compare", "--prompt", PROMPT, "--max-tokens", "24"),
            ]
    finally:
        shutil.rmtree(WORK, ignore_errors=True)
    draw("\n".join(screen))
    return 0


def user(*arguments: str) -> str:
    """One command of the device and what a person sees of it, colours included."""
    print(f"$ permille-agent {' '.join(arguments)}", flush=True)
    environment = os.environ | {
        "PERMILLE_AGENT_HOME": str(WORK / "device"),
        "FORCE_COLOR": "1",
        "COLUMNS": str(COLUMNS),
    }
    done = subprocess.run(
        [BIN / "permille-agent", *arguments],
        cwd=WORK,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=True,
    )
    return f"\x1b[1m$ permille-agent {' '.join(arguments)}\x1b[0m\n{done.stdout}"


def draw(screen: str) -> None:
    """Write `screen` as an SVG that asks no other host for a font."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text.from_ansi(screen), soft_wrap=False)
    svg = console.export_svg(title="a device", theme=MONOKAI, unique_id="demo")
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(svg, encoding="utf-8")
    print(f"{PICTURE}: {Path(PICTURE).stat().st_size} bytes")


if __name__ == "__main__":
    sys.exit(main())

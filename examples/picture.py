"""Make the picture of the README from a real run: `python -m examples.picture`.

The script starts a service and builds a package, as `examples.demo` does. Then it runs the commands of a
device, and writes their output as an SVG, `docs/images/demo.svg`.
"""

import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from examples.demo import EXAMPLES, MODELS, NOTES, SMOLLM2, WORK, build
from examples.programs import AGENT, Programs

PICTURE = EXAMPLES.parent / "docs" / "images" / "demo.svg"
COLUMNS = 88


def main() -> int:
    """Run the commands of a user and draw what they print."""
    model = MODELS["smollm2" if SMOLLM2.is_file() else "example"]
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir()
    programs = Programs(work=WORK)
    try:
        with programs.service(models=model.root, corpora=EXAMPLES, settings={}) as url:
            build(programs, model)
            invitation = programs.permille("invitations", "create", "--release", "demo")["invitation"]
            (WORK / "notes.txt").write_bytes(NOTES.read_bytes())
            screen = [
                user(programs, "enroll", url, invitation),
                user(programs, "pull"),
                user(programs, "train", "notes.txt", *model.gradient),
                *(user(programs, "generate", question, *model.ask) for question in model.questions),
            ]
    finally:
        shutil.rmtree(WORK, ignore_errors=True)
    draw("\n".join(screen))
    return 0


def user(programs: Programs, *arguments: str) -> str:
    """Run one command of the device. Return the command and its output, colours included."""
    shown = shlex.join(("permille-agent", *arguments))
    print(f"$ {shown}", flush=True)
    environment = os.environ | {
        "PERMILLE_AGENT_HOME": str(programs.device),
        "FORCE_COLOR": "1",
        "COLUMNS": str(COLUMNS),
    }
    done = subprocess.run(
        [sys.executable, "-P", *AGENT, *arguments],
        cwd=WORK,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=True,
    )
    return f"\x1b[1m$ {shown}\x1b[0m\n{done.stdout}"


def draw(screen: str) -> None:
    """Write `screen` as an SVG without a font from another host."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text.from_ansi(screen), soft_wrap=False)
    svg = console.export_svg(title="a device", theme=MONOKAI, unique_id="demo")
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(svg, encoding="utf-8")
    print(f"{PICTURE}: {Path(PICTURE).stat().st_size} bytes")


if __name__ == "__main__":
    sys.exit(main())

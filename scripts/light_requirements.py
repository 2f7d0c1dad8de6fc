"""Writes `requirements/light-agent.txt`: all that an agent without torch imports, pinned, and nothing else.

    python scripts/light_requirements.py            # writes the file
    python scripts/light_requirements.py --print    # shows what it would write

tokenizers asks for huggingface_hub, for downloads from a hub that the agent never makes, and that asks for
more. pip leaves it out only when it is given a whole closure and told not to add to it:

    pip install --no-deps -r requirements/light-agent.txt .

Versions are those that this environment has, which `constraints.txt` decides for what it names.
"""

import argparse
from importlib.metadata import requires, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

FILE = Path(__file__).resolve().parents[1] / "requirements" / "light-agent.txt"
# Asked for by a package of the closure, and imported by nothing that the agent uses of it.
LEFT_OUT = frozenset({"huggingface-hub"})

_HEAD = """# Written by scripts/light_requirements.py: what an agent without torch imports, and nothing else.
# pip install --no-deps -r requirements/light-agent.txt .
"""


def closure(name: str, extra: str) -> dict[str, str]:
    """Distribution and version of all that an extra asks for, directly or not, less what is left out.

    Raises:
        importlib.metadata.PackageNotFoundError: something is not installed here.
    """
    found: dict[str, str] = {}
    _walk(name, extra, found)
    return dict(sorted(found.items()))


def text() -> str:
    """The file's content."""
    pins = closure("permille", "agent")
    return _HEAD + "".join(f"{name}=={number}\n" for name, number in pins.items())


def _walk(name: str, extra: str, found: dict[str, str]) -> None:
    for line in requires(name) or ():
        needed = Requirement(line)
        wanted = canonicalize_name(needed.name)
        if needed.marker is not None and not needed.marker.evaluate({"extra": extra}):
            continue
        if wanted in LEFT_OUT or wanted in found:
            continue
        found[wanted] = version(wanted)
        _walk(wanted, "", found)


def main() -> None:
    """Write the file, or print it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--print", action="store_true", help="write nothing")
    if parser.parse_args().print:
        print(text(), end="")
        return
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(text())


if __name__ == "__main__":
    main()

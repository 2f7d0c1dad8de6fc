"""What every benchmark of the engines is told: where packages and finished cells lie, how many threads."""

import argparse
import os
from pathlib import Path

FOLDER = Path("build/bench")


def settings_parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser with the options that all have: `--folder`, `--cells`, `--threads`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="packages are made here, once")
    parser.add_argument("--cells", type=Path, default=FOLDER / "cells.jsonl", help="finished cells")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    return parser

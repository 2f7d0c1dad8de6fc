"""`python -m permille.evaluate sweep.toml --results results.jsonl`: run a sweep, then print its tables."""

import argparse
import signal
import sys
from pathlib import Path

from permille.errors import PermilleError, RetryableError
from permille.evaluate.report import markdown
from permille.evaluate.specification import read_sweep
from permille.evaluate.sweep import run_sweep


def main(arguments: list[str] | None = None) -> int:
    """Exit status, as of `permille`: 0 done, 1 failed (a full disk), 3 refused, 5 try again (another process
    is at it), 130 interrupted. Whatever is done is kept, and the same command goes on."""
    parser = argparse.ArgumentParser(prog="python -m permille.evaluate", description=__doc__)
    parser.add_argument("sweep", type=Path, help="TOML; see permille/evaluate/specification.py")
    parser.add_argument(
        "--results", type=Path, help="JSON lines; default: the sweep's name with .results.jsonl"
    )
    parser.add_argument("--table", type=Path, help="where to write the tables; default: printed")
    options = parser.parse_args(arguments)
    results = options.results or options.sweep.with_suffix(".results.jsonl")
    try:
        table = markdown(run_sweep(read_sweep(options.sweep), results, _tell))
        if options.table is None:
            print(table)
        else:
            options.table.write_text(table, encoding="utf-8")
    except PermilleError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 5 if isinstance(exc, RetryableError) else 3
    except OSError as exc:
        print(f"error: {exc}; {results} keeps what is done, the same command goes on", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"interrupted; {results} keeps what is done, the same command goes on", file=sys.stderr)
        return 130
    return 0


def _tell(done: int, total: int, following: str) -> None:
    print(f"[{done}/{total}] {following}", file=sys.stderr, flush=True)


def _interrupt(*_: object) -> None:
    """Once: a second signal must not end the first one's farewell."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGTERM, _interrupt)
    sys.exit(main())

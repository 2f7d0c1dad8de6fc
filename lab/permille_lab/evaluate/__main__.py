"""`python -m permille_lab.evaluate sweep.toml --results results.jsonl`: run a sweep, then print its tables."""

import argparse
import signal
import sys
from pathlib import Path

from permille.errors import InputError, PermilleError, RetryableError
from permille.files import write_atomic


def main(arguments: list[str] | None = None) -> int:
    """Exit status, as of `permille`: 0 done, 1 failed (a full disk), 3 refused, 5 try again (another process
    is at it), 130 interrupted. Whatever is done is kept, and the same command goes on."""
    parser = argparse.ArgumentParser(prog="python -m permille_lab.evaluate", description=__doc__)
    parser.add_argument("sweep", type=Path, help="TOML; see lab/permille_lab/evaluate/specification.py")
    parser.add_argument(
        "--results", type=Path, help="JSON lines; default: the sweep's name with .results.jsonl"
    )
    parser.add_argument("--table", type=Path, help="where to write the tables; default: printed")
    options = parser.parse_args(arguments)
    results = options.results or options.sweep.with_suffix(".results.jsonl")
    failure = None
    try:
        _check(options.sweep, results, options.table)
        table, failure = _table(options.sweep, results)
    except PermilleError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 5 if isinstance(exc, RetryableError) else 3
    except OSError as exc:
        print(f"error: {exc}{_kept(results)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"interrupted{_kept(results)}", file=sys.stderr)
        return 130
    status = _tell_table(table, options.table) if table else 0
    if failure is not None:
        print(f"error: {failure}; {results} keeps what is done", file=sys.stderr)
        return 3
    return status


def _check(sweep: Path, results: Path, table: Path | None) -> None:
    """Refuse what would end badly after hours.

    Raises:
        InputError: results or table are no file, cannot have a folder, or are one of the others.
    """
    names = [path.resolve() for path in (sweep, results, table) if path is not None]
    if len(set(names)) < len(names):
        raise InputError(f"expected sweep, results and table in different files, got {results} and {table}")
    if results.exists() and not results.is_file():
        raise InputError(f"expected results in a file, got {results}")
    if table is not None and table.is_dir():
        raise InputError(f"expected the table in a file, got the folder {table}")
    for path in (results, table):
        try:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise InputError(f"expected a folder for {path}, got {exc}") from exc


def _table(sweep: Path, results: Path) -> tuple[str, InputError | None]:
    """Run what is missing; the tables of all that could be measured, and why the rest could not. Torch is
    imported here, where a signal has its farewell."""
    from transformers.utils import logging

    from permille_lab.evaluate.report import markdown
    from permille_lab.evaluate.specification import read_sweep
    from permille_lab.evaluate.sweep import CellsFailedError, run_sweep
    from permille_lab.evaluate.sweep_results import bad_rows

    logging.disable_progress_bar()  # one of each load of a model, between the lines of ours
    try:
        records = run_sweep(read_sweep(sweep), results, _tell)
    except CellsFailedError as exc:
        return markdown(exc.records, bad_rows(results), exc.reasons), exc
    return markdown(records, bad_rows(results)), None


def _tell_table(table: str, path: Path | None) -> int:
    try:
        if path is None:
            print(table, flush=True)
        elif path.exists() and not path.is_file():  # a device or a pipe
            path.write_text(table, encoding="utf-8")
        else:
            write_atomic(path, table.encode())
    except OSError as exc:
        print(f"error: the tables cannot be written: {exc}; all results are kept", file=sys.stderr)
        return 1
    return 0


def _kept(results: Path) -> str:
    return f"; {results} keeps what is done, the same command goes on" if results.is_file() else ""


_told_to_end: list[int] = []


def _tell(done: int, total: int, following: str) -> None:
    if _told_to_end:  # what was raised then was lost, as in a callback of a library's C code
        raise KeyboardInterrupt
    print(f"[{done}/{total}] {following}", file=sys.stderr, flush=True)


def _interrupt(number: int, _: object) -> None:
    """Once: a second signal must not end the first one's farewell."""
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, signal.SIG_IGN)
    _told_to_end.append(number)
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGTERM, _interrupt)
    sys.exit(main())

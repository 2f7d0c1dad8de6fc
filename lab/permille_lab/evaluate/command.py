"""`permille evaluate`: run a sweep, then print its tables.

Finished work is kept, and the same command continues it. The exit status is the same as for all commands of
permille: 0 done, 1 failed (for example, the disk is full), 3 refused, 5 try again (another process runs this
sweep), 130 interrupted.
"""

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from permille.errors import InputError, PermilleError, RetryableError
from permille.files import write_atomic

app = typer.Typer(add_completion=False)

_told_to_end: list[int] = []


@app.command()
def evaluate(
    sweep: Annotated[Path, typer.Argument(help="What is compared: a TOML file.")],
    results: Annotated[
        Path | None, typer.Option(help="JSON lines; default: the sweep's name with .results.jsonl.")
    ] = None,
    table: Annotated[Path | None, typer.Option(help="Where to write the tables; default: printed.")] = None,
) -> None:
    """Compare masks, adapters and estimators on your own model and tasks."""
    _told_to_end.clear()
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, _interrupt)
    raise typer.Exit(_evaluated(sweep, results or sweep.with_suffix(".results.jsonl"), table))


def _evaluated(sweep: Path, results: Path, table: Path | None) -> int:
    failure = None
    try:
        _check(sweep, results, table)
        text, failure = _table(sweep, results)
    except PermilleError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 5 if isinstance(exc, RetryableError) else 3
    except OSError as exc:
        print(f"error: {exc}{_kept(results)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"interrupted{_kept(results)}", file=sys.stderr)
        return 130
    status = _tell_table(text, table) if text else 0
    if failure is not None:
        print(f"error: {failure}; {results} keeps what is done", file=sys.stderr)
        return 3
    return status


def _check(sweep: Path, results: Path, table: Path | None) -> None:
    """Refuse paths that would fail after hours.

    Raises:
        InputError: two of the paths are equal, results or table is a folder, or its folder cannot be created.
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
    """Run the missing cells. Return the tables of all measured cells, and the error of the others, if any.

    Torch is imported here, after the signal handlers are installed: its import takes seconds.
    """
    from transformers.utils import logging

    from permille_lab.evaluate.report import markdown
    from permille_lab.evaluate.results import read_results
    from permille_lab.evaluate.specification import read_sweep
    from permille_lab.evaluate.sweep import CellsFailedError, run_sweep

    logging.disable_progress_bar()  # each loaded model would print one between our lines
    try:
        records = run_sweep(read_sweep(sweep), results, _tell)
    except CellsFailedError as exc:
        return markdown(exc.records, list(read_results(results).bad_rows), exc.reasons), exc
    return markdown(records, list(read_results(results).bad_rows)), None


def _tell_table(text: str, path: Path | None) -> int:
    try:
        if path is None:
            print(text, flush=True)
        elif path.exists() and not path.is_file():  # a device or a pipe
            path.write_text(text, encoding="utf-8")
        else:
            write_atomic(path, text.encode())
    except OSError as exc:
        print(f"error: the tables cannot be written: {exc}; all results are kept", file=sys.stderr)
        return 1
    return 0


def _kept(results: Path) -> str:
    return f"; {results} keeps what is done, run the same command to continue" if results.is_file() else ""


def _tell(done: int, total: int, following: str) -> None:
    if _told_to_end:  # an exception in a callback of C code is lost, so raise it again
        raise KeyboardInterrupt
    print(f"[{done}/{total}] {following}", file=sys.stderr, flush=True)


def _interrupt(number: int, _: object) -> None:
    """Interrupt once. Later signals are ignored, so that they do not interrupt the clean-up."""
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, signal.SIG_IGN)
    _told_to_end.append(number)
    raise KeyboardInterrupt


if __name__ == "__main__":
    app()

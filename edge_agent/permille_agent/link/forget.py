"""Erasing of the user's data, and the end of an enrolment.

- `forget` erases all files in the home folder, including those of later versions, except for these:
    - the identity, the enrolment, signed metadata, packages, partial downloads, the policy, the choice of a
      registry, and lock files,
    - the privacy ledger, and `consent.json`, in which consent is withdrawn,
    - what the service must still be told: requests to delete logs, and choices to leave federations.
- Files are overwritten and then removed. Copies in snapshots, journals, spare flash cells, backups and swap
  are out of reach, and `PROMISE` tells the user.
- A full disk does not prevent `forget`, because records are then overwritten in place.
"""

import os
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from permille.errors import InputError, OperatorError
from permille.files import fsync_folder
from permille_agent.link.api import DeviceApi
from permille_agent.link.client import AccessRefusedError, RequestRefusedError
from permille_agent.link.extension import choices
from permille_agent.link.report import (
    RUN_ID,
    Delivery,
    RunReport,
    deliver,
    read_report,
    want_deletion,
    withdraw_logs,
)
from permille_agent.state.choices import set_sharing
from permille_agent.state.home import (
    Home,
    erase,
    erase_folder,
    open_home,
    overwrite,
    overwrite_record,
    path_of,
    telling_disk,
)
from permille_agent.state.models import referenced_models
from permille_agent.training.outcome import TextSource
from permille_agent.training.run import RunFolder, list_runs, named_run

PROMISE = (
    "The files were overwritten once and removed. Copies that the file system or the drive keeps (snapshots, "
    "copy-on-write, journals, spare flash cells), backups and swap cannot be reached from here; against "
    "those, only an encrypted disk helps. Your own data files were not touched."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Erased:
    """Result of `forget`: counts of erased files, and of messages that wait for the service."""

    files: int
    size_bytes: int
    deletions_waiting: int
    federations_left: int = 0


def forget(home: Home) -> Erased:
    """Erase all personal data in the home folder, and withdraw consent. The caller holds the lock.

    This erases data references, runs, the personal model, reports, logs and the files of federations.
    First, uploaded logs are marked for deletion at the service, and federations are marked as left. Later,
    `deliver` requests the deletions, and an exchange of rounds tells the service which federations were left.

    Raises:
        OperatorError: a file cannot be erased. Calling again continues. Or the extension that can withdraw a
            choice is not installed.
    """
    files = size_bytes = 0
    deletions = _deletions(home)
    try:
        # Consent is withdrawn first, so that no upload can follow a kill in the middle.
        if home.consent.exists():
            set_sharing(home, log=False, state=False)
        left = _withdrawn(home)
        for path, run_id in deletions.items():
            size_bytes += _keep_deletion(path, run_id)
        for path in _erasable(home):
            if path not in deletions and path not in left:
                size_bytes += erase(path)
                files += 1
        _remove_folders(home, {folder for path in left for folder in path.parents})
    except OSError as exc:
        raise OperatorError(f"Cannot erase the files in {home.root}: {exc}") from exc
    # Folders that every command expects are made again.
    open_home(home.root)
    return Erased(
        files=files, size_bytes=size_bytes, deletions_waiting=len(deletions), federations_left=len(left)
    )


def _withdrawn(home: Home) -> set[Path]:
    """Withdraw all choices to take part in rounds. Return the files that must stay until the service knows.

    Raises:
        OperatorError: no installed extension can withdraw a choice.
    """
    made = set(home.federations.glob("*/joined.json"))
    found = {path: stays for one in choices() for path, stays in one.withdraw(home).items()}
    # Without its file, nobody would tell the service of the withdrawal.
    if left := sorted(made - found.keys()):
        raise OperatorError(
            f"Nothing was erased. {left[0]} is your choice to take part in a federation, and the part of "
            "permille that can tell the service of your withdrawal is not installed. Install all of permille "
            "again, then repeat `permille-agent forget`."
        )
    return {path for path, stays in found.items() if stays}


def forget_run(home: Home, name: str) -> Erased:
    """Erase one run, even if it is damaged. The caller holds the lock.

    Raises:
        InputError: the name fits no run or several, or the run is active or needed for a rollback.
        OperatorError: a file cannot be erased.
    """
    folder = named_run(home, name).path
    if any(model.run == folder.name for model in referenced_models(home)):
        raise InputError(
            f"The run {name} is in use, or `rollback` returns to it. `forget` without --run erases "
            "everything."
        )
    try:
        files, size_bytes = erase_folder(folder)
    except OSError as exc:
        raise OperatorError(f"Cannot erase the files in {folder}: {exc}") from exc
    return Erased(files=files, size_bytes=size_bytes, deletions_waiting=0)


def forget_memories(home: Home, paths: Sequence[Path]) -> int:
    """Erase the memories that hold text of files or folders, and return their number.

    The states of these models stay, and work without the memory. If it cannot be read where a memory comes
    from, it is erased, too. The caller holds the lock.

    Raises:
        OperatorError: a file cannot be erased.
    """
    gone, erased = [_absolute(path) for path in paths], 0
    for run in list_runs(home):
        if not _may_hold(run, gone):
            continue
        had_memory = False
        # The page of a run and its samples show the memory's text. The memory goes last, so that it is
        # counted after an interruption, too. A kill during a write leaves hidden files.
        for file in (run.path / "samples.json", run.path / "show.html", run.memory):
            for path in (*run.path.glob(f".{file.name}.*"), file):
                with telling_disk(), suppress(FileNotFoundError):
                    erase(path)
                    had_memory |= file == run.memory
        erased += had_memory
    return erased


def _may_hold(run: RunFolder, gone: Sequence[Path]) -> bool:
    """Return whether a run may have learned text of files or folders."""
    try:
        known = run.load("data", TextSource) or TextSource()
    except OperatorError:  # the file is damaged
        return True
    sources = [_absolute(path_of(path)) for path in known.paths]
    return any(one.is_relative_to(other) or other.is_relative_to(one) for one in sources for other in gone)


def _absolute(path: Path) -> Path:
    """Return the path without `..`, as the index of passages names it."""
    return Path(os.path.abspath(path))  # noqa: PTH100 - `resolve` would follow links


def _deletions(home: Home) -> dict[Path, str]:
    """Return the reports whose log may be at the service, including damaged reports."""
    found = {}
    for path in home.reports.glob("*.json"):
        if RUN_ID.fullmatch(path.stem) is None:
            continue
        try:
            report = read_report(home, path.stem)
        except OperatorError:
            found[path] = path.stem
            continue
        sent = report is not None and report.metrics_delivery is Delivery.SENT
        match report and report.log_delivery:
            case Delivery.SENT | Delivery.DELETION_WANTED:
                found[path] = path.stem
            case Delivery.QUEUED if sent:  # an interrupted upload may have reached the service
                found[path] = path.stem
    return found


def unenroll(home: Home, api: DeviceApi | None) -> None:
    """End the enrolment. The caller holds the lock.

    This deletes the uploaded logs, removes the device from the service and erases the key. Packages and the
    personal model stay, because they need no server.

    Args:
        home: the home folder.
        api: the service, or None if it no longer exists.

    Raises:
        RetryableError: the service cannot be reached. The enrolment stays.
        RequestRefusedError: the service does not remove the device. The enrolment stays.
        OperatorError: the service cannot be asked, for example because its certificate is not trusted. The
            enrolment stays. Or a file cannot be erased, and some are already gone: call again with
            `api=None`.
    """
    if api is not None:
        _leave_service(home, api)
    try:
        files = (home.identity_key, home.enrolment, home.ca_file, home.rollout, home.registry)
        for path in (*files, *home.reports.iterdir()):
            if path.is_file():
                erase(path)
        # The memberships end with the enrolment, and the device trusts no service any more.
        shutil.rmtree(home.federations, ignore_errors=True)
        shutil.rmtree(home.trust)
        fsync_folder(home.root)
    except OSError as exc:
        raise OperatorError(f"Cannot erase the enrolment in {home.root}: {exc}") from exc


def _leave_service(home: Home, api: DeviceApi) -> None:
    try:
        withdraw_logs(home)
        want_deletion(home, None)
        deliver(home, api)
        api.unenrol()
    except AccessRefusedError:
        return  # the device was revoked or unenrolled before, so it cannot delete anything at the service
    except RequestRefusedError as exc:
        if exc.status not in (404, 410):
            raise


def _keep_deletion(path: Path, run_id: str) -> int:
    """Reduce a report to the request to delete its log. Return the number of overwritten bytes."""
    entry = RunReport(run_id=run_id, log_delivery=Delivery.DELETION_WANTED)
    with path.open("r+b", buffering=0) as old:
        overwrite_record(path, entry)
        # If this has replaced the file instead of overwriting it, the old content is still on the disk.
        return 0 if os.path.samestat(os.fstat(old.fileno()), path.stat()) else overwrite(old)


def _erasable(home: Home) -> Iterator[Path]:
    kept = {
        home.identity_key,
        home.enrolment,
        home.ca_file,
        home.releases,
        home.policy,
        home.registry,
        home.serve_token,
        home.consent,
        home.ledger,
        home.consent.with_suffix(".lock"),
    }
    # If a lock's file were removed while a process holds it, a second process could take the lock anew.
    for lock in (home.lock, home.daemon_lock, home.rounds_lock):
        kept |= {lock, lock.with_name(lock.name + ".holder")}
    for folder, folders, names in os.walk(home.root, followlinks=False):
        if Path(folder) == home.root:
            kept_folders = (home.blobs, home.partial, home.trust)
            # Assign in place, because `os.walk` reads this list to decide which folders to visit.
            folders[:] = [name for name in folders if home.root / name not in kept_folders]
        for name in [*names, *(name for name in folders if (Path(folder) / name).is_symlink())]:
            if (path := Path(folder) / name) not in kept:
                yield path


def _remove_folders(home: Home, left: Collection[Path]) -> None:
    """Remove all folders but those of `left`, which hold choices that the service must still be told."""
    for folder, _folders, _names in os.walk(home.root, topdown=False, followlinks=False):
        path = Path(folder)
        kept = path in (home.root, home.partial, home.reports, *left)
        if not kept and not {home.blobs, home.trust} & {path, *path.parents}:
            path.rmdir()
    fsync_folder(home.root)

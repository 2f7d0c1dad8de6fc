"""Sources of base models: paths below a root, and hub repositories.

This module does not need torch.

Only files of an allow-list are downloaded from the hub, and only of a commit that is given in full. So no
Python files are downloaded, and a branch that moves has no effect. Pickles are opened only in a confined
child process (`permille.models.conversion`).
"""

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from permille.errors import InputError, OperatorError, PermilleError, RetryableError
from permille.files import follow_inside
from permille.hub import hub_failure
from permille.models.checkpoint import TEXT_FILES
from permille.models.conversion import PICKLE_INDEX, PICKLES

if TYPE_CHECKING:
    from huggingface_hub import DryRunFileInfo

_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def resolve_inside(
    root: Path, relative: str, *, what: Literal["folder", "file"], of: Literal["model", "corpus"] = "model"
) -> Path:
    """Return the real path of a folder or file below the root of models or corpora.

    The message names the setting of the root, not its path: operators may be remote.

    Raises:
        InputError: the path leads out of the root or does not exist. The message is the same in both cases,
            so that it tells nothing about files outside.
    """
    path = follow_inside(root, relative)
    if path is None or not (path.is_dir() if what == "folder" else path.is_file()):
        found = {"folder": "file", "file": "folder"}[what]
        other = path is not None and path.exists()
        raise InputError(
            f"There is no {what} at {relative!r:.200} below the {of} root (`permille up` prints this folder, "
            f"and --{of}-root or PERMILLE_{of.upper()}_ROOT sets it)"
            + (f": it is a {found}." if other else ". Put it there, and name it by its path below the root.")
        )
    return path


def download_model(repository: str, commit: str, root: Path) -> Path:
    """Return the folder of a hub repository at a commit, below `root`. Download it if it is missing.

        download_model("HuggingFaceTB/SmolLM2-135M-Instruct", "<40 hex digits>", Path("models"))

    Raises:
        InputError: the repository or commit is malformed, the hub does not know it, or the repository holds
            no weights that are read here.
        OperatorError: the disk has less space than the files need. Nothing was downloaded.
        RetryableError: the hub cannot be reached.
        OSError: the file system failed.
    """
    # Check the name, because it becomes a folder below the root.
    if not _REPOSITORY.fullmatch(repository) or ".." in repository:
        raise InputError(
            f"Write the repository as owner/name, not {repository!r:.200}. A folder or file needs no commit."
        )
    if not _COMMIT.fullmatch(commit):
        raise InputError(
            f"The commit must be 40 hexadecimal digits, so that it cannot change, not {commit!r:.60}. The "
            "hub's page of commits lists it."
        )
    relative = f"hub/{repository.replace('/', '--')}/{commit}"
    folder = follow_inside(root, relative)
    if folder is None:
        raise InputError(
            f"{relative} below the root is a link that leads out of it. Put the folder itself there."
        )
    # This file is written last. If it is missing, the download was cut off, and is continued.
    finished = folder / ".complete"
    if not finished.exists():
        from filelock import FileLock

        folder.parent.mkdir(parents=True, exist_ok=True)
        # Two jobs may want the same model: one downloads it, and the other waits.
        with FileLock(folder.with_name(f".{commit}.lock")):
            if not finished.exists():  # another job may have fetched it meanwhile
                _fetch(repository, commit, folder)
                finished.touch()
    return folder


def _fetch(repository: str, commit: str, folder: Path) -> None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import DryRunError, HfHubHTTPError, LocalEntryNotFoundError

    for left in folder.glob(".cache/huggingface/download/*.incomplete"):
        left.unlink()  # a killed download left it, and the library never continues it
    try:
        for weights in (["*.safetensors"], [*PICKLES, PICKLE_INDEX]):  # pickles if there is nothing else
            chosen: dict[str, Any] = {
                "revision": commit,
                "local_dir": folder,
                "allow_patterns": [*TEXT_FILES, *weights],
                # Subfolders and `consolidated*` hold copies of the weights for other programs.
                "ignore_patterns": ["*/*", "consolidated*"],
            }
            listed = snapshot_download(repository, dry_run=True, **chosen)
            if any(file.filename.endswith((".safetensors", ".bin")) for file in listed):
                break
        else:
            raise InputError(
                f"{repository} holds no weights that are read here: *.safetensors or pytorch_model.bin. From "
                "a repository of GGUF files, download one file and name it with --gguf."
            )
        _check_room(repository, listed, folder)
        snapshot_download(repository, **chosen)
    except (DryRunError, HfHubHTTPError, LocalEntryNotFoundError) as exc:
        # A dry run hides the hub's answer behind an error of its own.
        found = exc.__cause__ if isinstance(exc, DryRunError) else exc
        raise _refusal(found, repository, commit) from exc
    except Exception as exc:
        # The library does not translate redirects in a circle, answers that are no JSON, and files of
        # another size.
        if isinstance(exc, PermilleError) or (isinstance(exc, OSError) and exc.errno is not None):
            raise
        raise hub_failure(exc, repository) from exc
    # If the network failed meanwhile, the library returns an incomplete folder without an error.
    if not all((folder / file.filename).exists() for file in listed):
        raise RetryableError(f"The download of {repository} was cut off.")


def _refusal(found: BaseException | None, repository: str, commit: str) -> InputError | RetryableError:
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    match found:
        case GatedRepoError():
            return InputError(
                f"{repository} is gated: accept its licence on its page, and set HF_TOKEN to a token of that "
                "account."
            )
        case RepositoryNotFoundError():
            return InputError(
                f"The hub knows no repository {repository}. Check the name, or set HF_TOKEN if it is private."
            )
        case RevisionNotFoundError():
            return InputError(f"{repository} has no commit {commit}. Copy one from its history.")
        # The hub does not tell a private repository from one that is missing.
        case HfHubHTTPError() if (status := found.response.status_code) in (401, 403, 404):
            return InputError(
                f"The hub refuses {repository} at {commit} with {status}. Check HF_TOKEN, and whether its "
                "account may read the repository."
            )
        case _:
            return hub_failure(found, repository)


def _check_room(repository: str, listed: "list[DryRunFileInfo]", folder: Path) -> None:
    needed = sum(file.file_size or 0 for file in listed if file.will_download)
    free = shutil.disk_usage(folder.parent).free
    if needed > free:
        raise OperatorError(
            f"Not enough disk space for {repository}: {needed / 1e6:,.0f} MB needed, {free / 1e6:,.0f} MB "
            f"free at {folder.parent}. Free some space, or choose a model root on another disk."
        )

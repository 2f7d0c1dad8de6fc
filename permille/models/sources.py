"""Sources of base models: paths below a root, and hub repositories.

This module does not need torch.

The hub is asked for files of an allow-list only, at a full commit, so that neither code nor a moved branch
can come in.
"""

import re
from pathlib import Path

from permille.errors import InputError, RetryableError
from permille.files import follow_inside
from permille.models.checkpoint import TEXT_FILES
from permille.models.conversion import PICKLE_INDEX, PICKLES

_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def resolve_inside(root: Path, relative: str, *, what: str) -> Path:
    """The real path of `relative` below `root`; `what` is "folder" or "file".

    Raises:
        InputError: it leads out of the root (absolute, "..", a symbolic link), or is no such thing: which of
            these is not told, so that nobody learns what lies outside.
    """
    path = follow_inside(root, relative)
    if path is None or not (path.is_dir() if what == "folder" else path.is_file()):
        raise InputError(f"There is no {what} at {relative!r:.200} below the root. Put it there first.")
    return path


def download_model(repository: str, commit: str, root: Path) -> Path:
    """Return the folder of a hub repository at a commit, below `root`; it is downloaded once.

        download_model("HuggingFaceTB/SmolLM2-135M-Instruct", "<40 hex digits>", Path("models"))

    Raises:
        InputError: the repository or commit has another form, or the hub does not know it.
        RetryableError: the hub cannot be reached.
        OSError: as the file system reports it.
    """
    if not _REPOSITORY.fullmatch(repository) or ".." in repository:
        raise InputError(f"Write the repository as owner/name, not {repository!r:.200}.")
    if not _COMMIT.fullmatch(commit):
        raise InputError(
            f"Name a commit by 40 hexadecimal digits, so that it cannot change; got {commit!r:.60}."
        )
    relative = f"hub/{repository.replace('/', '--')}/{commit}"
    folder = follow_inside(root, relative)
    if folder is None:
        raise InputError(
            f"{relative} below the root is a link that leads out of it. Put the folder itself there."
        )
    # Written last: a folder without it is a download that was cut off, and is continued.
    finished = folder / ".complete"
    if not finished.exists():
        _fetch(repository, commit, folder)
        finished.touch()
    return folder


def _fetch(repository: str, commit: str, folder: Path) -> None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        for weights in (["*.safetensors"], [*PICKLES, PICKLE_INDEX]):  # pickles where nothing else is there
            snapshot_download(
                repository,
                revision=commit,
                local_dir=folder,
                allow_patterns=[*TEXT_FILES, *weights],
                # Copies of the weights for other programs.
                ignore_patterns=["*/*", "consolidated*"],
            )
            if any(folder.glob("*.safetensors")):
                break
    except GatedRepoError as exc:
        raise InputError(
            f"{repository} is gated: accept its licence on its page, and set HF_TOKEN to a token of that "
            "account."
        ) from exc
    except RepositoryNotFoundError as exc:
        raise InputError(
            f"The hub knows no repository {repository}. Check the name; for a private one, set HF_TOKEN."
        ) from exc
    except RevisionNotFoundError as exc:
        raise InputError(f"{repository} has no commit {commit}. Copy it from its history.") from exc
    except HfHubHTTPError as exc:
        status = exc.response.status_code
        if status in (401, 403, 404):
            raise InputError(f"The hub refuses {repository} at {commit} with {status}.") from exc
        raise RetryableError(f"The hub answered {status}") from exc
    except LocalEntryNotFoundError as exc:
        raise RetryableError(f"Cannot reach the hub for {repository}: {exc}") from exc

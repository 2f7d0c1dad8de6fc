"""Sources of base models: a folder or GGUF file below a root, or a hub repository.

This module does not need torch.

The hub is asked for files of an allow-list only, at a full commit, so that neither code nor a moved branch
can come in.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from permille.errors import InputError, RetryableError
from permille.files import follow_inside
from permille.models.checkpoint import TEXT_FILES

_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderRef:
    """`path` is relative to the root, with "/" between parts."""

    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HubRef:
    """`repository` is owner/name, `commit` 40 lower-case hex digits."""

    repository: str
    commit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufRef:
    """`path` of a GGUF file relative to the root, with "/" between parts."""

    path: str


ModelRef = FolderRef | HubRef | GgufRef


def resolve_model(ref: ModelRef, root: Path) -> Path:
    """The model's folder on this machine; a hub model is downloaded below `root` first, a GGUF file converted
    there, or either is found there.

    Raises:
        InputError: the path leads out of the root, or is no folder or file; the repository or commit has
            another form, or the hub does not know it; a GGUF file that cannot be read.
        RetryableError: the hub cannot be reached.
        OSError: as the file system reports it.
    """
    if isinstance(ref, FolderRef):
        return resolve_inside(root, ref.path, what="folder")
    if isinstance(ref, GgufRef):
        from permille.models.gguf.folder import model_folder

        return model_folder(resolve_inside(root, ref.path, what="file"), root)
    return _download(ref, root)


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


def _download(ref: HubRef, root: Path) -> Path:
    if not _REPOSITORY.fullmatch(ref.repository) or ".." in ref.repository:
        raise InputError(f"Write the repository as owner/name, not {ref.repository!r:.200}.")
    if not _COMMIT.fullmatch(ref.commit):
        raise InputError(
            f"Name a commit by 40 hexadecimal digits, so that it cannot change; got {ref.commit!r:.60}."
        )
    relative = f"hub/{ref.repository.replace('/', '--')}/{ref.commit}"
    folder = follow_inside(root, relative)
    if folder is None:
        raise InputError(
            f"{relative} below the root is a link that leads out of it. Put the folder itself there."
        )
    # Written last: a folder without it is a download that was cut off, and is continued.
    finished = folder / ".complete"
    if not finished.exists():
        _fetch(ref, folder)
        finished.touch()
    return folder


def _fetch(ref: HubRef, folder: Path) -> None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        snapshot_download(
            ref.repository,
            revision=ref.commit,
            local_dir=folder,
            allow_patterns=[*TEXT_FILES, "*.safetensors"],
            # Copies of the weights for other programs.
            ignore_patterns=["*/*", "consolidated*"],
        )
    except GatedRepoError as exc:
        raise InputError(
            f"{ref.repository} is gated: accept its licence on its page, and set HF_TOKEN to a token of that "
            "account."
        ) from exc
    except RepositoryNotFoundError as exc:
        raise InputError(
            f"The hub knows no repository {ref.repository}. Check the name; for a private one, set HF_TOKEN."
        ) from exc
    except RevisionNotFoundError as exc:
        raise InputError(f"{ref.repository} has no commit {ref.commit}. Copy it from its history.") from exc
    except HfHubHTTPError as exc:
        status = exc.response.status_code
        if status in (401, 403, 404):
            raise InputError(f"The hub refuses {ref.repository} at {ref.commit} with {status}.") from exc
        raise RetryableError(f"The hub answered {status}") from exc
    except LocalEntryNotFoundError as exc:
        raise RetryableError(f"Cannot reach the hub for {ref.repository}: {exc}") from exc

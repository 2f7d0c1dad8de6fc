"""The client of python-tuf on files in memory. It checks our repository independently of our own client."""

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from tuf.api.exceptions import DownloadHTTPError
from tuf.api.metadata import TargetFile
from tuf.ngclient import FetcherInterface, Updater

from permille.trust.repository import Repository


class _Files(FetcherInterface):
    """A fetcher that looks files up in a dictionary by the last part of the path."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self._files = files

    def _fetch(self, url: str) -> Iterator[bytes]:
        name = urlsplit(url).path.rpartition("/")[2]
        if name not in self._files:
            raise DownloadHTTPError(f"no {name}", 404)
        yield self._files[name]


class TufClient:
    """A client that starts from a repository's root and keeps the metadata in `folder`."""

    def __init__(self, folder: Path, repository: Repository) -> None:
        self.folder = folder
        self.root = repository.newest["root"]
        self.files: dict[str, bytes] = {}

    def publish(self, repository: Repository) -> None:
        """Serve the repository's files and changes, as the service does after it has stored them."""
        self.files.update(repository.files())
        self.files.update(repository.changed)
        repository.changed.clear()

    def look(self, path: str) -> TargetFile | None:
        """Refresh, then find a target. A refusal raises python-tuf's RepositoryError."""
        url, folder = "http://repository.invalid/", str(self.folder)
        fetcher = _Files(self.files)
        updater = Updater(folder, url, folder, url, fetcher=fetcher, bootstrap=self.root)
        updater.refresh()
        return updater.get_targetinfo(path)

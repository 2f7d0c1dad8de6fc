"""python-tuf's own client against files in memory: what a repository makes is judged by it, not by us."""

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from tuf.api.exceptions import DownloadHTTPError
from tuf.api.metadata import TargetFile
from tuf.ngclient import FetcherInterface, Updater

from permille.trust.repository import Repository


class _Files(FetcherInterface):
    """Fetches from a dictionary by the last part of the path."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self._files = files

    def _fetch(self, url: str) -> Iterator[bytes]:
        name = urlsplit(url).path.rpartition("/")[2]
        if name not in self._files:
            raise DownloadHTTPError(f"no {name}", 404)
        yield self._files[name]


class TufClient:
    """A client that bootstraps from a repository's root and keeps what it has seen in `folder`."""

    def __init__(self, folder: Path, repository: Repository) -> None:
        self.folder = folder
        self.root = repository.newest["root"]
        self.files: dict[str, bytes] = {}

    def publish(self, repository: Repository) -> None:
        """Serve what changes have made, as the service would once it has kept it."""
        self.files.update(repository.files())
        self.files.update(repository.changed)
        repository.changed.clear()

    def look(self, path: str) -> TargetFile | None:
        """Refresh, then find a target. Raises python-tuf's RepositoryError."""
        url, folder = "http://repository.invalid/", str(self.folder)
        fetcher = _Files(self.files)
        updater = Updater(folder, url, folder, url, fetcher=fetcher, bootstrap=self.root)
        updater.refresh()
        return updater.get_targetinfo(path)

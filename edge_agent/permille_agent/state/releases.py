"""Which releases this device has accepted and which package is installed.

Per release name: the highest version ever accepted (never lowered, not even when its download fails) and the
package that is installed. Reading needs no network; `pull.py` writes.
"""

from dataclasses import asdict, dataclass
from typing import Any

from permille.errors import OperatorError
from permille_agent.state.home import Home, read_state, write_state


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledRelease:
    """A release whose package is complete and verified in the blob folder.

    Attributes:
        name: the release's name.
        version: its version, a number that only grows.
        manifest_digest: digest of the package's manifest; the package is opened by it.
    """

    name: str
    version: int
    manifest_digest: str


def installed_release(home: Home) -> InstalledRelease | None:
    """What is installed, or None before the first `pull`."""
    installed = _read(home).get("installed")
    if installed is None:
        return None
    try:
        return InstalledRelease(**installed)
    except TypeError as exc:
        raise OperatorError(f"expected name, version and manifest_digest in {home.releases}: {exc}") from exc


def last_version(home: Home, name: str) -> int | None:
    """The highest version of release `name` that was ever accepted; None before the first."""
    version = _read(home).get("last_versions", {}).get(name, {}).get("version")
    return None if version is None else int(version)


def last_digest(home: Home, name: str) -> str | None:
    """The manifest digest of the highest version that was accepted."""
    digest = _read(home).get("last_versions", {}).get(name, {}).get("manifest_digest")
    return None if digest is None else str(digest)


def accepted_digests(home: Home) -> tuple[str, ...]:
    """Manifest digests of the highest accepted version of each release; their download may be under way."""
    return tuple(str(entry["manifest_digest"]) for entry in _read(home).get("last_versions", {}).values())


def forget_versions(home: Home) -> None:
    """Forget which versions were accepted: they belong to the signing keys of an enrolment that ended."""
    write_state(home.releases, {**_read(home), "last_versions": {}})


def record_accepted(home: Home, name: str, version: int, manifest_digest: str) -> None:
    """Remember that `version` was accepted, before its download: nothing older is accepted from now on."""
    state = _read(home)
    accepted = {"version": version, "manifest_digest": manifest_digest}
    state.setdefault("last_versions", {})[name] = accepted
    write_state(home.releases, state)


def record_installed(home: Home, release: InstalledRelease) -> None:
    """Switch to a package that is complete and verified. The active personalisation is not touched."""
    write_state(home.releases, {**_read(home), "installed": asdict(release)})


def _read(home: Home) -> dict[str, Any]:
    return read_state(home.releases) or {}

"""The agent's TUF client as a program for the conformance suite of TUF: init, refresh, download.

    python -m tests.conformance.client --metadata-dir DIR init ROOT
    python -m tests.conformance.client --metadata-dir DIR --metadata-url URL refresh
    python -m tests.conformance.client ... --target-dir DIR --target-base-url URL --target-name PATH download

The protocol is CLIENT-CLI.md of the suite. `make tuf-conformance` runs the suite.
"""

import argparse
import sys
from pathlib import Path
from urllib.parse import quote, urlsplit

from permille.errors import PackageError, PermilleError
from permille_agent.link.client import Connection
from permille_agent.link.trust import TrustedReleases

FIRST_ROOT = "first_root"  # no suffix .json, because the suite counts these files


def main() -> None:
    """Run one command. If anything is refused, exit with 1 and print the reason."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--metadata-dir", "--target-dir"):
        parser.add_argument(name, type=Path)
    for name in ("--metadata-url", "--target-base-url"):
        parser.add_argument(name, default="")
    parser.add_argument("--target-name", action="append", default=[])
    parser.add_argument("command", choices=("init", "refresh", "download"))
    parser.add_argument("root", type=Path, nargs="?")
    asked = parser.parse_args()
    try:
        _run(asked)
    except PermilleError as exc:
        sys.exit(f"{type(exc).__name__}: {exc}")


def _run(asked: argparse.Namespace) -> None:
    first = asked.metadata_dir / FIRST_ROOT
    if asked.command == "init":
        first.write_bytes(asked.root.read_bytes())
        return
    url = urlsplit(asked.metadata_url)
    with Connection(f"{url.scheme}://{url.netloc}", attempts=1) as connection:
        trusted = TrustedReleases(
            asked.metadata_dir,
            first.read_bytes(),
            lambda path, limit_bytes: connection.call("GET", path, limit_bytes=limit_bytes),
            metadata_url=url.path,
            targets_url=urlsplit(asked.target_base_url).path,
        )
        trusted.refresh()
        for name in asked.target_name:
            if (target := trusted.find(name)) is None:
                raise PackageError("release-unlisted", f"expected {name} in the signed metadata")
            trusted.download(target, asked.target_dir / quote(name, safe=""))


if __name__ == "__main__":
    main()

"""Bring the texts that `sources.toml` takes from public git repositories into a folder.

Each source lands in `<texts>/<name>` at its own commit. `--mirror` reads another place than the origin, for
instance local clones: `--mirror '/clones/{owner}/{repository}'`. Sources already there as listed are left
alone; where the commit or the files of one have changed, it is fetched anew, and those fetched before go once
all that replaces them has come. A stamp (`.fetched`, what was asked for) of another form is such a change.

    python -m permille_lab.reference.fetch --texts build/reference/texts
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

from permille.errors import InputError
from permille_lab.reference.sources import DEFAULT_SOURCES, Source, read_sources

_SUBMODULE = "160000 "
# For local clones: lets them leave out what is not asked for (pictures, above all), as public servers do.
_UPLOAD_PACK = "git -c uploadpack.allowFilter=true -c uploadpack.allowAnySHA1InWant=true upload-pack"


def fetch(source: Source, folder: Path, mirror: str | None) -> None:
    """Check out one source's files at its commit in `folder`, and nothing that an earlier fetch has left."""
    if source.origin is None or source.commit is None:
        return
    stamp, asked = folder / ".fetched", _asked(source)
    if stamp.exists() and stamp.read_text() == asked:
        return
    folder.mkdir(parents=True, exist_ok=True)
    owner, repository = source.origin.rstrip("/").split("/")[-2:]
    place = mirror.format(owner=owner, repository=repository) if mirror else source.origin
    _git(folder, "init", "-q")
    _git(folder, "config", "maintenance.auto", "false")
    _git(folder, "config", "remote.origin.url", place)
    _git(folder, "config", "remote.origin.promisor", "true")
    _git(folder, "config", "remote.origin.uploadpack", _UPLOAD_PACK)
    _git(folder, "fetch", "-q", "--depth", "1", "--filter=blob:none", "origin", source.commit)
    patterns = [f":(glob){pattern}" for pattern in source.files]
    patterns += [f":(exclude,glob){pattern}" for pattern in source.exclude]
    with TemporaryDirectory(dir=(folder / ".git").absolute()) as aside:  # brings the texts, for good
        index = {"GIT_INDEX_FILE": str(Path(aside) / ".index")}
        _git(folder, "read-tree", source.commit, **index)
        listed = _git(folder, "ls-files", "-s", "-z", "--", *patterns, **index)
        if not listed:
            raise InputError(f"expected files of {source.files} in {place} at {source.commit}, found none")
        _fetch_blobs(folder, listed)
        _git(folder, f"--work-tree={aside}", "checkout", "-q", source.commit, "--", *patterns, **index)
    stamp.unlink(missing_ok=True)
    _git(folder, "rm", "-r", "-q", "-f", "--ignore-unmatch", ".")  # of what is here, only what git brought
    _git(folder, "checkout", "-q", source.commit, "--", *patterns)
    stamp.write_text(asked)


def _fetch_blobs(folder: Path, listed: str) -> None:
    """Bring what `git ls-files -s -z` names in one go: a checkout would ask for its files one by one."""
    names = {line.split()[1] for line in listed.split("\0") if line and not line.startswith(_SUBMODULE)}
    options = (
        "--no-tags",
        "--no-write-fetch-head",
        "--recurse-submodules=no",
        "--filter=blob:none",
        "--stdin",
    )
    _git(
        folder,
        *("-c", "fetch.negotiationAlgorithm=noop", "fetch", "-q", "origin", *options),
        lines="".join(f"{name}\n" for name in sorted(names)),
    )


def _asked(source: Source) -> str:
    """All that decides which files lie there, and with what in them."""
    return json.dumps({"commit": source.commit, "files": source.files, "exclude": source.exclude})


def _git(folder: Path, *arguments: str, lines: str = "", **settings: str) -> str:
    return subprocess.run(
        ["git", "-C", str(folder), *arguments],
        check=True,
        env={**os.environ, **settings},
        input=lines,
        stdout=subprocess.PIPE,
        encoding="utf-8",
        errors="surrogateescape",
    ).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sources", type=Path, default=DEFAULT_SOURCES)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--mirror", help="a place with {owner} and {repository} instead of each origin")
    args = parser.parse_args()
    for source in read_sources(args.sources).sources:
        fetch(source, args.texts / source.name, args.mirror)


if __name__ == "__main__":
    main()

"""Build all files of a release in `dist`: `make release`.

    python -m scripts.release [--key ~/.ssh/id_ed25519]

    permille-*.tar.gz         the sources
    permille-*.whl            wheels with kernels for Linux on x86-64 and on Arm, and one without for the rest
    permille-*.tgz            the Helm chart
    *.cdx.json                the components of agent, API and worker (CycloneDX; `make sbom` writes them)
    NOTES.md                  the newest section of CHANGELOG.md
    SHA256SUMS                the digests of these files
    SHA256SUMS.sig            with --key: a signature, which `ssh-keygen -Y verify` checks

The files are built from the last commit, and have its time. So the same commit gives the same bytes if
hatchling, helm and the two compilers (gcc, and `make test-neon`'s for Arm) have the same versions.
"""

import argparse
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
COMPILERS: Final = {"any": "", "x86_64": "gcc", "aarch64": "aarch64-linux-gnu-gcc"}
"""Each value of `PERMILLE_WHEEL`, and the compiler of its kernels."""
SBOMS: Final = ("agent", "api", "worker", "cuda")


def notes(changelog: str) -> str:
    """Return the newest section of a changelog, without its heading. Raises SystemExit."""
    _, heading, rest = changelog.partition("\n## ")
    text = rest.partition("\n## ")[0].partition("\n")[2].strip()
    if not heading or not text:
        raise SystemExit(
            "CHANGELOG.md has no section `## VERSION` with text. Write the notes of this release."
        )
    return text + "\n"


def check_clean(root: Path) -> None:
    """Check that the files of a checkout are those of its last commit. Raises SystemExit."""
    # `make sbom` reads the working tree, so its lists would not be those of the commit.
    command = ["git", "status", "--porcelain", "--untracked-files=no"]
    if found := subprocess.run(command, cwd=root, stdout=subprocess.PIPE, check=True, text=True).stdout:
        raise SystemExit(f"A release is built from the last commit. Commit or undo these changes:\n{found}")


def check_folder(folder: Path) -> None:
    """Check that a folder can be replaced: it is missing or empty, or it is an earlier release.

    Raises:
        SystemExit: the folder has other files.
    """
    if not folder.exists():
        return
    sums = folder / "SHA256SUMS"
    known = {line.partition("  ")[2] for line in sums.read_text().splitlines()} if sums.is_file() else set()
    found = {path.name for path in folder.iterdir()} - known - {"SHA256SUMS", "SHA256SUMS.sig"}
    if found:
        raise SystemExit(f"{folder} has files of no release, such as {min(found)}. Name another folder.")


def build(target: str, source: Path, folder: Path, **variables: str) -> None:
    """Build a source distribution or a wheel with hatchling."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)]
    subprocess.run(command, cwd=source, env={**os.environ, **variables}, check=True)


def check_platform(wheel: Path) -> None:
    """Check that the kernels of a wheel run on the platforms that its name promises. Raises SystemExit."""
    shown = subprocess.run(
        [sys.executable, "-m", "auditwheel", "show", "--json", wheel], stdout=subprocess.PIPE, check=True
    )
    found = json.loads(shown.stdout)["overall_tag"]
    if not wheel.stem.endswith(f"-{found}"):
        raise SystemExit(f"{wheel.name} needs the platform {found}. Build it with an older glibc.")


def release(folder: Path, sboms: Path) -> None:
    """Build the files of a release, without a signature, in an empty folder.

    Args:
        folder: the folder.
        sboms: the folder with the result of `make sbom`.
    """
    commit = subprocess.run(
        ["git", "log", "-1", "--format=%ct"], cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True
    )
    sources = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, stdout=subprocess.PIPE, check=True)
    time = commit.stdout.strip()
    with tempfile.TemporaryDirectory(prefix="permille-release-") as temporary:
        source = Path(temporary)
        with tarfile.open(fileobj=io.BytesIO(sources.stdout)) as archive:
            archive.extractall(source, filter="data")
        build("sdist", source, folder, SOURCE_DATE_EPOCH=time)
        for machine, compiler in COMPILERS.items():
            build("wheel", source, folder, SOURCE_DATE_EPOCH=time, PERMILLE_WHEEL=machine, CC=compiler)
        subprocess.run(["helm", "package", source / "deploy" / "helm", "-d", folder], check=True)
        (folder / "NOTES.md").write_text(notes((source / "CHANGELOG.md").read_text()))
    for wheel in folder.glob("*manylinux*.whl"):
        check_platform(wheel)
    for name in SBOMS:
        shutil.copyfile(sboms / f"{name}.cdx.json", folder / f"{name}.cdx.json")
    digests = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}
    lines = (f"{digest}  {name}\n" for name, digest in sorted(digests.items()))
    (folder / "SHA256SUMS").write_text("".join(lines))


def main() -> None:
    """Build the files in a new `dist`, and sign their digests if a key is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="a new folder, or an earlier release")
    parser.add_argument("--key", type=Path, help="a private key of SSH that signs SHA256SUMS")
    parser.add_argument("--check", action="store_true", help="only check that a release can be built")
    arguments = parser.parse_args()
    check_clean(ROOT)
    check_folder(arguments.out)
    notes((ROOT / "CHANGELOG.md").read_text())
    if arguments.check:
        return
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    # A release that fails leaves the earlier one as it is.
    with tempfile.TemporaryDirectory(prefix=".release-", dir=arguments.out.parent) as temporary:
        new = Path(temporary) / "new"
        new.mkdir()
        release(new, ROOT / "build" / "sbom")
        if arguments.key is not None:
            signs = ["ssh-keygen", "-Y", "sign", "-n", "permille-release", "-f", arguments.key]
            subprocess.run([*signs, new / "SHA256SUMS"], check=True)
        if arguments.out.exists():
            shutil.rmtree(arguments.out)
        new.rename(arguments.out)
    for file in sorted(arguments.out.iterdir()):
        print(f"{file.stat().st_size:>12,}  {file.name}")


if __name__ == "__main__":
    main()

"""Build all files of a release in `dist`: `make release`.

    python -m scripts.release [--key ~/.ssh/id_ed25519]

    permille-*.tar.gz         the sources
    permille-*.whl            wheels with kernels for Linux on x86-64 and on Arm, and one without for the rest
    *.cdx.json                the components of agent, API and worker (CycloneDX; `make sbom` writes them)
    NOTES.md                  the newest section of CHANGELOG.md
    SHA256SUMS                the digests of these files
    SHA256SUMS.sig            with --key: a signature, which `ssh-keygen -Y verify` checks

The files are built from the last commit, and have its time. So the same commit gives the same bytes if
hatchling and the two compilers (gcc, and `make test-neon`'s for Arm) have the same versions.
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
    """Return the newest section of a changelog, without its heading."""
    return changelog.split("\n## ")[1].partition("\n")[2].strip() + "\n"


def check_clean(root: Path) -> None:
    """Check that the files of a checkout are those of its last commit. Raises SystemExit."""
    # `make sbom` reads the working tree, so its lists would not be those of the commit.
    command = ["git", "status", "--porcelain", "--untracked-files=no"]
    if found := subprocess.run(command, cwd=root, stdout=subprocess.PIPE, check=True, text=True).stdout:
        raise SystemExit(f"A release is built from the last commit. Commit or undo these changes:\n{found}")


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
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="a folder, which is made anew")
    parser.add_argument("--key", type=Path, help="a private key of SSH that signs SHA256SUMS")
    arguments = parser.parse_args()
    check_clean(ROOT)
    shutil.rmtree(arguments.out, ignore_errors=True)
    arguments.out.mkdir(parents=True)
    release(arguments.out, ROOT / "build" / "sbom")
    if arguments.key is not None:
        signs = ["ssh-keygen", "-Y", "sign", "-n", "permille-release", "-f", arguments.key]
        subprocess.run([*signs, arguments.out / "SHA256SUMS"], check=True)
    for file in sorted(arguments.out.iterdir()):
        print(f"{file.stat().st_size:>12,}  {file.name}")


if __name__ == "__main__":
    main()

"""Writes the hash-locked requirements of the API, the workers and the agent: `make lock`.

    python -m scripts.lock            # writes requirements/*.txt; needs a package index

Each file is the whole closure of what a program imports, for Linux and macOS, as uv resolves it from
`pyproject.toml` under `constraints.txt`. Its first line holds the digest of what was asked for, by which a
test finds without a network that a file is older than that. A file is installed by itself, then the program:

    pip install --no-deps --require-hashes --only-binary :all: -r requirements/api.txt

Wheels alone: a source distribution is built with whatever versions pip finds that day.

Two things are not as uv finds them. tokenizers asks for huggingface_hub, for downloads that the agent never
makes: the agent's file leaves it out, with all that it alone asks for. torch on Linux asks for the libraries
of CUDA: they are in a file of their own, and torch has the hash of PyTorch's CPU build beside those of the
default one, so that `worker.txt` alone fits the CPU index, and together with `cuda.txt` the default index.
`build.txt` is what making the wheel takes.
"""

import hashlib
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
FOLDER: Final = ROOT / "requirements"
EXTRAS: Final = {
    "agent": ("agent",),
    "api": ("service", "celery", "postgres", "s3", "telemetry"),
    "worker": ("workers", "celery", "postgres", "s3", "telemetry"),
}
BUILD: Final = "build"
OVERRIDES: Final = {"agent": ("huggingface-hub ; sys_platform == 'never'",)}
"""A requirement of no platform is how uv is told that there is none."""
CUDA: Final = re.compile(r"(nvidia|cuda|triton)[a-z0-9-]*==")
TORCH_CPU: Final = {
    # `pip hash` of the wheels that PyTorch's CPU index offers; others are added here.
    "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl": (
        "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b"
    ),
}


def asked_by(program: str) -> list[str]:
    """What `pyproject.toml` asks for on behalf of a program."""
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    if program == BUILD:
        return list(document["build-system"]["requires"])
    extras = document["project"]["optional-dependencies"]
    asked = [
        *document["project"]["dependencies"],
        *(line for extra in EXTRAS[program] for line in extras[extra]),
    ]
    return [line for one in asked for line in (extras["torch"] if one == "permille[torch]" else [one])]


def digest_of_inputs(program: str) -> str:
    """What a program's file depends on, as 16 hexadecimal digits."""
    text = json.dumps([asked_by(program), OVERRIDES.get(program, ()), TORCH_CPU])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def resolve(program: str) -> list[str]:
    """The blocks of a program's file: a requirement each, with its hashes on lines of their own."""
    with tempfile.TemporaryDirectory() as folder:
        overrides = Path(folder) / "overrides.txt"
        overrides.write_text("\n".join(OVERRIDES.get(program, ())))
        command = [sys.executable, "-m", "uv", "pip", "compile", "--universal", "--python-version", "3.11"]
        command += ["--generate-hashes", "--no-annotate", "--no-header", "--quiet"]
        command += ["--constraint", "constraints.txt", "--override", str(overrides), "-"]
        asked = "\n".join(asked_by(program))
        done = subprocess.run(command, cwd=ROOT, check=True, input=asked, stdout=subprocess.PIPE, text=True)
    return re.split(r"\n(?=\S)", done.stdout.strip())


def with_cpu_build(block: str) -> str:
    """A block of torch with the hashes of its CPU build."""
    first, *hashes = block.split(" \\\n    --hash=")
    return " \\\n    --hash=".join([first, *sorted({*hashes, *(f"sha256:{h}" for h in TORCH_CPU.values())})])


def write(name: str, program: str, blocks: list[str]) -> None:
    """Write a file of requirements below its head."""
    head = f"# Written by `make lock` for inputs {digest_of_inputs(program)}; scripts/lock.py says how.\n"
    (FOLDER / f"{name}.txt").write_text(head + "".join(f"{block}\n" for block in blocks))


def main() -> None:
    """Resolve and write all files."""
    for program in (BUILD, *EXTRAS):
        blocks = resolve(program)
        blocks = [with_cpu_build(block) if block.startswith("torch==") else block for block in blocks]
        write(program, program, [block for block in blocks if not CUDA.match(block)])
        if program == "worker":
            write("cuda", program, [block for block in blocks if CUDA.match(block)])


if __name__ == "__main__":
    main()

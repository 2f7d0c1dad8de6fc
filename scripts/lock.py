"""Write requirements with hashes for the API, the workers, the agent and the build: `make lock`.

    python -m scripts.lock            # writes requirements/*.txt; needs a package index

Each file has all direct and indirect requirements of a program, for Linux and macOS. uv resolves them from
`pyproject.toml` with `constraints.txt`. The first line has a digest of these requirements. With it, a test
detects an outdated file without a network. Install a file before the program:

    pip install --no-deps --require-hashes --only-binary :all: -r requirements/api.txt

Only wheels are installed, because the build of a source distribution would use unlocked versions.

Two requirements differ from uv's result:

- tokenizers requires huggingface_hub for downloads, which the agent never makes. `agent.txt` leaves it out,
  with everything that only huggingface_hub requires.
- torch on Linux requires the libraries of CUDA. They are in `cuda.txt`. `worker.txt` has the hashes of
  torch's default build and of its CPU build. It can be installed by itself from PyTorch's CPU index, or
  together with `cuda.txt` from the default index.

`build.txt` has the requirements for building the wheel.
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
"""Overrides of requirements. A marker that is never true removes a requirement."""
CUDA: Final = re.compile(r"(nvidia|cuda|triton)[a-z0-9-]*==")
TORCH_CPU: Final = {
    # `pip hash` of wheels on PyTorch's CPU index. Add those of further versions here.
    "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl": (
        "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b"
    ),
}


def asked_by(program: str) -> list[str]:
    """Return the requirements of a program in `pyproject.toml`."""
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
    """Return a digest of the inputs of a program's file, 16 hexadecimal digits."""
    text = json.dumps([asked_by(program), OVERRIDES.get(program, ()), TORCH_CPU])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def resolve(program: str) -> list[str]:
    """Resolve a program's requirements. Return each with its hashes on separate lines."""
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
    """Return torch's requirement with the hashes of its CPU build added."""
    first, *hashes = block.split(" \\\n    --hash=")
    return " \\\n    --hash=".join([first, *sorted({*hashes, *(f"sha256:{h}" for h in TORCH_CPU.values())})])


def write(name: str, program: str, blocks: list[str]) -> None:
    """Write a file of requirements, with the digest of its inputs in the first line."""
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

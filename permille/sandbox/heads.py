"""Facts from the heads of a tenant's files, read in a confined child process.

    facts = read_facts(HeadKind.FOLDER, Path("models/tiny"))

The service registers models and corpora. Their files may be huge, forged, or cut while they are read. Parsing
them may take much memory or time, and would hold Python's lock, or end the process. So a child process reads
them, with limits of memory and time:

    python -m permille.sandbox.heads KIND PATH

It writes one line of JSON. Weights are never read, only the headers that name them.
"""

import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from permille.errors import InputError, PackageError
from permille.sandbox.confinement import confine, die_with_parent
from permille.sandbox.process import SandboxError, run_once
from permille.tokenizer_files import MAX_TEMPLATE_CHARACTERS, TEMPLATE_FILE, ReadFile, TokenizerFiles

# A GGUF file with the largest vocabulary that we know takes 0.5 GB of it.
MEMORY_BYTES: Final = 1 << 30
CPU_S: Final = 30
# Six times the processor time. On a busy machine, this process of low priority gets little of it.
MAX_SETTINGS_BYTES: Final = 64 << 20
TIMEOUT_S: Final = 180.0


class HeadKind(StrEnum):
    """The kinds of files whose heads are read."""

    FOLDER = "folder"
    GGUF = "gguf"
    CORPUS = "corpus"


def read_facts(kind: HeadKind, path: Path) -> Mapping[str, Any]:
    """Read the head of a file in a child process.

    Returns:
        The facts about a model: family, config, numbers of weights, and bytes. There are none about a corpus.

    Raises:
        InputError: the file is refused, or reading it breaks a limit.
    """
    try:
        done = run_once("permille.sandbox.heads", kind, str(path), timeout_s=TIMEOUT_S)
        answer: dict[str, Any] = json.loads(done.stdout)
    except SandboxError as exc:
        raise InputError(f"{path.name} cannot be read: {exc}") from exc
    except ValueError as exc:
        raise InputError(
            f"{path.name} cannot be read within {MEMORY_BYTES >> 20} MiB of memory and {CPU_S} s: the "
            f"process that reads it ended with {done.returncode}."
        ) from exc
    if "error" in answer:
        raise InputError(str(answer["error"]))
    facts: Mapping[str, Any] = answer["facts"]
    return facts


def _facts_of_folder(folder: Path) -> Mapping[str, Any]:
    from permille.models.checkpoint import Checkpoint, inside, read_config
    from permille.models.conversion import pickled_weights

    def read(name: str) -> bytes | None:
        path = folder / name
        # The files with a chat template are smaller.
        known = path.is_file() and path.stat().st_size <= MAX_SETTINGS_BYTES
        return inside(folder, name).read_bytes() if known else None

    _check_template(folder.name, read)
    # Pickled weights can run code, so only the sandboxed child process of a job opens them.
    if pickled_weights(folder):
        return _facts_of_config(read_config(folder))
    checkpoint = Checkpoint(folder)
    return _facts_of_config(checkpoint.config) | {
        "size_bytes": checkpoint.size_bytes,
        "parameter_count": checkpoint.parameters,
    }


def _facts_of_gguf(path: Path) -> Mapping[str, Any]:
    from permille.models.gguf.config import read_model
    from permille.models.gguf.file import GgufFile
    from permille.models.gguf.tokenizer import chat_template, tokenizer_files

    model = read_model(GgufFile(path))
    # Refuse now what the first job would refuse.
    documents, template = tokenizer_files(model.file), chat_template(model.file)

    def read(name: str) -> bytes | None:
        if name == TEMPLATE_FILE:
            return None if template is None else template.encode()
        return json.dumps(documents[name]).encode() if name in documents else None

    _check_template(path.name, read)
    return _facts_of_config(model.config) | {"size_bytes": path.stat().st_size}


def _check_template(name: str, read: ReadFile) -> None:
    """Render one conversation, because a fault of the template would show only after the first jobs."""
    from permille.sandbox.child import Child

    files = TokenizerFiles.read(read)
    if files.template is None:
        return
    talk = [("user", "Hi"), ("assistant", "Hello"), ("user", "Bye")]
    request = {
        "do": "render",
        "template": files.template,
        "variables": files.variables,
        "messages": [{"role": role, "content": said} for role, said in talk],
        "prompt": True,
        "prefixes": [],
        "limit": MAX_TEMPLATE_CHARACTERS,
    }
    if (why := Child().answer(request).get("error")) is not None:
        raise InputError(f"{name} has a chat template that does not work. {why}")


def _facts_of_config(config: Mapping[str, Any]) -> dict[str, Any]:
    from permille.models.families import expected_tensors, family_of, scoped_tensors

    parameters = sum(math.prod(shape) for shape in expected_tensors(config).values())
    return {
        "family": family_of(config).value,
        "config": dict(config),
        "size_bytes": 4 * parameters,  # the size of the float32 folder that the first job makes
        "parameter_count": parameters,
        "scoped_parameter_count": sum(math.prod(shape) for _, shape in scoped_tensors(config)),
    }


def _check_corpus(path: Path) -> Mapping[str, Any]:
    from permille.corpora.sources import check_head

    check_head(path)
    return {}


_READERS: Final[Mapping[HeadKind, Callable[[Path], Mapping[str, Any]]]] = {
    HeadKind.FOLDER: _facts_of_folder,
    HeadKind.GGUF: _facts_of_gguf,
    HeadKind.CORPUS: _check_corpus,
}


def main(kind: HeadKind, path: Path) -> int:
    """Read one head and write one line. Return the exit code."""
    die_with_parent()
    os.nice(10)  # requests that the parent answers come first
    confine(memory_bytes=MEMORY_BYTES, cpu_s=CPU_S)
    try:
        answer: dict[str, object] = {"facts": _READERS[kind](path)}
    except (InputError, PackageError) as exc:
        answer = {"error": str(exc)}
    except MemoryError:
        answer = {"error": f"Reading {path.name} needs more than {MEMORY_BYTES >> 20} MiB of memory."}
    except OSError as exc:
        answer = {"error": f"{path.name} cannot be read: {exc.strerror}."}
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(HeadKind(sys.argv[1]), Path(sys.argv[2])))

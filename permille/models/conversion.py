"""Conversion of older model folders, which have pickled weights or no `tokenizer.json`.

    folder = modern_folder(Path("opt-1.3b"), Path("models"))

A pickle can contain code. So it is opened only in a confined child process, by
`torch.load(weights_only=True)`, which builds tensors and nothing else. The child also converts a slow
tokenizer to `tokenizer.json`. The original folder does not change.
"""

import shutil
from pathlib import Path
from typing import Final

from permille.digests import canonical_json, digest_of, digest_of_file
from permille.errors import InputError
from permille.files import made_once
from permille.models.checkpoint import TEXT_FILES, WEIGHTS_FILE, Checkpoint, inside
from permille.sandbox.process import SandboxError, run_once

PICKLES: Final = ("pytorch_model.bin", "pytorch_model-*.bin")
PICKLE_INDEX: Final = "pytorch_model.bin.index.json"
FOLDERS: Final = "converted"
"""The folder below the model root that holds converted models."""
MAX_PICKLE_BYTES: Final = 64 << 30
CHILD_S: Final = 1800.0
SLOW_TOKENIZERS: Final = ("vocab.json", "tokenizer.model")


def modern_folder(folder: Path, root: Path) -> Path:
    """Return `folder` if it needs no conversion. Otherwise return its conversion, made once below `root`.

    Raises:
        InputError: a file is damaged or too large, or a pickle holds more than tensors. No folder is left.
        OSError: a file cannot be read or written.
    """
    pickles = pickled_weights(folder)
    has_slow = any((folder / name).exists() for name in SLOW_TOKENIZERS)
    if not pickles and ((folder / "tokenizer.json").exists() or not has_slow):
        return folder
    weights = pickles or sorted(path.name for path in folder.glob("*.safetensors"))
    texts = [name for name in TEXT_FILES if (folder / name).exists()]
    # The text files determine the tokenizer, so a change in them needs another conversion.
    contents = {name: digest_of_file(inside(folder, name)) for name in (*weights, *texts)}
    digest = digest_of(b"permille-converted-1\0" + canonical_json(contents)).removeprefix("sha256:")

    def convert(temporary: Path) -> None:
        for name in (*texts, *(() if pickles else weights)):
            shutil.copyfile(inside(folder, name), temporary / name)
        _convert(folder, temporary, pickles)
        # Check the model before the folder gets its name, so that no invalid model is kept.
        Checkpoint(temporary)

    return made_once(root / FOLDERS / digest, convert)


def add_tokenizer(folder: Path) -> None:
    """Make the `tokenizer.json` of a folder that has only a slow tokenizer.

    Raises:
        InputError: the tokenizer cannot be converted.
    """
    if not (folder / "tokenizer.json").exists():
        _convert(folder, folder, [])


def pickled_weights(folder: Path) -> list[str]:
    """Return the names of pickled weights. If there are safetensors, return none."""
    # Many repositories hold both, and safetensors cannot contain code.
    if any(folder.glob("*.safetensors")):
        return []
    return sorted({path.name for pattern in PICKLES for path in folder.glob(pattern)})


def _convert(folder: Path, made: Path, pickles: list[str]) -> None:
    paths = [inside(folder, name) for name in pickles]
    size = sum(path.stat().st_size for path in paths)
    if size > MAX_PICKLE_BYTES:
        raise InputError(
            f"{folder.name} has {size} bytes of pickled weights, and at most {MAX_PICKLE_BYTES} are "
            "converted. Save the model with `save_pretrained(..., safe_serialization=True)`."
        )
    try:
        child = run_once(
            "permille.sandbox.conversion", str(int(CHILD_S)), str(made), *map(str, paths), timeout_s=CHILD_S
        )
    except SandboxError as exc:
        raise InputError(f"{folder.name} cannot be converted: {exc}") from exc
    # Without pickles, the child converts the tokenizer alone.
    if child.returncode == 0 and (not paths or (made / WEIGHTS_FILE).exists()):
        return
    # The child has read untrusted bytes, so limit the length of its message before a log or a page shows it.
    said = child.stdout.decode(errors="replace").strip()[:500]
    raise InputError(
        f"{folder.name} cannot be converted: "
        + (said or f"the process that reads it ended with {child.returncode}. Memory may be too small.")
    )

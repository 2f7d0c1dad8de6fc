"""The child process that opens pickled weights and slow tokenizers.

    python -m permille.sandbox.conversion SECONDS FOLDER PICKLE...

It writes `model.safetensors` into FOLDER, and also `tokenizer.json` if there is none. On failure it
prints the reason in one line on standard output. It sets limits on its memory, on its processor time
(SECONDS), on the files that it writes, and on its network (`confinement.py`).
"""

import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from permille.sandbox.confinement import confine, die_with_parent

# The address space that torch and transformers reserve, and the memory that they may use besides the weights.
# Without CUDA they use 0.2 GB.
_LIBRARIES_BYTES = 16 << 30
_WORK_BYTES = 2 << 30


class _UnreadableError(Exception):
    """A file that cannot be converted. The message is for the user."""


def main(cpu_s: int, folder: Path, pickles: list[Path]) -> int:
    """Convert the files. Return the exit code."""
    die_with_parent()
    size = sum(path.stat().st_size for path in pickles)
    # The weights are loaded once, and copied once where their order in memory differs.
    confine(
        memory_bytes=_LIBRARIES_BYTES + 4 * size,
        data_bytes=_WORK_BYTES + 4 * size,
        cpu_s=cpu_s,
        file_bytes=2 * size + (256 << 20),
    )
    try:
        if pickles:
            # The file holds each weight once, except that a tied head may be in it twice.
            _convert_weights(folder, pickles, most=2 * size)
        if not (folder / "tokenizer.json").exists():
            _convert_tokenizer(folder)
    except _UnreadableError as exc:
        sys.stdout.write(str(exc).replace("\n", " "))
        return 1
    return 0


def _convert_weights(folder: Path, pickles: list[Path], *, most: int) -> None:
    import torch
    from safetensors.torch import save_file

    found: dict[str, Any] = {}
    places = set[int]()
    claimed = 0
    for path in pickles:
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        except Exception as exc:  # an untrusted file can cause any error
            raise _UnreadableError(
                # Do not quote torch's message, which advises to load the file without protection.
                f"{path.name} is damaged, or holds more than tensors ({type(exc).__name__}). Download it "
                "again, or take the model's safetensors."
            ) from exc
        if not isinstance(loaded, dict):
            raise _UnreadableError(f"{path.name} holds a {type(loaded).__name__}, not tensors by name.")
        for name, tensor in loaded.items():
            dense = isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided
            if not isinstance(name, str) or not dense:
                raise _UnreadableError(
                    f"{path.name} holds {name!r:.80}, which is no dense tensor with a name."
                )
            if name in found:
                raise _UnreadableError(f"{path.name} holds {name!r:.80}, which another file holds, too.")
            # A tensor can repeat bytes, by a stride of 0 or by sharing them with another tensor. So a small
            # file could claim any size.
            claimed += tensor.numel() * tensor.element_size()
            if claimed > most:
                raise _UnreadableError(
                    f"{path.name} is damaged: its tensors claim {claimed} bytes or more, which the file does "
                    "not have. Download it again."
                )
            # The safetensors format has no shared tensors, such as a tied head, so copy them.
            is_shared = tensor.data_ptr() in places
            places.add(tensor.data_ptr())
            found[name] = tensor.contiguous().clone() if is_shared else tensor.contiguous()
    save_file(found, folder / "model.safetensors")


def _convert_tokenizer(folder: Path) -> None:
    from transformers import AutoTokenizer

    alone = (folder / "tokenizer.model").exists() and not (folder / "vocab.json").exists()
    if alone and find_spec("sentencepiece") is None:
        # transformers would ask for tiktoken, which cannot read most of these files.
        raise _UnreadableError(
            "There is no tokenizer.json, and the package that reads tokenizer.model is not installed: "
            "pip install sentencepiece"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, use_fast=True, trust_remote_code=False, local_files_only=True
        )
        document = tokenizer.backend_tokenizer.to_str()
    except Exception as exc:  # an untrusted file can cause any error
        raise _UnreadableError(
            f"There is no tokenizer.json, and none can be made from the other files: {exc}"[:400]
        ) from exc
    (folder / "tokenizer.json").write_text(document, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Path(sys.argv[2]), [Path(name) for name in sys.argv[3:]]))

"""A checked model folder as a torch model or a tokenizer. Nothing in the folder is executed."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from permille.errors import InputError
from permille.models.checkpoint import Checkpoint, inside

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_model(folder: Path, dtype: torch.dtype = torch.float32) -> "PreTrainedModel":
    """The causal language model of a folder, in eval mode, on the CPU.

    Raises:
        InputError: as `Checkpoint`, or transformers finds tensors that do not fit its model.
    """
    from transformers import AutoModelForCausalLM

    Checkpoint(folder)
    model, info = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype,
        use_safetensors=True,
        trust_remote_code=False,
        local_files_only=True,
        output_loading_info=True,
    )
    wrong = {key: sorted(map(str, names)) for key, names in info.items() if names}
    if wrong:
        raise InputError(f"expected a checkpoint that fills the model exactly, got {wrong}")
    return model.eval()


class FileTokenizer:
    """The tokenizer of a `tokenizer.json`, run by the tokenizers library."""

    def __init__(self, folder: Path) -> None:
        """
        Raises:
            InputError: no tokenizer.json in the folder, or one that cannot be read.
        """
        import tokenizers

        path = inside(folder, "tokenizer.json")
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_file(str(path))
        except Exception as exc:  # the library raises bare Exception for every malformed file
            raise InputError(f"expected a tokenizer.json that the tokenizers library reads: {exc}") from exc
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

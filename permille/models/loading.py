"""Load a checked model folder as a torch model or a tokenizer. No code of the folder is run."""

from array import array
from base64 import b64decode
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from permille.beginnings import beginning, begun
from permille.errors import InputError
from permille.models.checkpoint import Checkpoint, inside
from permille.models.families import canonical_name
from permille.sandbox.process import MAX_TOKENS_A_CHARACTER, Sandbox, SandboxError
from permille.tokenizer_files import MAX_TEMPLATE_CHARACTERS, TokenizerFiles, ends_of_turn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# FORMAT 3.4: the largest size of a file in a package.
MAX_TOKENIZER_BYTES = 64 << 20


def load_model(folder: Path, dtype: torch.dtype = torch.float32, *, device: str = "cpu") -> "PreTrainedModel":
    """Load the causal language model of a folder, in eval mode.

    Raises:
        InputError: as for `Checkpoint`, or tensors do not fit the model of transformers.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = Checkpoint(folder).config
    model, info = AutoModelForCausalLM.from_pretrained(
        folder,
        config=AutoConfig.for_model(**config),
        # Remove the prefixes of the text model in newer and older checkpoints of models with vision.
        key_mapping={
            r"^(model\.language_model|language_model\.model)\.": "model.",
            r"^language_model\.lm_head\.": "lm_head.",
        },
        dtype=dtype,
        # A pickle beside the safetensors is never opened.
        use_safetensors=True,
        trust_remote_code=False,
        local_files_only=True,
        output_loading_info=True,
    )
    # Old checkpoints also have buffers and heads that the model does not use.
    info["unexpected_keys"] = {
        name for name in info["unexpected_keys"] if canonical_name(config, str(name)) is not None
    }
    wrong = {key: sorted(map(str, names)) for key, names in info.items() if names}
    if wrong:
        raise InputError(f"The checkpoint does not match the model: {wrong}")
    return model.to(device).eval()


class FileTokenizer:
    """The tokenizer of a `tokenizer.json`, run by the tokenizers library in a confined child process.

    Attributes:
        bos: the tokens that the model reads before every text, often none (`permille.beginnings`).
        known_bos: the model's BOS, also if its texts do not begin with it. None if it has none.
    """

    def __init__(self, folder: Path) -> None:
        """Start the tokenizer.

        Raises:
            InputError: the folder has no tokenizer.json, or it cannot be read.
        """
        path = inside(folder, "tokenizer.json")
        if (size := path.stat().st_size) > MAX_TOKENIZER_BYTES:
            raise InputError(f"tokenizer.json is larger than {MAX_TOKENIZER_BYTES} bytes: {size}")
        files = TokenizerFiles.read(partial(_optional_file, folder))
        tokens = (*(files.special.get(name, "") for name in ("bos", "eos")), *ends_of_turn(files.template))
        self._sandbox = Sandbox(path.read_bytes, tokens=tokens, stops=files.stop_ids)
        loaded = _answer(self._sandbox.start)
        self.bos = beginning(files, loaded)
        self.known_bos: int | None = loaded["ids"][0]

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, after `bos`. Special tokens in it are text, as in a person's text.

        Raises:
            InputError: the tokenizer fails or breaks a limit.
        """
        limit = MAX_TOKENS_A_CHARACTER * (len(text) + 16)
        request = {"do": "encode", "text": text, "literal": True, "ends": True, "limit": limit}
        found = _answer(lambda: self._sandbox.ask(request, characters=len(text)))
        return begun(array("I", b64decode(found["ids"])).tolist(), self.bos)


class FileChat:
    """The chat template of a model folder, rendered and tokenized in a confined child process."""

    def __init__(self, folder: Path, files: TokenizerFiles) -> None:
        self._files = files
        load = inside(folder, "tokenizer.json").read_bytes
        self._sandbox = Sandbox(load, tokens=(files.special.get("bos", ""),))
        self._bos = beginning(files, _answer(self._sandbox.start))

    @classmethod
    def find(cls, folder: Path) -> "FileChat | None":
        """Read the chat template of a model folder, and try one question. Return None if it has none.

        Raises:
            InputError: the tokenizer cannot be read, or the template does not work.
            PackageError: as for `TokenizerFiles.read`.
        """
        files = TokenizerFiles.read(partial(_optional_file, folder))
        if files.template is None:
            return None
        chat = cls(folder, files)
        try:
            chat.prompt("Hi")
        except InputError as exc:
            raise InputError(f"{folder.name} has a chat template that does not work. {exc}") from exc
        return chat

    def prompt(self, question: str) -> NDArray[np.int64]:
        """Return the ids of a conversation with one question, up to the start of the answer.

        Raises:
            InputError: the template refuses the question.
        """
        messages = [{"role": "user", "content": question}]
        request: dict[str, Any] = {
            "do": "render",
            "template": self._files.template,
            "variables": self._files.variables,
            "messages": messages,
            "prompt": True,
            "prefixes": [],
            "limit": MAX_TEMPLATE_CHARACTERS,
        }
        text = str(_answer(lambda: self._sandbox.ask(request, characters=len(question)))["text"])
        limit = MAX_TOKENS_A_CHARACTER * (len(text) + 16)
        # The text already has the template's special tokens at both ends, so `ends` is False.
        encode = {"do": "encode", "text": text, "literal": False, "ends": False, "limit": limit}
        found = _answer(lambda: self._sandbox.ask(encode, characters=len(text)))
        return np.array(begun(array("I", b64decode(found["ids"])).tolist(), self._bos), np.int64)

    def stop_ids(self) -> frozenset[int]:
        """Return the tokens that end an answer."""
        return frozenset(self._files.stop_ids)


def _optional_file(folder: Path, name: str) -> bytes | None:
    path = folder / name
    if not path.is_file() or path.stat().st_size > MAX_TOKENIZER_BYTES:
        return None
    return inside(folder, name).read_bytes()


def _answer(ask: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
    try:
        answer = ask()
    except SandboxError as exc:
        raise InputError(str(exc)) from exc
    if "error" in answer:
        raise InputError(str(answer["error"]))
    return answer

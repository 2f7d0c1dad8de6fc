"""A checked model folder as a torch model or a tokenizer. Nothing in the folder is executed."""

import json
from array import array
from base64 import b64decode
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from permille.errors import InputError
from permille.models.checkpoint import Checkpoint, inside
from permille.sandbox.process import MAX_TOKENS_A_CHARACTER, Sandbox, SandboxError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# What a package may carry (FORMAT 3.4).
MAX_TOKENIZER_BYTES = 64 << 20
_MAX_TEMPLATE_CHARACTERS = 64 << 10


def load_model(folder: Path, dtype: torch.dtype = torch.float32, *, device: str = "cpu") -> "PreTrainedModel":
    """The causal language model of a folder, in eval mode.

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
    return model.to(device).eval()


class FileTokenizer:
    """The tokenizer of a `tokenizer.json`, run by the tokenizers library in a confined child."""

    def __init__(self, folder: Path) -> None:
        """
        Raises:
            InputError: no tokenizer.json in the folder, or one that cannot be read.
        """
        path = inside(folder, "tokenizer.json")
        if (size := path.stat().st_size) > MAX_TOKENIZER_BYTES:
            raise InputError(f"expected a tokenizer.json of at most {MAX_TOKENIZER_BYTES} bytes, got {size}")
        self._sandbox = Sandbox(path.read_bytes)
        _answer(self._sandbox.start)

    def encode(self, text: str) -> list[int]:
        """The ids of a text; special tokens in it are special.

        Raises:
            InputError: the tokenizer fails or breaks a limit.
        """
        limit = MAX_TOKENS_A_CHARACTER * (len(text) + 16)
        request = {"do": "encode", "text": text, "literal": False, "ends": True, "limit": limit}
        found = _answer(lambda: self._sandbox.ask(request, characters=len(text)))
        return array("I", b64decode(found["ids"])).tolist()


class FileChat:
    """The chat template of a model folder, rendered and tokenized in a confined child."""

    def __init__(self, folder: Path) -> None:
        """
        Raises:
            InputError: no chat template, one of more than 64 Ki characters, or a tokenizer that cannot be
                read.
        """
        read = partial(_optional_object, folder)
        config = {**read("special_tokens_map.json"), **read("tokenizer_config.json")}
        found = _chat_template(folder)
        if found is None:
            raise InputError(f"The model in {folder.name} has no chat template.")
        if len(found) > _MAX_TEMPLATE_CHARACTERS:
            raise InputError(f"The chat template has {len(found)} characters, more than 64 Ki.")
        self._template = found
        names = {name: config.get(name) for name in ("bos_token", "eos_token")}
        self._variables = {
            name: str(value.get("content") if isinstance(value, dict) else value or "")
            for name, value in names.items()
        }
        ids: set[int] = set()
        for name in ("generation_config.json", "config.json"):
            value = read(name).get("eos_token_id")
            ids |= {item for item in (value if isinstance(value, list) else [value]) if isinstance(item, int)}
        self._stop_ids = frozenset(ids)
        self._sandbox = Sandbox(inside(folder, "tokenizer.json").read_bytes)
        _answer(self._sandbox.start)

    @staticmethod
    def is_in(folder: Path) -> bool:
        """Say whether a model folder has a chat template."""
        return _chat_template(folder) is not None

    def prompt(self, question: str) -> NDArray[np.int64]:
        """The ids of a conversation in which the user has asked, up to where the answer begins.

        Raises:
            InputError: the template refuses it.
        """
        messages = [{"role": "user", "content": question}]
        request: dict[str, Any] = {
            "do": "render",
            "template": self._template,
            "variables": self._variables,
            "messages": messages,
            "prompt": True,
            "prefixes": [],
            "limit": _MAX_TEMPLATE_CHARACTERS,
        }
        text = str(_answer(lambda: self._sandbox.ask(request, characters=len(question)))["text"])
        limit = MAX_TOKENS_A_CHARACTER * (len(text) + 16)
        encode = {"do": "encode", "text": text, "literal": False, "ends": False, "limit": limit}
        found = _answer(lambda: self._sandbox.ask(encode, characters=len(text)))
        return np.array(array("I", b64decode(found["ids"])).tolist(), np.int64)

    def stop_ids(self) -> frozenset[int]:
        """The tokens that end an answer."""
        return self._stop_ids


def _chat_template(folder: Path) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return inside(folder, path.name).read_text()
    found = _optional_object(folder, "tokenizer_config.json").get("chat_template")
    return found if isinstance(found, str) else None


def _optional_object(folder: Path, name: str) -> dict[str, Any]:
    path = folder / name
    if not path.is_file() or path.stat().st_size > MAX_TOKENIZER_BYTES:
        return {}
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as exc:
        raise InputError(f"{name} of the model is not JSON: {exc}") from exc
    return value if isinstance(value, dict) else {}


def _answer(ask: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
    try:
        answer = ask()
    except SandboxError as exc:
        raise InputError(str(exc)) from exc
    if "error" in answer:
        raise InputError(f"expected a tokenizer.json that the tokenizers library reads: {answer['error']}")
    return answer

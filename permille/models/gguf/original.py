"""Tokenizer and metadata of the GGUF file that a model came from, unchanged, for an export.

    original = Original(Path("model.gguf"), package.config, read)
    original.write(writer)

`tokenizer.json` cannot hold all that llama.cpp reads from a file, for example the scores of tokens. So a
translation there and back can lose something. An export with the keys of the file loses nothing: llama.cpp
then reads the new file as it read the old one.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter

from permille.errors import InputError
from permille.models.families import expected_tensors
from permille.models.gguf.config import ROPE_FACTORS, read_model
from permille.models.gguf.description import Description, describe
from permille.models.gguf.file import GgufFile
from permille.models.gguf.tokenizer import (
    adds_bos,
    chat_template,
    special_texts,
    token_texts,
    tokenizer_files,
)
from permille.models.gguf.vocabulary import PromptRules, reading_rules, token_ids
from permille.tokenizer_files import ReadFile

OF_THE_WEIGHTS = (
    "general.architecture",
    "general.alignment",
    "general.file_type",
    "general.quantization_version",
)
"""Keys about the types and the places of the tensors. An export writes its own."""


class Original:
    """A GGUF file of the same model as a package.

    Attributes:
        prompt: the rules of a prompt.
        description: the description of the package's decoder, with the frequency divisors of the file.
    """

    def __init__(self, path: Path, config: Mapping[str, Any], read: ReadFile) -> None:
        """Read the file, and compare it with a package.

        Args:
            path: the file.
            config: the package's `config.json`.
            read: reads a file of the package's tokenizer.

        Raises:
            InputError: the file does not exist, is malformed, or is of another model. The message names the
                difference.
            OSError: the file cannot be opened.
        """
        if not path.is_file():
            raise InputError(f"There is no file {path}. Name the GGUF file from which the package was made.")
        self._file = file = GgufFile(path)
        model, own = read_model(file), describe(config)
        _compare(file, _properties(own), _properties(describe(model.config)))
        # The package's config describes the factors. Those of the file are the exact numbers.
        scaled = own.rope_factor_E is not None
        self.description = replace(own, rope_factor_E=file.float32(ROPE_FACTORS)) if scaled else own
        tokens = token_texts(file)
        texts = {f"token {number}": text for number, text in enumerate(tokens)}
        # The file may have placeholders where the package has no token.
        own_texts = {f"token {number}": text for text, number in token_ids(read).items()}
        _compare(file, texts | own_texts, texts)
        # Without a list of merges, the scores decide, and the export keeps those of the file.
        merged = "tokenizer.ggml.merges" in file.metadata
        own_rules, rules = (reading_rules(r, with_merges=merged) for r in (read, _files_of(file).get))
        _compare(file, own_rules, rules)
        eot = file.metadata.get("tokenizer.ggml.eot_token_id")
        end = {"eot": tokens[eot]} if isinstance(eot, int) and 0 <= eot < len(tokens) else {}
        self.prompt = PromptRules(
            special=special_texts(file, tokens) | end,
            add_bos=adds_bos(file),
            chat_template=chat_template(file),
        )

    def write(self, writer: GGUFWriter) -> None:
        """Write the keys of the file, except those of `OF_THE_WEIGHTS`."""
        for key, value in self._file.metadata.items():
            # The writer cannot write an empty list. llama.cpp reads such a list as it reads a missing key.
            if key not in OF_THE_WEIGHTS and value != []:
                writer.add_key_value(key, _encoded(value), *self._file.types[key])


def _files_of(file: GgufFile) -> dict[str, bytes]:
    return {name: json.dumps(document).encode() for name, document in tokenizer_files(file).items()}


def _properties(description: Description) -> dict[str, object]:
    """Return what llama.cpp knows of a decoder: keys of metadata, shapes of tensors, frequency divisors."""
    writer = GGUFWriter(None, description.name)
    description.write(writer)
    found: dict[str, object] = {key: value.value for key, value in writer.kv_data[0].items()}
    # The length of a context may be limited, and is no part of the mathematics.
    del found[f"{description.name}.context_length"]
    found |= expected_tensors(description.config)
    return found | {ROPE_FACTORS: 1.0 if description.rope_factor_E is None else description.rope_factor_E}


def _compare(file: GgufFile, package: Mapping[str, object], found: Mapping[str, object]) -> None:
    """Compare properties of the package with those of the file. Raises InputError."""
    for name in {**package, **found}:
        if not _is_same(package.get(name), found.get(name)):
            raise file.refused(
                f"is of another model than the package: its {name} is {found.get(name)!r:.60}, not "
                f"{package.get(name)!r:.60}. Name the GGUF file from which the package was made"
            )


def _is_same(own: object, theirs: object) -> bool:
    if isinstance(own, float | np.ndarray) and isinstance(theirs, float | np.ndarray):
        return bool(np.allclose(own, theirs, rtol=1e-4, atol=0))
    return own == theirs


def _encoded(value: Any) -> Any:
    """Return texts as the bytes that they were in the file. Some are not UTF-8."""
    if isinstance(value, list):
        return [_encoded(item) for item in value]
    return value.encode("utf-8", "surrogateescape") if isinstance(value, str) else value

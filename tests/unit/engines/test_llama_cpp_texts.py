"""Tests that the product reads a text as llama.cpp feeds it: special tokens at both ends, in texts and chats.

Tokenizers are made with the special tokens of the published models (`permille.models.catalogue`). If the GGUF
export does not support a family, a Llama gets its tokenizer: the tokens do not depend on the family.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
from gguf import GGUFReader
from tokenizers import Regex, pre_tokenizers

from permille.engines.gguf.export import GGUF_FILE, export_gguf
from permille.models.catalogue import CATALOGUE, Framing
from permille.models.gguf.folder import convert
from permille.models.gguf.tokenizer import DIGITS, GPT2, SPLITS
from permille.models.loading import FileTokenizer
from permille_agent.text.documents import Conversation, PlainText
from permille_agent.text.tokens import TextTokenizer
from permille_lab.exports.llama_cpp import LlamaCpp
from tests.packages import tiny_tokenizer
from tests.unit.engines.gguf_packages import (
    FAMILIES,
    TEXTS,
    VOCABULARY,
    exported_package,
    sentencepiece_tokenizer,
)
from tests.unit.engines.tiny import POSITIONS
from tests.unit.models.gguf_files import rewritten

Place = Literal["config", "processor", "both", "none"]
PLACES: tuple[Place, ...] = ("config", "processor", "both", "none")
CUTS = {
    "SmolLM2-135M-Instruct": "smollm",
    "Llama-3.2-1B": "llama-bpe",
    "TinyLlama-1.1B": "spaced",
    "Llama-2-7B": "spaced",
    "Mistral-7B-v0.3": "spaced",
    "Qwen2.5-0.5B": "qwen2",
    "Qwen3-0.6B": "qwen2",
    "SmolLM3-3B": "smaug-bpe",
    "Phi-3.5-mini": "spaced",
    "Gemma-2-2b": "unspaced",
    "Gemma-3-1b": "unspaced",
    "Gemma-2b": "unspaced",
    "OLMo-2-1B": "dbrx",
    "OLMo-3-7B": "dbrx",
    "Granite-3.3-2b": "refact",
}
"""The cut of the tokenizer by model. `spaced` and `unspaced` are sentencepiece with and without a space
before a text. The tokenizers of the other models are made with GPT-2's cut."""
UNKNOWN = Framing(bos="<s>", between="</s>", template_bos=True)
"""Stands for a model whose settings are not known. All settings are tested with every kind of tokenizer."""
TALK = (("user", "Who made  heaven?"), ("assistant", "Nobody knows."), ("user", " Why,\nthen?"))


def made_tokenizer(cut: str, *, begins: bool, ends: bool = False) -> dict[str, Any]:
    """Return a `tokenizer.json`. Its post-processor writes `<s>` before and `</s>` after a text, if asked."""
    if cut in ("spaced", "unspaced"):
        document: dict[str, Any] = json.loads(sentencepiece_tokenizer())
        if cut == "unspaced":
            document["normalizer"] = document["normalizer"]["normalizers"][1]
            document["decoder"]["decoders"].pop()
    else:
        tokenizer = tiny_tokenizer(VOCABULARY - 8)
        patterns, whole_words = SPLITS[cut]
        steps: list[Any] = [
            pre_tokenizers.Digits(individual_digits=True)
            if pattern == DIGITS
            else pre_tokenizers.Split(Regex(pattern), "isolated")
            for pattern in patterns
            if pattern != GPT2
        ]
        last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=GPT2 in patterns)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, last])
        document = json.loads(tokenizer.to_str())
        document["model"]["ignore_merges"] = whole_words
    names = {token["content"]: token["id"] for token in document["added_tokens"]}
    sequence = [
        *([{"SpecialToken": {"id": "<s>", "type_id": 0}}] if begins else []),
        {"Sequence": {"id": "A", "type_id": 0}},
        *([{"SpecialToken": {"id": "</s>", "type_id": 0}}] if ends else []),
    ]
    special = {name: {"id": name, "ids": [names[name]], "tokens": [name]} for name in ("<s>", "</s>")}
    document["post_processor"] = {
        "type": "TemplateProcessing",
        "single": sequence,
        "pair": [*sequence, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": special,
    }
    return document


def made_files(cut: str, place: Place, *, template_bos: bool | None) -> dict[str, bytes]:
    """Return the files of a tokenizer whose BOS is named in `place`."""
    config: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>"}
    if place in ("config", "both"):
        config["add_bos_token"] = True
    document = made_tokenizer(cut, begins=place in ("processor", "both"))
    files = {
        "tokenizer.json": json.dumps(document).encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
    }
    return files | {
        "chat_template.jinja": (
            ("{{ bos_token }}" if template_bos else "")
            + "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
            "{% if add_generation_prompt %}assistant:{% endif %}"
        ).encode()
    }


def check_reads_like(peer: LlamaCpp, files: Mapping[str, bytes], folder: Path, *, ends: bool = False) -> None:
    """Check that the tokenizers of library and agent give the tokens that llama.cpp feeds.

    Args:
        ends: whether every text ends with EOS. llama.cpp writes it before an answer, too. We do not.
    """
    asked_end = -1 if ends else None
    folder.mkdir(exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    library, agent = FileTokenizer(folder), TextTokenizer(files.get)
    for text in TEXTS:
        fed = peer.tokens(text)
        assert agent.prompt(text).tolist() == fed, text
        assert library.encode(text) == fed, text
        assert row_of(agent, PlainText(text)) == fed, text
    for count in (1, 3):
        assert agent.chat_prompt(TALK[:count]).tolist() == peer.chat_tokens(TALK[:count])[:asked_end]
    asked = peer.chat_tokens(TALK[:1])[:asked_end]
    assert row_of(agent, Conversation(TALK[:2]))[: len(asked)] == asked
    agent.close()


def row_of(agent: TextTokenizer, content: PlainText | Conversation) -> list[int]:
    found = agent.tokenize(content, row_tokens=POSITIONS)
    return [*found.bos, *found.ids_T.tolist()]


def check_files(family: str, files: Mapping[str, bytes], work: Path) -> None:
    """Export a model with these files, and check them and the files of the import of the export."""
    package = exported_package(work / "blobs", family, files=files)
    export_gguf(package, None, work / "out", kind="f16")
    (work / "back").mkdir()
    convert(work / "out" / GGUF_FILE, work / "back")
    with LlamaCpp(work / "out" / GGUF_FILE, context=POSITIONS) as peer:
        check_reads_like(peer, files, work / "files")
        check_reads_like(peer, files_in(work / "back"), work / "again")


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".json", ".jinja")}


@pytest.mark.slow
@pytest.mark.parametrize("name", [entry.name for entry in CATALOGUE])
def test_a_published_model_reads_a_text_like_llama_cpp(name: str, tmp_path: Path) -> None:
    (entry,) = (entry for entry in CATALOGUE if entry.name == name)
    framing = entry.framing or UNKNOWN
    files = made_files(
        CUTS.get(name, "gpt-2"),
        "none" if framing.bos is None else "processor",
        template_bos=framing.template_bos,
    )
    check_files(entry.family if entry.family in FAMILIES else "llama", files, tmp_path)


@pytest.mark.parametrize("template_bos", [True, False])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("cut", ["llama-bpe", "spaced"])
def test_bos_comes_once_wherever_it_is_named(
    cut: str, place: Place, template_bos: bool, tmp_path: Path
) -> None:
    check_files("llama", made_files(cut, place, template_bos=template_bos), tmp_path)


@pytest.mark.parametrize("cut", ["llama-bpe", "spaced"])
@pytest.mark.parametrize(
    "keys",
    [
        {"add_bos_token": None},
        {"add_bos_token": True, "bos_token_id": None},
        {"add_bos_token": True, "bos_token_id": 1 << 31},
        {"add_bos_token": True, "add_eos_token": True},
        {"add_eos_token": True, "eos_token_id": None},
        {"padding_token_id": (1 << 32) - 1, "unknown_token_id": VOCABULARY},
        {"token_type": None},
    ],
    ids=str,
)
def test_a_file_is_read_like_llama_cpp_reads_it(cut: str, keys: Mapping[str, Any], tmp_path: Path) -> None:
    files = made_files(cut, "none", template_bos=False)
    export_gguf(
        exported_package(tmp_path / "blobs", "llama", files=files), None, tmp_path / "out", kind="f16"
    )
    changed = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    path = rewritten(GGUFReader(tmp_path / "out" / GGUF_FILE), tmp_path / "changed.gguf", {}, changed)
    (tmp_path / "folder").mkdir()
    convert(path, tmp_path / "folder")
    with LlamaCpp(path, context=POSITIONS) as peer:
        ends = "add_eos_token" in keys
        check_reads_like(peer, files_in(tmp_path / "folder"), tmp_path / "files", ends=ends)

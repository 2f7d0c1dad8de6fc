"""Tests of the files beside a tokenizer, in all their forms."""

import json

import pytest

from permille.errors import PackageError
from permille.tokenizer_files import TokenizerFiles


def read(**files: object) -> TokenizerFiles:
    """Read files with these contents.

    Keyword names have underscores for dots, and objects are written as JSON.
    """

    def read_file(name: str) -> bytes | None:
        value = files.get(name.replace(".", "_"))
        return value if value is None or isinstance(value, bytes) else json.dumps(value).encode()

    return TokenizerFiles.read(read_file)


def test_a_model_without_files_says_nothing() -> None:
    found = read()
    assert (found.special, found.add_bos, found.template, found.stop_ids) == ({}, False, None, ())
    assert found.variables == {"bos_token": "", "eos_token": ""}


def test_the_configuration_goes_before_the_map_and_objects_hold_their_content() -> None:
    found = read(
        tokenizer_config_json={"bos_token": {"content": "<b>"}, "eos_token": None, "add_bos_token": True},
        special_tokens_map_json={"bos_token": "<old>", "pad_token": "<p>", "unk_token": 3},
    )
    assert found.special == {"bos": "<b>", "pad": "<p>"}
    assert found.add_bos
    assert found.variables == {"bos_token": "<b>", "eos_token": "", "pad_token": "<p>"}


def test_all_ends_count_once_in_the_order_of_the_files() -> None:
    found = read(generation_config_json={"eos_token_id": [7, True, "2", 5]}, config_json={"eos_token_id": 7})
    assert found.stop_ids == (7, 5)


@pytest.mark.parametrize(
    "template", ["{{ x }}", [{"name": "rag", "template": "no"}, {"name": "default", "template": "{{ x }}"}]]
)
def test_a_template_stands_in_its_own_file_or_in_the_configuration(template: object) -> None:
    assert read(tokenizer_config_json={"chat_template": template}).template == "{{ x }}"
    both = read(tokenizer_config_json={"chat_template": template}, chat_template_jinja=b"own")
    assert both.template == "own"


@pytest.mark.parametrize("template", [3, ["x"], [{"name": ["default"], "template": "x"}], [{"name": "rag"}]])
def test_a_template_of_another_form_is_ignored(template: object) -> None:
    assert read(tokenizer_config_json={"chat_template": template}).template is None


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer_config_json": b"{"}, "tokenizer: A file of the tokenizer is not JSON"),
        ({"config_json": b"[" * 100_000}, "tokenizer: A file of the tokenizer is not JSON"),
        ({"chat_template_jinja": b"\xff"}, "chat-template: The chat template is not UTF-8"),
        ({"chat_template_jinja": b"x" * 70_000}, "has 70000 characters, more than 65536"),
    ],
)
def test_broken_files_are_refused(files: dict[str, bytes], message: str) -> None:
    with pytest.raises(PackageError, match=message):
        read(**files)


@pytest.mark.parametrize("template", ["", "\n "])
def test_an_empty_template_is_none(template: str) -> None:
    beside = {"chat_template.jinja": template.encode()}
    assert TokenizerFiles.read(beside.get).template is None
    config = {"tokenizer_config.json": json.dumps({"chat_template": template}).encode()}
    assert TokenizerFiles.read(config.get).template is None
